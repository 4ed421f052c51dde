"""The usual call of a layer, ``conv(x, edge_index)`` or ``conv(graph, x)`` with one tensor of features: the
next one does not ask again what the last one has found.

On a small graph a step's time is Python's. What a fused call depends on beside its arguments are attributes,
hooks and parameters of the layer and its modules, methods of their classes and a few switches of torch. A
call that one operator computes keeps what it has read of them (`Prepared`), and the next call compares: while
nothing has changed, it goes from here to the operator. Anything else goes through the layer's forward, which
also raises the errors.
"""

from __future__ import annotations

import weakref
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ..engine import paths
from ..engine.layer import Layer, run
from ..graph import Graph, cache
from ..runtime import torch_internals as internals
from ..runtime.arguments import PLAN_LAYERS
from ..runtime.eager import PLAIN_TYPES
from . import fused
from .whole.spec import LayerSpec

if TYPE_CHECKING:
    from ._upstream import Called

__all__ = ["again", "prepare"]

_KEY = "_dfgnn_prepared"  # the name among the layer's attributes
_called_of = attrgetter("forward", "__call__", "_call_impl")  # what a call of a module of a class runs
_kind_of, _learns = attrgetter("dtype", "shape"), attrgetter("requires_grad")
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_HOOKED_STEPS = "_propagate", "_message", "_aggregate", "_edge_update"  # of message passing


class Prepared:
    """What a fused call of a layer depends on beside its arguments, and what it computes.

    The layer has it as an attribute, so that both are freed together. It is not copied nor pickled with it.
    """

    def __init__(self, layer: Any, spec: LayerSpec, tensors: Any, dtype: torch.dtype, loops: bool | None):
        own, cls = layer.__dict__, type(layer)
        # Weak, because the layer has this object: without cycles both are freed at once.
        self.layer, self.attention, self.loops = weakref.ref(layer), layer.attention, loops
        self.after = getattr(cls, "_after", None)
        # In torch_geometric's layers: what reads the methods and functions that the library's forward calls.
        self.called: Called | None = getattr(layer, "_called", None)
        self.methods = None if self.called is None else (layer._methods_of(cls), self.called.now())
        self.values = [*own.values()]  # of the layer's attributes: the same objects, or equal ones
        modules = [x for x in own["_modules"].values() if x is not None]
        self.modules = [(x, type(x), x.__dict__, [*x.__dict__.values()]) for x in modules]
        self.classes = [(kind, _called_of(kind)) for kind in {type(x) for x in modules}]
        owned = [own["_modules"], *(x.__dict__["_parameters"] for x in [layer, *modules])]
        self.owned = [(x, [*x.values()]) for x in owned if x]  # modules and parameters: the same objects
        # Hooks, and modules within modules: these dictionaries are empty.
        self.empty = [x.__dict__[name] for x in modules for name in (*_HOOKS, "_modules")]
        self.empty += [own[x] for x in own if x.endswith("_hooks") and x.startswith(_HOOKED_STEPS)]
        self.x_dtype, self.tensors = tensors.x.dtype, tensors[2:-1]  # but x, x_dst and seed
        self.given = [x for x in self.tensors if x is not None]
        self.kinds = [*map(_kind_of, self.given)]
        self.drops = spec.dropout_p > 0
        numbers = fused.numbers_of(spec, tensors, dtype)
        size = tensors.value_weight.shape[0] // spec.heads + numbers.padding
        shape = spec.heads, size, self.x_dtype, PLAN_LAYERS[spec.score], "auto", self.drops
        # Whether gradients are wanted -> the arguments of the planner; and the numbers but the graph's.
        self.plan = (*shape, False), (*shape, True)
        self.numbers = numbers[1:], numbers._replace(train=True)[1:]

    def __deepcopy__(self, memo) -> None:
        return None

    def __reduce__(self):
        return type(None), ()


def prepare(layer: Any, spec: LayerSpec, graph: Any, x: Tensor, loops: bool | None) -> None:
    """Prepares the next usual call after one with this graph and x, if one operator computes it.

    spec: it says all that the layer does but ``_after(result, x)``, a method that some have. loops: whether
    the layer adds self loops to an ``edge_index``; None: it takes a Graph.
    """
    # A class of another module is a user's, which may replace methods.
    is_ours = type(layer).__module__.startswith(f"{__package__}.")
    if not is_ours or paths.recorder is not None or internals.is_any_autocast_enabled():
        return
    found = fused.checked_tensors(layer, spec, graph, x, None)
    if type(found) is not str and not fused.needs_rows(spec.score, spec.negative_slope):
        layer.__dict__.pop(_KEY, None)
        tensors, dtype = found
        made = Prepared(layer, spec, tensors, dtype, loops)
        if not any(made.empty):
            layer.__dict__[_KEY] = made  # the last of the attributes


def again(layer: Any, x: Any, edges: Any) -> Tensor | None:
    """The result of a usual call that `prepare` has prepared; None: it has to go the long way."""
    own = layer.__dict__
    known = own.get(_KEY)
    if (
        known is None
        or known.layer() is not layer
        or type(x) not in PLAIN_TYPES
        or x.dtype is not known.x_dtype
    ):
        return None
    # All of this runs at every call. So it is one frame, of comparisons that end in C for equal objects.
    if (
        paths.recorder is not None
        or any(known.empty)
        or internals.has_any_global_hook()
        or internals.transforms_active()
        or internals.num_function_modes()
        or internals.num_dispatch_modes()
        or internals.is_any_autocast_enabled()
        or internals.compiler._is_compiling_flag
        or internals.tracing_state() is not None
        or forward_ad._current_level >= 0
        or internals.is_functional_tensor(x)
        or internals.is_wrapped_by_functorch(x)
        or F.linear is not internals.linear
        or layer.attention is not known.attention
        or x.dim() != 2
    ):
        return None
    try:
        now = [*own.values()]
        if now.pop() is not known or now != known.values:
            return None
        for module, kind, attributes, values in known.modules:
            if type(module) is not kind or [*attributes.values()] != values:
                return None
    except (RuntimeError, TypeError, ValueError):  # a new value cannot be compared: a tensor, say
        return None
    for owned, values in known.owned:
        if len(owned) != len(values) or not all(map(is_, owned.values(), values)):
            return None
    for cls, methods in known.classes:
        if _called_of(cls) != methods:
            return None
    if [*map(_kind_of, known.given)] != known.kinds:
        return None
    library = known.called
    if library is not None and (layer._methods_of(type(layer)), library.now()) != known.methods:
        return None
    if known.loops is None:
        graph = edges
        if type(graph) is not Graph or graph.num_src != graph.num_dst:
            return None
        if not layer._allow_zero_in_degree and graph._structure.dst.has_empty is not False:
            return None
    elif (
        type(edges) is Graph or type(edges) is Tensor and edges.layout is torch.strided and not edges.is_meta
    ):
        n = x.shape[0]
        graph, _ = cache.graph_of(edges, n, n, known.loops, type(layer).__name__)
    else:
        return None
    train = torch.is_grad_enabled() and (x.requires_grad or any(map(_learns, known.given)))
    handle = graph._planner.handle(*known.plan[train])
    numbers = handle.number, *known.numbers[train]
    seed = fused.draw_seed(graph) if known.drops else None
    try:
        if train:
            out = Layer.at_once(fused.formula, numbers, graph, handle, x, None, *known.tensors, seed)
        else:
            out = run(numbers, (x, None, *known.tensors, seed))[0]
    except (RuntimeError, NotImplementedError):  # wrong arguments: the long way has the error in words
        return None
    return out if known.after is None else known.after(layer, out, x)
