"""The backend: rewrites Dynamo's graph, and hands it to Inductor."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from ..runtime import cuda_graphs
from ..runtime import torch_internals as internals
from . import operations
from .integers_first import integers_first
from .report import Report
from .rewrite import rewritten

_log = logging.getLogger("dfgnn.compile")
#: The backend's option in addition to Inductor's: see `compile`.
MIN_ELEMENTS = "dfgnn.min_elements"
#: Called with the report of each compiled graph.
listeners: list[Callable[[Report], None]] = []


def backend(
    graph_module: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Any = None
) -> Callable[..., Any]:
    """What ``torch.compile(model, backend="dfgnn")`` calls with each graph."""
    options, least = _options(mode, options)
    whole = None
    if cuda_graphs.in_captured_step():
        # Launches cost nothing in its CUDA graph, and edges that stay the same are sorted before.
        least = 0 if least is None else least
        graph_module, example_inputs, whole = integers_first(graph_module, example_inputs)
    options = internals.inductor_options(mode, options)
    replayed = options.get("triton.cudagraphs", internals.inductor_uses_cuda_graphs())
    made, report = rewritten(graph_module, least, replayed)
    asks = bool(operations.numbers(made.graph))
    if asks and (replayed or made is graph_module):
        internals.NumbersRecorded.restart()
    try:
        compiled = internals.compile_fx(made, example_inputs, options, ours=made is not graph_module)
    except Exception:
        if asks:  # not all code can be compiled with symbols for them
            internals.NumbersRecorded.restart()
        raise
    tell(report)
    return compiled if whole is None else whole(compiled)


def _options(mode: str | None, options: dict[str, Any] | None) -> tuple[dict[str, Any], int | None]:
    """(Inductor's options, our own)."""
    if mode is not None:
        known = internals.inductor_modes()
        if mode not in known:
            raise ValueError(f"dfgnn.compile: mode: expected one of {', '.join(known)}, got {mode!r}")
    if options is not None and not isinstance(options, dict):
        raise TypeError(f"dfgnn.compile: options: expected a dict or None, got {type(options).__name__}")
    of_inductor = dict(options or {})
    least = of_inductor.pop(MIN_ELEMENTS, None)
    if least is not None and (not isinstance(least, int) or least < 0):
        raise ValueError(f"dfgnn.compile: options: expected {MIN_ELEMENTS} of at least 0, got {least!r}")
    if mode is not None and of_inductor:
        raise ValueError(
            f"dfgnn.compile: options: expected none but {MIN_ELEMENTS} with a mode, which is a set of "
            f"options, got {', '.join(of_inductor)}"
        )
    names = internals.names_of_inductor() if of_inductor else []
    for name in of_inductor:
        if name.replace("-", "_") not in names:
            like = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {like[0]}?" if like else "Inductor's list_options() has all"
            raise ValueError(f"dfgnn.compile: options: expected names of Inductor's, got {name}; {hint}")
    return of_inductor, least


def tell(report: Report) -> None:
    for found in report.found:
        (_log.info if found.form or found.left else _log.warning)("%s", found)
    for listen in listeners:
        listen(report)


def compile(
    model: Callable[..., Any] | None = None, *, dynamic: bool | None = None, mode: str | None = None,
    options: dict[str, Any] | None = None, fullgraph: bool = False,
) -> Any:  # fmt: skip
    r"""``torch.compile`` with graph attention that the model's author wrote, on dfgnn's operators.

    Before autograd sees it, each segment softmax with the weighted sum behind it,

    .. math::
        \mathrm{out}_i = \sum_{j \to i} \mathrm{softmax}_j(s_{ij}) \, m_{ij} \, v_{ij},

    becomes one call of :func:`dfgnn.functional.dot_attention`, :func:`~dfgnn.functional.gatv2_attention`,
    :func:`~dfgnn.functional.gat_attention` or :func:`~dfgnn.functional.score_attention`, whichever fits what
    the score and the values are made of; a softmax whose weights are also needed elsewhere becomes
    :func:`~dfgnn.functional.edge_softmax`. All else goes to Inductor as ever. Results are those of the model
    up to rounding. ``torch.compile(model, backend="dfgnn")`` does the same without an import of dfgnn.

    Args:
        model: a module or function; None: returns a decorator.
        dynamic: as in ``torch.compile``; None: sizes that change are symbolic from the second compilation on.
        mode: Inductor's, such as "default", "reduce-overhead" or "max-autotune".
        options: Inductor's, as ``torch.compile(options=)`` takes them, and ``"dfgnn.min_elements"``:
            attention of fewer numbers, edges times heads times columns in the mean over a compiled graph, is
            left to Inductor. By default 0 on a CPU and in steps of :func:`dfgnn.capture`, and on a GPU what
            was measured to gain; 0 rewrites all.
        fullgraph: raise an error where Dynamo breaks the graph.

    Returns:
        What ``torch.compile`` returns. :func:`dfgnn.explain` of it says which attention was found, and for
        each softmax that was left as it is the reason and the line. The logger ``dfgnn.compile`` says it
        when a graph is compiled: at the level INFO, and at WARNING what was not recognised.

    Raises:
        TypeError, ValueError: as ``torch.compile`` does. Errors in arguments of the attention, such as an
            index that is out of range, are raised when the compiled model runs.

    Example:
        >>> model = dfgnn.compile(MyGraphTransformer(64))
        >>> loss = model(x, edge_index).square().mean()
        >>> loss.backward()
    """
    _options(mode, options)

    def call(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return backend(graph_module, example_inputs, mode=mode, options=options)

    if model is None:
        return lambda model: compile(model, dynamic=dynamic, mode=mode, options=options, fullgraph=fullgraph)
    if not callable(model):
        raise TypeError(f"dfgnn.compile: model: expected a module or a function, got {type(model).__name__}")
    return internals.compiled(model, call, dynamic, fullgraph)
