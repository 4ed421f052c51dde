"""``dfgnn.explain``: tells which path attention calls take, and why not the paths before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..compiling.rewrite import rewritten
from ..engine import paths

_WHAT = {
    "upstream": "the forward of the library that the layer was written for",
    "layer": "the whole layer as one autograd function",
    "edge projection": "the fused operators, the projection of the edges' attributes folded into them",
    **{path.name: path.what for path in paths.PATHS},
    "backend dfgnn": 'attention of your own, on the fused operators if compiled with backend="dfgnn"',
    "as written": "attention of your own, by the operations of your code",
}

_NONE = (
    "no attention of dfgnn was computed (edge_softmax, sddmm and spmm, which FAConv calls, are not listed)"
)


class AttentionCall(NamedTuple):
    """One attention call: the path that it took, and why not the paths that come before it in the list."""

    path: str
    what: str  # what was called: a layer, or a score with its shape and dtype
    declined: tuple[tuple[str, str], ...]  # (path, reason)

    def __str__(self) -> str:
        lines = [f"{self.what}: {self.path} ({_WHAT.get(self.path, self.path)})"]
        return "\n".join(lines + [f"    not {path}: {reason}" for path, reason in self.declined])


class Explanation(NamedTuple):
    """The result of :func:`explain`, to be printed."""

    calls: tuple[AttentionCall, ...]
    result: Any  # what the layer or function returned

    def __str__(self) -> str:
        return "\n".join(map(str, self.calls)) or _NONE


def explain(layer_or_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call a layer, a model or a function once, and say which path each of its attention calls took.

    A path is one way to compute the same numbers: a whole layer as one autograd function, the fused operators
    eagerly, one operator in compiled code, plain operations in forward mode. dfgnn takes the first that can
    carry out a call; this tells which, and what kept it from those that would have been faster.

    Args:
        layer_or_function: what to call: a layer of ``dfgnn.nn`` or ``dfgnn.nn.pyg``, a function of
            ``dfgnn.functional``, or a model or function that contains them. A module that ``torch.compile``
            made is compiled once more, to see what its graph calls, and what ``backend="dfgnn"`` makes of the
            attention in it that dfgnn's functions do not compute.
        args, kwargs: what to call it with; gradients, autocast and transforms as they are around the call.

    Returns:
        An :class:`Explanation`: ``calls``, in the order in which they were made, each with ``path``, ``what``
        and ``declined``, and ``result``. ``print`` shows it.

    Example::

        >>> import torch, dfgnn
        >>> graph = dfgnn.Graph.from_coo(torch.tensor([0, 1]), torch.tensor([1, 2]), num_nodes=3)
        >>> x = torch.ones(3, 2, 4)
        >>> print(dfgnn.explain(dfgnn.functional.dot_attention, graph, x, x, x))
        dot attention, 2 heads of 4, float32: eager (one autograd function on the fused operators)
            not parts: the graph is one, of this process alone
    """
    if not callable(layer_or_function):
        got = type(layer_or_function).__name__
        raise TypeError(f"dfgnn.explain: layer_or_function: expected a module or a function, got {got}")
    compiled = getattr(layer_or_function, "_torchdynamo_orig_callable", None)
    original = getattr(layer_or_function, "_orig_mod", compiled)
    if original is not None:
        return _explain_compiled(original, args, kwargs)
    before, paths.recorder = paths.recorder, paths.PathRecorder()
    try:
        result = layer_or_function(*args, **kwargs)
        calls = tuple(AttentionCall(*call) for call in paths.recorder.calls)
    finally:
        paths.recorder = before
    return Explanation(calls, result)


def _explain_compiled(original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Explanation:
    """Compiles `original` once more, and lists dfgnn's operators in the graphs that torch.compile records,
    and the attention of the user's own with what our backend makes of it."""
    calls: list[AttentionCall] = []

    def backend(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        for node in graph_module.graph.nodes:
            name = str(node.target)
            if name.startswith("dfgnn."):
                calls.append(AttentionCall("traced", name, (("eager", "a compiler is recording"),)))
        for found in rewritten(graph_module)[1].found:
            if found.form:
                calls.append(AttentionCall("backend dfgnn", f"{found.place}, {found.form}", ()))
            else:
                reason = ("backend dfgnn", found.reason)
                calls.append(AttentionCall("as written", str(found.place), (reason,)))
        return graph_module.forward

    result = torch.compile(original, backend=backend)(*args, **kwargs)
    return Explanation(tuple(calls), result)
