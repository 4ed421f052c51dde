"""Rewrites attention in Dynamo's graph into calls of dfgnn's operators, the most special that fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from . import calls, operations, padded, report, scores
from .normal_forms import Index
from .operations import arguments, name, shape, value
from .products import Products, Rows
from .recognise import Recogniser, Softmax, WeightedSum
from .report import Found, Report

# Attention of fewer numbers, edges x heads x columns in the mean over a graph, is left to Inductor, by the
# type of device: launches are most of its time there. Measured on an H200, times as fast as Inductor's: GAT
# of 17 million numbers 0.93, 25 million 1.11, 42 million 1.06, 67 million 1.23, 268 million 1.79; GATv2 of 25
# million 1.16, 42 million 2.4; dot products with projected edges of 11 million 0.74, 67 million 1.22. It is
# twice as many within CUDA graphs, which sort the edges at every replay, and for a sum without a softmax of
# its own, for which alone they are sorted.
MIN_ELEMENTS = {"cuda": 20_000_000}
# So many times as many where all scores are the compiler's, in whose kernels a softmax costs little:
# exponentials of clamped scores, 27 million, 0.82 (kernels alone 1.08); MLPs, 13 million, 0.97.
MORE = 4


def rewritten(
    graph_module: GraphModule, min_elements: int | None = None, replayed: bool = False
) -> tuple[GraphModule, Report]:
    """The module with its attention rewritten, or the module itself where nothing is; and what was found.
    min_elements: in place of `MIN_ELEMENTS`. replayed: whether it will be within CUDA graphs."""
    left: Report | None = None
    for offsets in (True, False):  # without attention segments are summed as they are written
        graph = Graph()
        output = graph.graph_copy(graph_module.graph, {})
        if output is not None:
            place = next(node for node in graph_module.graph.nodes if node.op == "output")
            graph.output(output).meta = dict(place.meta)
        work = _Rewriter(graph, min_elements, replayed, offsets)
        work.run()
        if work.report.rewritten or not work.offsets:
            break
        left = work.report if any(found.left for found in work.report.found) else None
    work.report = left or work.report
    if not work.changed:
        return graph_module, work.report
    graph.lint()
    made = GraphModule(graph_module, graph, type(graph_module).__name__)
    made.meta = dict(graph_module.meta)
    return made, work.report


class _Plan(NamedTuple):
    """One call that takes the place of a node."""

    node: Node
    call: Any
    args: tuple
    form: str
    softmax: Softmax | None


class _Rewriter:
    def __init__(self, graph: Graph, min_elements: int | None, replayed: bool, offsets: bool):
        self.graph, self.report, self.changed = graph, Report([]), False
        self.min_elements, self.replayed, self.offsets = min_elements, replayed, offsets
        self._pairs: dict[tuple, Node] = {}
        self._replaced: dict[Node, Node] = {}
        self._calls: dict[Node, scores.Call | None] = {}

    def run(self) -> None:
        operations.without_likeness(self.graph)
        self.forms = Products(operations.without_writes(self.graph))
        self.offsets = self.offsets and self.forms.without_offsets(self.graph)
        nodes = list(self.graph.nodes)
        self.grad = _grad_modes(nodes)
        self._bound_segments(nodes)
        found = Recogniser(nodes, self.forms)
        for refused in found.refused:
            self.report.found.append(Found(report.place_of(refused.node), "", refused.reason))
        softmaxes = {s.node: s for s in found.softmaxes.values() if self._may(s)}
        divided = {
            w.softmax.node: w.softmax
            for w in found.weighted
            if w.softmax is not None and w.node is not w.sum.node and self._may(w.softmax)
        }
        weighted = found.weighted
        plain = [w for w in weighted if w.softmax is None and w.gathered is not None]
        if self._left(softmaxes | divided, weighted):
            softmaxes, divided, weighted = {}, {}, plain
        whole, beside = self._whole(nodes, softmaxes | divided, weighted)
        order = {node: k for k, node in enumerate(nodes)}
        plans = [self._attention(w) for w in weighted if w.softmax is not None and w.softmax.node in whole]
        alone = [s for s in softmaxes.values() if s.node not in whole or s.node in beside]
        plans += [self._softmax_alone(s, found) for s in alone]
        graphs = {(p.args[0]) for p in plans}
        if self._sums_alone(plain):
            graphs |= {_edges(w.sum.at, w.gathered.at) for w in plain if w.gathered is not None}
        plans += self._sums(found, weighted, whole, graphs) + self._padded(nodes)
        for plan in sorted(plans, key=lambda plan: order[plan.node]):
            self._emit(plan)
        self._remove_unused(nodes)
        operations.without_unneeded_numbers(self.graph)

    # ---- what may be rewritten -----------------------------------------------------------------------------

    def _may(self, softmax: Softmax) -> bool:
        """Whether either all operations of a softmax record gradients, or none of them does."""
        if len({self.grad[node] for node in softmax.inner}) > 1:
            reason = "a part of it is computed under no_grad"
            self.report.found.append(Found(report.place_of(softmax.node), "", reason))
            return False
        return True

    def _least(self, node: Node) -> int:
        """The least number of elements that is not left to Inductor."""
        if self.min_elements is not None:
            return self.min_elements
        return (1 + self.replayed) * MIN_ELEMENTS.get(value(node).device.type, 0)

    def _are_many(self, numbers: Sequence[Any], least: int) -> bool:
        """Whether these numbers of elements are in the mean at least so many. One decision for all of them
        makes one guard on sizes that are symbolic. Sizes that depend on values count as many, but not within
        CUDA graphs, which could not contain what is made of them."""
        return operations.found_true(sum(numbers) >= least * len(numbers), unknown=not self.replayed)

    def _left(self, softmaxes: dict[Node, Softmax], weighted: list[WeightedSum]) -> bool:
        """Whether the graph's attention is so small that it is left to Inductor, which is told."""
        least = max(map(self._least, softmaxes), default=0)
        found = [self._call(w) for w in weighted if w.softmax is not None and w.softmax.node in softmaxes]
        if self.min_elements is None and found:
            least *= MORE if all(x is None or x.form.startswith("score_attention") for x in found) else 1
        sizes = {}
        for s in softmaxes.values():
            (edges, *rest) = shape(s.node)[s.dim :] + shape(s.node)[: s.dim]
            of = [w for w in weighted if w.softmax is not None and w.softmax.node is s.node]
            columns = max((math.prod(w.product.shape) // math.prod(rest) for w in of), default=1)
            sizes[s.node] = edges, math.prod(rest), columns
        if not least or self._are_many([math.prod(size) for size in sizes.values()], least):
            return False
        for node, (edges, heads, columns) in sizes.items():
            number = f"{edges:,} " if isinstance(edges, int) else ""
            reason = f"left to Inductor: {number}edges x {heads} heads x {columns} columns < {least:,}"
            self.report.found.append(Found(report.place_of(node), "", reason, left=True))
        return True

    def _sums_alone(self, sums: list[WeightedSum]) -> bool:
        """Whether segment sums are so large that edges are sorted for them alone. On a CPU Inductor's are as
        fast as ours: with one thread it takes 0.8 to 1.5 times as long."""
        if not sums or value(sums[0].node).device.type not in MIN_ELEMENTS:
            return False
        numbers = [shape(w.sum.src)[w.sum.dim] * math.prod(w.product.shape) for w in sums]
        return self._are_many(numbers, 2 * self._least(sums[0].node))

    def _alike(self, w: WeightedSum, leaves: tuple) -> bool:
        """Whether what a call computes from leaves records gradients alike, and none of it is written to."""
        ends: set[Node] = set()
        torch.fx.map_arg(leaves, ends.add)
        if w.softmax is not None:
            torch.fx.map_arg((w.softmax.maximum, w.softmax.sink), ends.add)
        inner = _between(w.node, ends)
        return not any(map(self.forms.is_written, inner | ends)) and len({self.grad[x] for x in inner}) == 1

    def _call(self, w: WeightedSum) -> scores.Call | None:
        """The call that takes the place of a softmax and its weighted sum."""
        if w.sum.node not in self._calls:
            shared = w.sum.base, w.sum.at.tensor, _specs(w.weights)
            found = scores.call_for(
                self.forms, w, lambda call: self._alike(w, (*shared, call.src.tensor, call.args))
            )
            self._calls[w.sum.node] = found
        return self._calls[w.sum.node]

    def _whole(
        self, nodes: list[Node], softmaxes: dict, weighted: list[WeightedSum]
    ) -> tuple[set[Node], set[Node]]:
        """Returns two sets. The first has the softmaxes that are rewritten together with their weighted sums,
        because nothing else needs their weights, or only detached. The second has those of the first whose
        weights something else needs, so that they are also computed alone."""
        own = [
            w for w in weighted
            if w.softmax is not None and w.softmax.node in softmaxes and self._call(w) is not None
        ]  # fmt: skip
        whole = {w.softmax.node for w in own if w.softmax is not None}
        dropped = [w.own.dropped[1] for w in own if w.own is not None and w.own.dropped is not None]
        for w in own:  # a mask that two sums share must be one mask
            if w.own is not None and w.own.dropped is not None and dropped.count(w.own.dropped[1]) > 1:
                whole.discard(w.softmax.node)  # type: ignore[union-attr]
        while True:
            sums = {w.node: w for w in own if w.softmax is not None and w.softmax.node in whole}
            inputs = {node: self._new_inputs(w) for node, w in sums.items()}
            needed = _needed(nodes, inputs)
            more = whole & _needed(nodes, inputs, with_gradients=True)
            for w in sums.values():  # weights behind a dropout are needed with its own mask
                if w.own is not None and w.own.dropped is not None and w.own.dropped[1] in needed:
                    more.add(w.softmax.node)  # type: ignore[union-attr]
            # A softmax that is divided by after the sum is no node that could be computed once more.
            more |= {node for node in whole & needed if name(node) != "div"}
            if not more:
                return whole, whole & needed
            whole -= more

    def _new_inputs(self, w: WeightedSum) -> set[Node]:
        """The nodes that a rewritten weighted sum reads."""
        call = self._call(w)
        assert call is not None
        found: set[Node] = {w.sum.base}
        sink = None if w.softmax is None else w.softmax.sink
        torch.fx.map_arg((_edges(w.sum.at, call.src), _specs(w.weights), call.args, sink), found.add)
        return found

    # ---- plans ---------------------------------------------------------------------------------------------

    def _attention(self, w: WeightedSum) -> _Plan:
        assert w.softmax is not None and w.own is not None
        dropout_p = 0.0 if w.own.dropped is None else w.own.dropped[0]
        found = self._call(w)
        assert found is not None
        softmax = _specs(w.weights), w.softmax.sink, dropout_p
        args = _edges(w.sum.at, found.src), _summed(w), softmax, *found.args
        return _Plan(w.node, found.function, args, found.form, w.softmax)

    def _softmax_alone(self, s: Softmax, found: Recogniser) -> _Plan:
        edges = _edges(s.at, s.at)
        args: tuple = (edges, s.like, s.dim, s.sink, s.score, value(s.node).dtype)
        return _Plan(s.node, calls.edge_softmax, args, "edge_softmax", s)

    def _sums(self, found: Recogniser, weighted: list[WeightedSum], whole: set, graphs: set) -> list[_Plan]:
        """Plans of the segment sums that are not part of an attention."""
        plans, done = [], set()
        for w in weighted:
            if (w.softmax is not None and w.softmax.node in whole) or w.gathered is None:
                continue
            if w.node is not w.sum.node:
                continue
            weights = w.weights if w.own is None else (w.own, *w.weights)
            leaves = w.sum.base, w.sum.at.tensor, w.gathered.at.tensor, _specs(weights), _at_nodes(w)
            if not self._alike(w, leaves):
                continue
            softmax = w.softmax is not None
            edges = _edges(w.sum.at, w.gathered.at)
            if not softmax and edges not in graphs:
                continue
            if any(factor.dropped for factor in weights):
                continue
            args = edges, _summed(w), _specs(weights), _at_nodes(w)
            plans.append(_Plan(w.sum.node, calls.weighted_sum, args, "spmm", w.softmax))
            done.add(w.sum.node)
        replaced = {w.sum.node for w in weighted if w.softmax is not None and w.softmax.node in whole}
        for total in found.sums.values():
            small = value(total.node).dtype in (torch.bfloat16, torch.float16)
            if small and total.node not in done | replaced:
                given = (total.base, total.dim, total.at.node, total.src)
                plans.append(_Plan(total.node, calls.segment_sum, given, "index_add in float32", None))
        return plans

    def _padded(self, nodes: list[Node]) -> list[_Plan]:
        """Plans of attention within padded batches."""
        plans = []
        for node in nodes:
            found = padded.call_for(node)
            if isinstance(found, str):
                self.report.found.append(Found(report.place_of(node), "", found))
            elif found is not None:
                plans.append(_Plan(node, *found, padded.FORM, None))
        return plans

    # ---- int(index.max()) + 1 segments ---------------------------------------------------------------------

    def _bound_segments(self, nodes: list[Node]) -> None:
        """Gives tensors of that many segments, of which only the rows at the index are read, as many rows as
        another tensor has that is indexed by it: no index is larger, and the number is not needed."""
        if not operations.numbers(self.graph):
            return
        sizes: dict[Any, list[tuple[Node, int]]] = {}
        for node in nodes:
            gathered, total = self.forms.gather(node), self.forms.sum(node)
            if gathered is not None:
                sizes.setdefault(gathered.at.key, []).append((gathered.source, gathered.dim))
            if total is not None:
                sizes.setdefault(total.at.key, []).append((total.base, total.dim))
        order = {node: k for k, node in enumerate(nodes)}
        for node in nodes:
            dims = [k for k, size in enumerate(shape(node)) if operations.is_of_values(size)]
            if len(dims) != 1 or name(node) not in ("zeros", "full") or self.forms.is_written(node):
                continue
            key = self._read_at(node, dims[0])
            for source, dim in sizes.get(key, ()):
                size = shape(source)[dim]
                before = isinstance(size, int) or order[source] < order[node]
                if before and not operations.is_of_values(size):
                    self._resize(node, dims[0], size, (source, dim))
                    break

    def _read_at(self, base: Node, dim: int) -> Any:
        """The key of the index by which rows of a new tensor are read and written, or those of a tensor that
        sums into it. None if there are several such indices or other uses."""
        forms: Any = self.forms
        keys, todo = set(), [base]
        while todo:
            node = todo.pop()
            for user in node.users:
                gathered, total, most = (f(user) for f in (forms.gather, forms.sum, forms.maximum))
                if gathered is not None and gathered.source is node and gathered.dim == dim:
                    keys.add(gathered.at.key)
                    continue
                if total is not None and total.base is node and total.dim == dim:
                    keys.add(total.at.key)
                elif most is not None and arguments(user)["input"] is node and most[1] == dim:
                    keys.add(most[2].key)
                elif user.all_input_nodes != [node] or name(user) not in (
                    "add",
                    "clamp",
                    "clamp_min",
                    "detach",
                ):
                    return None
                todo.append(user)
        return keys.pop() if len(keys) == 1 else None

    def _resize(self, node: Node, dim: int, size: Any, source: tuple[Node, int]) -> None:
        sizes = list(operations.sizes_of(node))
        if isinstance(size, int):
            sizes[dim] = size
        else:
            with self.graph.inserting_before(node):
                sizes[dim] = self.graph.call_method("size", source)
            sizes[dim].meta = {"example_value": size}
        fill = arguments(node).get("fill_value")
        node.args = (tuple(sizes),) if fill is None else (tuple(sizes), fill)
        node.kwargs = {word: x for word, x in node.kwargs.items() if word not in ("size", "fill_value")}
        self.changed = True

    # ---- changing the graph --------------------------------------------------------------------------------

    def _emit(self, plan: _Plan) -> None:
        args = plan.args
        with self.graph.inserting_before(plan.node):
            if isinstance(args[0], tuple):
                args = (self._edge_index(args[0]), *args[1:])
            args = torch.fx.map_arg(args, lambda node: self._replaced.get(node, node))
            new = self.graph.call_function(plan.call, args)
        new.meta = dict(plan.node.meta)
        plan.node.replace_all_uses_with(new)
        self._replaced[plan.node] = new
        self.changed = True
        told = plan.node if plan.softmax is None else plan.softmax.node
        self.report.found.append(Found(report.place_of(told), plan.form, ""))

    def _edge_index(self, ends: tuple) -> Node:
        first, first_row, second, second_row = ends
        if first is second and (first_row, second_row) == (0, 1) and operations.same(shape(first)[0], 2):
            return first
        if ends not in self._pairs:
            rows = (-1 if first_row is None else first_row), (-1 if second_row is None else second_row)
            self._pairs[ends] = self.graph.call_function(calls.edge_pair, (first, rows[0], second, rows[1]))
        return self._pairs[ends]

    def _remove_unused(self, nodes: list[Node]) -> None:
        for node in reversed(nodes):
            known = (bool(arguments(node)) and not operations.written(node)) or node in self._replaced
            if known and not node.users:
                self.graph.erase_node(node)


def _edges(dst: Index, src: Index) -> tuple:
    """(tensor, row, tensor, row) of sources and destinations."""
    return src.tensor, src.row, dst.tensor, dst.row


def _summed(w: WeightedSum) -> tuple:
    """`calls.Summed`, in whose layout the product's number is a step on the sums."""
    scale = w.product.scale
    layout = w.product.shape, w.heads, ((("times", scale),) if scale != 1 else ()) + w.product.steps
    return w.sum.base, w.sum.dim, w.sum.fill, layout


def _specs(factors: tuple[Rows, ...]) -> tuple:
    return tuple((factor.node, factor.steps) for factor in factors)


def _at_nodes(w: WeightedSum) -> tuple:
    """The specs of values whose rows are those of the gathered tensor."""
    assert w.gathered is not None
    return tuple((f.node if f.constant else w.gathered.source, f.steps) for f in w.values)


def _needed(nodes: list[Node], inputs: dict[Node, set[Node]], with_gradients: bool = False) -> set[Node]:
    """The nodes that results or effects depend on. inputs: of nodes that are replaced, the new ones.
    with_gradients: those alone that gradients may reach, not what is detached."""
    needed: set[Node] = set()
    for node in reversed(nodes):
        effect = node.op in ("output", "placeholder") or operations.written(node) or not arguments(node)
        if with_gradients and name(node) == "detach":
            needed.add(node)
        elif node in needed or effect:
            needed |= {node} | (inputs[node] if node in inputs else set(node.all_input_nodes))
    return needed


def _between(node: Node, leaves: set[Node]) -> set[Node]:
    """The nodes from which node is computed, up to leaves and to what is no operation on floating point."""
    found, todo = {node}, [node]
    while todo:
        for x in todo.pop().all_input_nodes:
            tensor = value(x)
            floats = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            if floats and x not in leaves and x not in found and x.op != "placeholder" and name(x):
                found.add(x)
                todo.append(x)
    return found


def _grad_modes(nodes: list[Node]) -> dict[Node, bool]:
    """Whether gradients are recorded at each node; True at the beginning."""
    modes, mode = {}, True
    for node in nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") in (
            "_set_grad_enabled",
            "set_grad_enabled",
        ):
            mode = bool(node.args[0])
        modes[node] = mode
    return modes
