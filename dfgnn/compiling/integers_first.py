"""Takes what a graph computes of integers alone out of it, to be computed before: `integers_first`.

In a step that `dfgnn.capture` captures, edges and masks that come of the batch alone do not change, and it
takes them from its first runs, so that nothing waits for their values and nothing is sorted anew. Within
compiled code it does not see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..runtime import torch_internals as internals
from .operations import name, value

#: Beginnings of the names of operations whose results are random, or have no values.
_UNKNOWN = ("rand", "bernoulli", "multinomial", "normal", "poisson", "empty", "new_empty")


def integers_first(
    graph_module: GraphModule, example_inputs: Sequence[Any]
) -> tuple[GraphModule, Sequence[Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """(the graph without these computations, its inputs, what makes of a function of these one of the inputs
    that were given)."""
    made = _of_integers(graph_module.graph)
    outputs = [node for node in made if not made[node] and _is_used(node, made)]
    if not outputs:
        return graph_module, example_inputs, lambda function: function
    first, rest = Graph(), Graph()
    in_first: dict[Node, Node] = {}
    in_rest: dict[Node, Node] = {}
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            in_first[node] = first.placeholder(node.name)
            in_rest[node] = _placeholder(rest, node)
    for node in made:
        in_first[node] = first.node_copy(node, in_first.__getitem__)
    first.output(tuple(in_first[node] for node in outputs))
    for node in outputs:
        in_rest[node] = _placeholder(rest, node)

    def known(node: Node) -> Node:
        if node not in in_rest:  # it is computed again
            in_rest[node] = rest.node_copy(node, known)
        return in_rest[node]

    for node in graph_module.graph.nodes:
        if node.op != "placeholder" and node not in made:
            in_rest[node] = rest.node_copy(node, known)
    integers = GraphModule(graph_module, first)

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs: function(*inputs, *integers(*inputs))

    inputs = [*example_inputs, *map(value, outputs)]
    return GraphModule(graph_module, rest), inputs, before


def _placeholder(graph: Graph, node: Node) -> Node:
    made = graph.placeholder(node.name)
    made.meta = dict(node.meta)
    return made


def _of_integers(graph: Graph) -> dict[Node, bool]:
    """Returns, for each node that is computed from integers alone, whether it must not be handed over as a
    result: a view, a tuple, or what is made without any tensor. Returns {} if an integer tensor is written
    to."""
    made: dict[Node, bool] = {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    memory = {internals.storage_of(x) for x in _tensors(*inputs) if isinstance(x, Tensor)}
    for node in graph.nodes:
        given: list[Node] = []
        map_arg((node.args, node.kwargs), given.append)
        if node.op not in ("call_function", "call_method"):
            continue
        if _writes(node):
            if given and _are_integers(given[0]):
                return {}
            continue
        known = all(x in made or (x.op == "placeholder" and _are_integers(x)) for x in given)
        called = name(node)
        if known and called and not called.startswith(_UNKNOWN) and _are_integers(node):
            x = value(node)
            made[node] = not (given and isinstance(x, Tensor)) or internals.storage_of(x) in memory
            if not made[node]:
                memory.add(internals.storage_of(x))
    return made


def _is_used(node: Node, made: dict[Node, bool]) -> bool:
    """Whether the rest of the graph uses the node, or a view of it that the rest computes."""
    return any(user not in made or (made[user] and _is_used(user, made)) for user in node.users)


def _writes(node: Node) -> bool:
    word = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = word.endswith("_") and not word.endswith("__")
    return in_place or word in ("setitem", "__setitem__") or "out" in node.kwargs


def _tensors(*nodes: Node) -> list[Any]:
    found: list[Any] = []
    for x in map(value, nodes):
        found += x if isinstance(x, (tuple, list)) else [x]
    return found


def _are_integers(node: Node) -> bool:
    """Whether a node is a tensor, or tensors, without gradients or fractions."""
    return all(
        isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex()) for x in _tensors(node)
    )
