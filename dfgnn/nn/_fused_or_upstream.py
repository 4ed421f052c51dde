"""Decides whether a layer's fused forward runs or its library's own, and warns where it is the library's.

The question is asked at every call of a layer, and on a small graph its Python time counts. Most tests only
read attributes or compare them with those of the last call; what is slow runs after a cheap test has found
something unusual.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..engine import paths
from ..graph import Graph
from ..graph.of_dgl import is_dgl
from ..runtime import torch_internals as internals
from ..runtime.tracing import any_batched
from ._errors import CALL_ERRORS, blame_parameters, check_flags, check_sizes, flags_of
from ._linear import all_hooked, is_untouched
from ._upstream import Called, upstream
from .fused.operator_call import made_by
from .prepared import again, prepare

# ---- the warning ------------------------------------------------------------------------------------------

_warned: set[tuple[type, str]] = set()
#: Functions that are called with the class of each new entry of `warned`.
noticed: list[Callable[[type], None]] = []


class FallbackWarning(UserWarning):
    """A layer runs its library's own forward, because the fused one does not support how it is set up."""


def warn(cls: type, library: str, reason: str, stacklevel: int = 6) -> None:
    """Warns, once per class and reason, and reports to :func:`dfgnn.explain`. stacklevel: by default that of
    the line that calls the layer, for a caller of this function that the layer's ``forward`` calls."""
    if paths.recorder is not None:
        paths.recorder.declined("fused", reason)
        paths.recorder.took("upstream", cls.__name__)
    if (cls, reason) not in _warned:
        _warned.add((cls, reason))
        for notice in noticed:
            notice(cls)
        warnings.warn(
            f"{cls.__module__}.{cls.__qualname__} runs {library}'s own forward: {reason}",
            FallbackWarning,
            stacklevel=stacklevel,
        )


def warned() -> frozenset[tuple[type, str]]:
    """The classes that have run their library's own forward so far, and why."""
    return frozenset(_warned)


# ---- layers with torch_geometric's contract ---------------------------------------------------------------

#: The methods of message passing, which a subclass or a program may replace.
METHODS = (
    "message",
    "aggregate",
    "message_and_aggregate",
    "update",
    "edge_update",
    "propagate",
    "edge_updater",
)
methods_of = attrgetter(*METHODS)
_HOOKS = tuple(
    f"_{step}_forward_{when}"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("pre_hooks", "hooks")
)


def fused_or_pyg(cls: Any, fused: Callable[..., Any], for_upstream: Callable[[Any], Any]) -> Any:
    """The forward of a layer: ``fused``, or torch_geometric's, with a warning that says why, once per class
    and reason. for_upstream: makes an argument what torch_geometric's forward takes."""
    flags = flags_of(fused)

    @functools.wraps(fused)
    def forward(self, *args, **kwargs):
        count = len(args) + len(kwargs)
        usual = len(args) > 1 and (count == 2 or (count == 3 and (not kwargs or "edge_attr" in kwargs)))
        if usual and not internals.is_dynamo_recording():
            out = again(self, *args, **kwargs)
            if out is not None:
                return out
        check_sizes(self)
        check_flags(self, flags, args, kwargs)
        values = (*args, *kwargs.values())
        reason = why_upstream(self, type(self), values)
        if reason is None:
            if internals.is_dynamo_recording():
                return fused(self, *args, **kwargs)
            try:
                out = fused(self, *args, **kwargs)
            except CALL_ERRORS as error:
                blame_parameters(self, error, args, kwargs)
                raise
            finally:
                call = made_by(self)
            if usual and isinstance(out, Tensor):
                prepare(self, call, *args, **kwargs)
            return out
        warn(type(self), "torch_geometric", reason, stacklevel=5)
        kwargs = {name: for_upstream(x) for name, x in kwargs.items()}
        return super(cls, self).forward(*map(for_upstream, args), **kwargs)

    return forward


def why_upstream(layer: Any, cls: Any, values: tuple[Any, ...] = ()) -> str | None:
    """None if the fused forward does what this layer of message passing is set up for, and takes these
    arguments; else the reason why torch_geometric's has to run.

    cls: the fused class that the layer has, or is to get instead of torch_geometric's (`pyg._base.PyGLayer`,
    whose attributes say what is usual).
    """
    recording = internals.is_dynamo_recording() or internals.compiler._is_compiling_flag
    special, state = cls._special_reason, layer.__dict__
    reason = None if special is None else special(layer)
    if reason is not None:
        return reason
    aggr = layer.aggr_module if recording else state["_modules"].get("aggr_module")
    if type(aggr) not in cls._aggregations:
        # `aggr` is the option of the constructor, `aggr_module` the module that is called.
        named = layer.aggr in ("add", "sum")
        return f"aggr_module={type(aggr).__name__}" if named else f"aggr={layer.aggr!r}"
    if not is_untouched(aggr):
        return "aggr_module has hooks or a forward of its own"
    if all_hooked():
        return "there are hooks on all modules"
    if layer.flow != "source_to_target":
        return f"flow={layer.flow!r}"
    if layer._decomposed_layers > 1:
        return f"decomposed_layers={layer._decomposed_layers}"
    if layer._explain:
        return "an explanation is active"
    if "parametrizations" in layer._modules:  # which may draw random numbers at each access
        return "its parameters have parametrizations"
    if layer.node_dim != cls._node_dim:
        return f"node_dim={layer.node_dim}"
    hooks = [getattr(layer, name) for name in _HOOKS] if recording else map(state.__getitem__, _HOOKS)
    if any(hooks):
        return "message passing hooks are registered"
    for name in METHODS:
        if name in state and _is_changed(state[name], name, cls):
            return f"{name} is overridden"
    methods = None if recording else (*methods_of(cls), cls._called.now())
    if methods is None or methods != cls._methods_found:
        reason = _changed_in_class(cls)
        if reason is not None:
            return reason
        if methods is not None:
            cls._methods_found = methods
    if recording:
        return "TorchScript" if torch.jit.is_tracing() or torch.jit.is_scripting() else _mapped(values)
    if internals.tracing_state() is not None:
        return "TorchScript"
    if internals.num_function_modes() or internals.num_dispatch_modes():
        mode = foreign_mode()
        if mode is not None:
            return f"a mode is active, {mode}"
    if not PLAIN.issuperset(map(type, state["_parameters"].values())):
        foreign = foreign_tensor(layer._parameters.values())
        if foreign is not None:
            return f"a parameter is a {foreign}"
    if not PLAIN.issuperset(map(type, values)):
        foreign = foreign_tensor(values)
        if foreign is not None:
            return f"features are a {foreign}"
    return _mapped(values) if internals.transforms_active() else None


def _mapped(values: tuple[Any, ...]) -> str | None:
    """The reason of `why_upstream` that vmap gives: it maps over integer tensors among these values or in
    dictionaries, which are edges, or what edges depend on."""
    if internals.transforms_active():
        flat = [x for value in values for x in (value.values() if isinstance(value, dict) else (value,))]
        if any_batched(x for x in flat if isinstance(x, Tensor) and not x.is_floating_point()):
            return "torch.func.vmap gives each sample edges of its own"
    return None


def _changed_in_class(cls: Any) -> str | None:
    """The reason of `why_upstream` that holds for all instances of a class, or None."""
    changed = next((name for name in METHODS if _is_changed(getattr(cls, name), name, cls)), None)
    if changed is not None:
        return f"{changed} is overridden"
    replaced = cls._called.replaced()
    return None if replaced is None else f"{replaced} was replaced, in torch_geometric or in torch"


# This mark is what torch.compiler.assume_constant_result sets, whose call would import the compiler. The
# function runs once, while a compiler records. Compiled code does not repeat it, because at every call it
# would cost a small graph too much time, for a change that is rare.
_changed_in_class._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_changed(method: Any, name: str, cls: Any) -> bool:
    method = getattr(method, "__func__", method)
    if method in cls._methods_of_library[name]:
        return False
    # torch_geometric compiles its own propagate and edge_updater for each class.
    compiled = (f"{base.__module__}_{base.__name__}_{name}" for base in cls.__mro__)
    return method.__module__ not in compiled


# ---- layers with DGL's contract ---------------------------------------------------------------------------


def upstream_runs(layer: Any, graph: Any, *features: Any) -> bool:
    """Whether DGL's forward must run in place of a `DGLLayer`'s; says why, once per class and reason.

    features: the other arguments, those of nodes first.

    Raises NotImplementedError where it must and cannot: without DGL, or for a graph that is not DGL's.
    """
    check_sizes(layer)
    reason = layer.why_not(layer)
    theirs = None if type(graph) is Graph or not is_dgl(graph) else upstream(type(layer), "dgl")
    if reason is None and theirs is not None and not torch.compiler.is_compiling():
        reason = _why_dgl(layer, theirs, graph, features)
    if reason is None:
        return False
    if theirs is None:
        raise NotImplementedError(
            f"{type(layer).__name__}: {reason}, which only the forward of DGL's own layer does; "
            "that needs DGL and a DGLGraph"
        )
    warn(type(layer), "DGL", reason)
    return True


_called_by = functools.cache(Called)


def _why_dgl(layer: Any, theirs: type, graph: Any, features: tuple[Any, ...]) -> str | None:
    """The reason, if there is one, why only DGL's own forward may run: a change of DGL's class, or of all
    modules and functions, that only it sees, or an argument that only it takes."""
    if layer._in_engine and all_hooked():
        return "there are hooks on all modules"
    if "parametrizations" in layer._modules:  # which may draw random numbers at each access
        return "its parameters have parametrizations"
    changed = why_changed(_called_by(theirs), "DGL", (*layer._read_parameters(), *features))
    if changed is not None:
        return changed
    # Where sources and destinations are the same nodes, DGL stores the features of both together.
    together = not graph.is_block and graph.srctypes == graph.dsttypes
    if layer._one_name_for_ends and isinstance((*features, None)[0], tuple) and together:
        return "a pair of features where sources and destinations are the same nodes"
    return None


# ---- modes and tensors that run code of other packages ----------------------------------------------------


def why_changed(called: Called, library: str, values: Iterable[Any]) -> str | None:
    """The reason why only the library's forward may run: a function that it calls was replaced, or code of
    other packages runs in a mode or in the operations of one of these values; None if there is none."""
    replaced = called.replaced()
    if replaced is not None:
        return f"{replaced} was replaced, in {library} or in torch"
    mode = foreign_mode()
    if mode is not None:
        return f"a mode is active, {mode}"
    foreign = foreign_tensor(values)
    return None if foreign is None else f"there is a {foreign} among features and parameters"


def foreign_mode() -> str | None:
    """The name of the class of an active TorchFunctionMode or TorchDispatchMode that is neither torch's nor
    ours: it may change functions that the library's forward calls and the fused one does not."""
    modes = [internals.function_mode(k) for k in range(internals.num_function_modes())]
    modes += [internals.dispatch_mode(k) for k in range(internals.num_dispatch_modes())]
    foreign = (type(x).__name__ for x in modes if type(x).__module__.split(".")[0] not in ("torch", "dfgnn"))
    return next(foreign, None)


#: Types of values that `foreign_tensor` accepts without looking further.
PLAIN = frozenset((Tensor, nn.Parameter, type(None)))


def foreign_tensor(values: Iterable[Any]) -> str | None:
    """The name of the class of a tensor among these whose operations run code that is neither torch's nor
    ours: it may change operations that the library's forward calls and the fused one does not. Looks into
    tuples, lists and dictionaries."""
    for value in values:
        cls = type(value)
        if cls in PLAIN:
            continue
        if isinstance(value, (tuple, list, dict)):
            found = foreign_tensor(value.values() if isinstance(value, dict) else value)
            if found is not None:
                return found
        elif isinstance(value, Tensor) and _operates_itself(cls):  # type: ignore[arg-type]
            return cls.__name__
    return None


@functools.cache
def _operates_itself(cls: type) -> bool:
    owners = (
        next(base for base in cls.__mro__ if name in vars(base))
        for name in ("__torch_function__", "__torch_dispatch__")
    )
    return any(x.__module__.split(".")[0] not in ("torch", "torch_geometric", "dfgnn") for x in owners)
