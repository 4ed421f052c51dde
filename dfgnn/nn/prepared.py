"""The usual call of a layer, ``conv(x, edge_index, edge_attr)`` or ``conv(graph, x)``: the next one does not
ask again what the last one has found.

On a small graph a step's time is Python's. What a fused call depends on besides its arguments are attributes,
hooks and parameters of the layer and its modules, methods of their classes and a few switches of torch. A
layer that was called keeps what has been read of them (`Known`), and the operator's arguments for each kind
of call (`operator_call.Call`). The next call compares: while nothing has changed, it goes from here to the
operator. Anything else goes through the layer's forward, which also raises the errors.
"""

from __future__ import annotations

import weakref
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ..engine import paths
from ..runtime import torch_internals as internals
from ..runtime.arguments import draw_seed
from ..runtime.eager import PLAIN_TYPES
from .fused import operator_call

if TYPE_CHECKING:
    from ._upstream import Called

_NONE = None, None
KEY = "_dfgnn_prepared"  # the name among the layer's attributes
_called_of = attrgetter("forward", "__call__", "_call_impl")  # what a call of a module of a class runs
_kind_of = attrgetter("dtype", "shape")
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_HOOKED_STEPS = "_propagate", "_message", "_aggregate", "_edge_update"  # of message passing


class Known:
    """What a layer's fused calls depend on besides their arguments, and what each kind of call computes.

    The layer has it as an attribute, so that both are freed together. It is not copied nor pickled with it.
    """

    def __init__(self, layer: Any):
        own, cls = layer.__dict__, type(layer)
        # Weak, because the layer has this object: without cycles both are freed at once.
        self.layer, self.attention = cast(Any, weakref.ref(layer)), layer.attention
        # In torch_geometric's layers: what reads the methods and functions that the library's forward calls.
        self.called: Called | None = getattr(layer, "_called", None)
        self.methods = None if self.called is None else (layer._methods_of(cls), self.called.now())
        self.values = [*own.values()]  # of the layer's attributes: the same objects, or equal ones
        modules = [x for x in own["_modules"].values() if x is not None]
        self.modules = [(x, type(x), x.__dict__, [*x.__dict__.values()]) for x in modules]
        self.classes = [(kind, _called_of(kind)) for kind in {type(x) for x in modules}]
        of_parameters = [x.__dict__["_parameters"] for x in [layer, *modules]]
        # Modules and parameters have to be the same objects.
        self.owned = [(x, [*x.values()]) for x in (own["_modules"], *of_parameters) if x]
        self.parameters = [x for owned in of_parameters for x in owned.values() if x is not None]
        self.kinds = [*map(_kind_of, self.parameters)]
        # Hooks, and modules within modules: these dictionaries are empty.
        self.empty = [x.__dict__[name] for x in modules for name in (*_HOOKS, "_modules")]
        self.empty += [own[x] for x in own if x.endswith("_hooks") and x.startswith(_HOOKED_STEPS)]
        self.weight: Any = None  # that of the values' projection
        # By kind of arguments (dtype of x, whether it is a pair, whether edges have attributes, autocast's
        # dtype and that of x under it): the operator's call; and ``finish(layer, result, x_dst)``, what
        # follows the operator, or None.
        self.calls: dict[tuple, tuple[operator_call.Call, Any]] = {}

    def __deepcopy__(self, memo) -> None:
        return None

    def __reduce__(self):
        return type(None), ()

    def holds(self, layer: Any, *ends: Any) -> bool:
        """Whether nothing has changed, and these features are plain rows."""
        # This runs at every call. So it is one frame, of comparisons that end in C for equal objects.
        if (
            self.layer() is not layer
            or paths.recorder is not None
            or any(self.empty)
            or internals.has_any_global_hook()
            or internals.transforms_active()
            or internals.num_function_modes()
            or internals.num_dispatch_modes()
            or internals.compiler._is_compiling_flag
            or internals.tracing_state() is not None
            or forward_ad._current_level >= 0
            or F.linear is not internals.linear
            or layer.attention is not self.attention
        ):
            return False
        for x in ends:
            if (
                type(x) not in PLAIN_TYPES
                or x.dim() != 2
                or internals.is_functional_tensor(x)
                or internals.is_wrapped_by_functorch(x)
            ):
                return False
        try:
            now = [*layer.__dict__.values()]
            if now.pop() is not self or now != self.values:
                return False
            for module, kind, attributes, values in self.modules:
                if type(module) is not kind or [*attributes.values()] != values:
                    return False
        except (RuntimeError, TypeError, ValueError):  # a new value cannot be compared: a tensor, say
            return False
        for owned, values in self.owned:
            if len(owned) != len(values) or not all(map(is_, owned.values(), values)):
                return False
        for cls, methods in self.classes:
            if _called_of(cls) != methods:
                return False
        if [*map(_kind_of, self.parameters)] != self.kinds:
            return False
        library = self.called
        return library is None or (layer._methods_of(type(layer)), library.now()) == self.methods


def prepare(
    layer: Any, call: operator_call.Call | None, x: Any, edges: Any, edge_attr: Tensor | None = None
) -> None:
    """Prepares the next usual call after one with arguments of this kind, which ``call`` computed."""
    # A class of another module is a user's, which may replace methods.
    if call is None or not type(layer).__module__.startswith(f"{__package__}."):
        return
    x, x_dst = x if type(x) is tuple and len(x) == 2 else (x, None)
    if not _is_rows(x) or (x_dst is not None and not _is_rows(x_dst)) or not layer._keeps_features():
        return
    if (edge_attr is None) != (call.edge_dtype is None):
        return
    if layer._usual_edges(x, x_dst, edges, edge_attr) is None:
        return
    known = layer.__dict__.get(KEY)
    if known is None or not known.holds(layer):
        layer.__dict__.pop(KEY, None)
        known = Known(layer)
        if any(known.empty):
            return
        layer.__dict__[KEY] = known  # the last of the attributes
    known.weight, autocast = call.value_weight, _autocast(x)
    kind: tuple = x.dtype, x_dst is not None, edge_attr is not None, autocast
    kind = kind if autocast is None else (*kind, call.shape[2])
    known.calls[kind] = call, layer._finisher()


def forget(layer: Any) -> None:
    """Takes away what `prepare` has put among the layer's attributes."""
    layer.__dict__.pop(KEY, None)


def again(layer: Any, x: Any, edges: Any, edge_attr: Tensor | None = None) -> Tensor | None:
    """The result of a usual call that `prepare` has prepared; None: it has to go the long way."""
    known = layer.__dict__.get(KEY)
    if known is None:
        return None
    ends = x if type(x) is tuple and len(x) == 2 else (x,)
    if not known.holds(layer, *ends):
        return None
    x_dst: Any
    x, x_dst = first, end = ends if len(ends) == 2 else (x, None)
    edges = layer._usual_edges(x, x_dst, edges, edge_attr)
    if edges is None:
        return None
    graph, edge_attr = edges
    kind: tuple = x.dtype, x_dst is not None, edge_attr is not None, None
    if internals.is_any_autocast_enabled() and (autocast := _autocast(x)) is not None:
        x, x_dst, *_ = operator_call.cast_by_autocast(graph, x, x_dst, known.weight, edge_attr)
        kind = *kind[:-1], autocast, x.dtype
    call, finish = known.calls.get(kind, _NONE)
    if call is None or (end is not None and call.one_query and not operator_call.has_first_rows(end, first)):
        return None
    if edge_attr is not None:
        if edge_attr.dtype is not call.edge_dtype:
            if kind[3] is None or edge_attr.dtype not in operator_call.CAST_BY_AUTOCAST:
                return None
            edge_attr = edge_attr.to(call.edge_dtype)
        # In additive layers edges have a score alone, of any size.
        sizes = call.shape[0], known.weight.shape[0]
        if call.score != "additive" and operator_call.folds(edge_attr, *sizes, call.score):
            return None
    seed = draw_seed(graph._device) if call.drops else None
    try:
        out = call.run(graph, x, x_dst if call.two_ends else None, edge_attr, seed)
    except (RuntimeError, NotImplementedError):  # wrong arguments: the long way has the error in words
        return None
    return out if finish is None else finish(layer, out, first if end is None else end)


def _is_rows(x: Any) -> bool:
    """Whether x is one set of features, and no subclass of a tensor."""
    return type(x) in PLAIN_TYPES and x.dim() == 2


def _autocast(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of x; None where it is off."""
    kind = x.device.type
    return None if x.is_meta or not torch.is_autocast_enabled(kind) else torch.get_autocast_dtype(kind)
