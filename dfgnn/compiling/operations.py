"""What a node of Dynamo's graph computes: one name for all spellings of an operation.

The graph that Dynamo hands to a backend holds the calls as the user wrote them: ``x.index_select(0, i)``,
``torch.index_select(x, 0, i)`` and ``torch.index_select(input=x, dim=0, index=i)`` are three kinds of node.
`name` gives the operation's name, and `arguments` its arguments by name.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..runtime import torch_internals as internals

_SAME = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
    "negative": "neg", "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim",
    "view": "reshape", "reshape_as": "view_as", "broadcast_to": "expand", "clip": "clamp",
    "_segment_reduce": "segment_reduce",
}  # fmt: skip

# Name -> the names of its positional arguments, as torch documents them.
_SIGNATURES = {name: tuple(words.split()) for name, words in {
    "index_select": "input dim index", "gather": "input dim index",
    "take_along_dim": "input indices dim", "getitem": "input index",
    "select": "input dim index", "unbind": "input dim", "embedding": "input weight",
    "scatter_add": "input dim index src", "scatter_reduce": "input dim index src reduce",
    "index_add": "input dim index source", "index_reduce": "input dim index source reduce",
    "index_put": "input indices values accumulate",
    "segment_reduce": "input reduce", "repeat_interleave": "input repeats dim", "diff": "input",
    "isinf": "input", "where": "condition input other",
    "add": "input other", "sub": "input other", "mul": "input other", "div": "input other",
    "exp": "input", "neg": "input", "detach": "input", "clone": "input", "contiguous": "input",
    "clamp": "input min max", "clamp_min": "input min", "maximum": "input other",
    "dropout": "input p training inplace", "leaky_relu": "input negative_slope inplace",
    "sum": "input dim keepdim", "unsqueeze": "input dim", "squeeze": "input dim", "t": "input",
    "transpose": "input dim0 dim1", "movedim": "input source destination",
    "flatten": "input start_dim end_dim", "unflatten": "input dim sizes",
    "expand_as": "input other", "view_as": "input other", "type_as": "input other",
    "to": "input dtype", "type": "input dtype", "float": "input", "double": "input", "half": "input",
    "bfloat16": "input", "long": "input", "int": "input",
    "zeros_like": "input", "full_like": "input fill_value", "full": "size fill_value",
    "new_full": "input size fill_value",
}.items()}  # fmt: skip
# Operations whose sizes, dimensions or counts are the remaining arguments, or one tuple of them.
_MANY = {"reshape": "shape", "expand": "size", "permute": "dims", "repeat": "repeats", "new_zeros": "size"}
_FREE = {"zeros": "size"}  # the same without a tensor before them


def name(node: Any) -> str:
    """The name of the operation, without the underscore of a call in place; "" for anything else."""
    if not isinstance(node, Node):
        return ""
    if node.op == "call_method":
        found = str(node.target)
    elif node.op != "call_function":
        return ""
    elif getattr(node.target, "__module__", None) in internals.MODULES_OF_FUNCTIONS:
        found = getattr(node.target, "__name__", "")
    else:  # a library may have put a function of its own in the place of one of torch's
        found = next((word for word in _SIGNATURES if getattr(torch, word, None) is node.target), "")
    if found.endswith("_") and not found.endswith("__"):
        found = found[:-1]
    return _SAME.get(found, found)


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a node by the names of torch's documentation; {} for an operation that is not listed
    here."""
    called, kwargs = name(node), {("input" if k == "self" else k): v for k, v in node.kwargs.items()}
    args = node.args
    if called in _MANY or called in _FREE:
        first = 0 if called in _FREE else 1
        many, word = args[first:], (_MANY | _FREE)[called]
        if len(many) == 1 and isinstance(many[0], (tuple, list, Node)):
            many = _sizes(many[0])  # type: ignore[assignment]
        given = {"input": args[0]} if first and args else {}
        return {**given, **kwargs} if word in kwargs else {**given, word: many, **kwargs}
    words = _SIGNATURES.get(called)
    if words is None:
        return {}
    if len(args) > len(words):
        return {**dict(zip(words, args)), "more": args[len(words) :], **kwargs}
    return {**dict(zip(words, args)), **kwargs}


def _sizes(given: Any) -> Any:
    """A tuple of sizes from an argument, which may be a node that makes a torch.Size of them."""
    if isinstance(given, Node):
        if given.op == "call_function" and given.target is torch.Size:
            return tuple(given.args[0])  # type: ignore[arg-type]
        return (given,)
    return tuple(given)


def sizes_of(node: Node) -> tuple:
    """The sizes that a call of zeros or full is given."""
    return tuple(_sizes(arguments(node)["size"]))


def value(node: Any) -> Any:
    """The tensor without values, or the size, that Dynamo found for a node."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def shape(node: Any) -> tuple:
    found = value(node)
    return tuple(found.shape) if isinstance(found, Tensor) else ()


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal, whatever values symbols have; adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return a is b or bool(statically_known_true(a == b))


def found_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal in this compilation, which a guard then makes sure of."""
    return same(a, b) or found_true(a == b)


def found_true(condition: Any, unknown: bool = False) -> bool:
    """Whether a condition of sizes holds in this compilation, which a guard then makes sure of. unknown: the
    answer where sizes depend on values."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return bool((guard_or_true if unknown else guard_or_false)(condition))


# ---- numbers that depend on values ------------------------------------------------------------------------


def numbers(graph: Graph) -> list[Node]:
    """The nodes that are ``tensor.item()``."""
    return [node for node in graph.nodes if name(node) == "item" and not isinstance(value(node), Tensor)]


def is_of_values(size: Any) -> bool:
    """Whether a size depends on values of tensors."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def without_unneeded_numbers(graph: Graph) -> None:
    """Removes numbers that only the compiler's own checks of them still read: their computation waits for a
    GPU."""
    for node in numbers(graph):
        found, todo = [node], [node]
        while todo:
            more = [user for user in todo.pop().users if user not in found]
            found, todo = found + more, todo + more
        if all(_is_of_numbers(x) for x in found[1:]):
            order = {x: k for k, x in enumerate(graph.nodes)}
            inner = [x for x in node.all_input_nodes if name(x) == "max"]
            for x in sorted(found, key=order.__getitem__, reverse=True) + inner:
                if not x.users:
                    graph.erase_node(x)


def _is_of_numbers(node: Node) -> bool:
    if node.target is internals.assert_scalar:
        return True
    found = value(node)
    return isinstance(found, (torch.SymInt, torch.SymBool, torch.Size)) and not written(node)


# ---- operations in place ----------------------------------------------------------------------------------

_IN_PLACE = {
    getattr(operator, f"i{word}"): getattr(operator, word) for word in ("add", "sub", "mul", "truediv")
}
_SETS = {operator.setitem}


def written(node: Node) -> list[Node]:
    """The tensors that a node writes to."""
    if node.op == "call_method":
        called = str(node.target)
        in_place = called.endswith("_") and not called.endswith("__")
        return (
            [a for a in node.args[:1] if isinstance(a, Node)] if in_place or called == "__setitem__" else []
        )
    if node.op != "call_function":
        return []
    target: Any = node.target
    found: list[Any] = []
    schema = getattr(target, "_schema", None)
    if schema is not None and schema.is_mutable:
        found += node.args
    called = getattr(target, "__name__", "")
    if target in _IN_PLACE or target in _SETS or (called.endswith("_") and not called.endswith("__")):
        found += node.args[:1]
    if (
        called.startswith("i")
        and getattr(target, "__module__", None) == "_operator"
        and called[1:] in vars(operator)
    ):
        found += node.args[:1]
    if called == "batch_norm":
        found += [*node.args[1:3], node.kwargs.get("running_mean"), node.kwargs.get("running_var")]
    if node.kwargs.get("inplace") is True or name(node) == "dropout" and len(node.args) > 3 and node.args[3]:
        found += node.args[:1] or [node.kwargs.get("input")]
    out = node.kwargs.get("out")
    found += [out] if isinstance(out, Node) else out if isinstance(out, (tuple, list)) else []
    return list(dict.fromkeys(x for x in found if isinstance(x, Node)))


def _out_of_place(node: Node) -> Callable[[], None] | None:
    """What turns a call in place into one that returns a new tensor; None if it has none that gives the same.
    The base's dtype must not promote, because the new tensor's would be the promoted one."""
    base = value(node.args[0]) if node.args else None
    if not isinstance(base, Tensor):
        return None
    for other in node.all_input_nodes:
        found = value(other)
        if isinstance(found, Tensor) and found.is_floating_point() and found.dtype != base.dtype:
            return None
    if any(
        isinstance(x, complex) or (isinstance(x, float) and not base.is_floating_point()) for x in node.args
    ):
        return None

    def change() -> None:
        if node.op == "call_method":
            node.target = str(node.target)[:-1]
        else:
            node.target = _IN_PLACE[node.target]  # type: ignore[index]

    if node.op == "call_method":
        return change if hasattr(Tensor, str(node.target)[:-1]) else None
    return change if node.target in _IN_PLACE else None


def storage(node: Any) -> Any:
    """What tells whether two nodes' tensors share memory; None if the node is no tensor with memory."""
    found = value(node)
    return internals.storage_of(found) if isinstance(found, Tensor) else None


def without_writes(graph: Graph) -> set[Any]:
    """Turns calls in place on tensors of the graph's own into calls that return new tensors, as the compiler
    behind would. Returns the storages that are still written to after that, of inputs and of tensors of which
    another view is read behind the write: what a node reads of them depends on when it does."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    holders: dict[Any, list[Node]] = {}
    left: set[Any] = set()
    for node in order:
        found = value(node)
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, Tensor):
                holders.setdefault(internals.storage_of(x), []).append(node)

    def is_read(other: Node, since: Node) -> bool:
        """Whether what a node holds, when another writes to it, is read after that."""
        place = order[since]
        return order[other] < place and any(is_behind(place, user) for user in other.users)

    def is_behind(place: int, user: Node) -> bool:
        return order[user] > place

    for node in order:
        for base in written(node):
            place = storage(base)
            own = place in holders and holders[place][0].op in ("call_function", "call_method")
            may = own and place not in left and storage(node) == place and base is node.args[0]
            may = may and not any(other is not base and is_read(other, node) for other in holders[place])
            change = _out_of_place(node) if may else None
            if change is None:
                left.add(place)
                continue
            change()
            base.replace_all_uses_with(node, functools.partial(is_behind, order[node]))
    return left


def without_likeness(graph: Graph) -> None:
    """Turns x.new_zeros(size) and x.new_full(size, fill) into functions that do not take x, so that a sum of
    messages does not need messages for the tensor into which it sums."""
    for node in graph.nodes:
        called, given = name(node), arguments(node)
        if (
            called not in ("new_zeros", "new_full")
            or not isinstance(value(node), Tensor)
            or "size" not in given
        ):
            continue
        tensor = value(node)
        node.op, node.target = "call_function", torch.zeros if called == "new_zeros" else torch.full
        size = given["size"]
        size = size[0] if len(size) == 1 and isinstance(size[0], Node) and called == "new_zeros" else size
        node.args = (size,) if called == "new_zeros" else (size, given["fill_value"])
        node.kwargs = dict(dtype=tensor.dtype, device=tensor.device)


def graph_without_dropout(graph_module: GraphModule) -> GraphModule:
    """A copy of a module whose dropout drops nothing."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in list(graph.nodes):
        if node.op != "output" and name(node).endswith("dropout"):
            node.replace_all_uses_with(node.args[0] if node.args else node.kwargs["input"])
            graph.erase_node(node)
    return GraphModule(graph_module, graph)
