"""The usual call of a layer, ``conv(x, edge_index)`` or ``conv(graph, x)`` with one tensor of features: the next
one does not ask again what the last one has found.

On a small graph a step's time is Python's. What a fused call depends on beside its arguments are attributes,
hooks and parameters of the layer and its modules, methods of their classes and a few switches of torch. A call
that one operator computes keeps what it has read of them (`Prepared`), and the next call compares: while
nothing has changed, it goes from here to the operator. Anything else goes through the layer's forward, which
also raises the errors.
"""

from __future__ import annotations

import weakref
from operator import attrgetter, is_
from typing import Any

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

__all__ = ["again", "prepare"]

_KEY = "_dfgnn_prepared"  # the name among the layer's attributes
_called_of = attrgetter("forward", "__call__", "_call_impl")  # what a call of a module of a class runs
_dtype_of, _learns = attrgetter("dtype"), attrgetter("requires_grad")
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_HOOKED_STEPS = "_propagate", "_message", "_aggregate", "_edge_update"  # of message passing


class Prepared:
    """What a fused call of a layer depends on beside its arguments, and what it computes.

    The layer has it as an attribute, so that both are freed together. It is not copied nor pickled with it.
    """

    __slots__ = (
        "after", "called", "classes", "dropout", "dtypes", "empty", "function", "layer", "loops", "methods",
        "modules", "numbers", "parameters", "plan", "tensors", "values", "x_dtype",
    )  # fmt: skip

    def __deepcopy__(self, memo) -> None:
        return None

    def __reduce__(self):
        return type(None), ()


def prepare(layer: Any, spec: Any, graph: Any, x: Tensor, loops: bool | None) -> None:
    """Prepares the next usual call after one with this graph and x, if one operator computes it.

    spec: the layer's `LayerSpec`, which says all that the layer does, but ``_after(result, x)``, a method
    that some have. loops: whether the layer adds self loops to an ``edge_index``; None: it takes a Graph.
    """
    if spec is None or spec.edges is not None or paths.recorder is not None:
        return
    if not type(layer).__module__.startswith("dfgnn."):  # a user's class, which may replace methods
        return
    if internals.is_any_autocast_enabled():
        return
    found = fused.checked_tensors(layer, spec, graph, x, None)
    if type(found) is str:
        return
    tensors, dtype = found
    self, own = Prepared(), layer.__dict__
    # Weak, because the layer has this object: without cycles both are freed at once.
    self.layer, self.function, self.loops = weakref.ref(layer), layer.attention, loops
    self.after = getattr(type(layer), "_after", None)
    modules = [x for x in own["_modules"].values() if x is not None]
    self.called = getattr(layer, "_called", None)
    self.methods = None if self.called is None else (layer._methods_of(type(layer)), self.called.now())
    # Module -> its class, its attributes and their values, which are the same objects or equal.
    self.modules = [(x, type(x), x.__dict__, [*x.__dict__.values()]) for x in modules]
    self.classes = [(cls, _called_of(cls)) for cls in {type(x) for x in modules}]
    dicts = [own["_modules"], *(x.__dict__["_parameters"] for x in [layer, *modules])]
    self.parameters = [(d, [*d.values()]) for d in dicts if d]
    # Hooks, and modules within modules: these dictionaries are empty.
    self.empty = [x.__dict__[name] for x in modules for name in (*_HOOKS, "_modules")]
    self.empty += [own[name] for name in own if name.endswith("_hooks") and name.startswith(_HOOKED_STEPS)]
    self.x_dtype, self.tensors = tensors.x.dtype, tensors[2:-1]
    given = [x for x in self.tensors if x is not None]
    self.dtypes = given, [*map(_dtype_of, given)]
    self.dropout = spec.dropout_p > 0
    numbers = fused.numbers_of(spec, tensors, dtype)
    self.numbers = {train: tuple(numbers._replace(train=train))[1:] for train in (False, True)}
    size = tensors.value_weight.shape[0] // spec.heads + numbers.padding
    edges = fused.needs_edge_ids(spec, tensors)
    self.plan = {
        train: (spec.heads, size, tensors.x.dtype, PLAN_LAYERS[spec.score], "auto", edges, train)
        for train in (False, True)
    }
    own.pop(_KEY, None)
    if not any(self.empty):
        self.values = [*own.values()]
        own[_KEY] = self  # the last of the attributes


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
        or layer.attention is not known.function
        or x.dim() != 2
    ):
        return None
    try:
        now = [*own.values()]
        if now.pop() is not known or now != known.values:
            return None
        for module, cls, attributes, values in known.modules:
            if type(module) is not cls or [*attributes.values()] != values:
                return None
    except Exception:  # a new value that cannot be compared with the old one, a tensor say
        return None
    for owned, values in known.parameters:
        if len(owned) != len(values) or not all(map(is_, owned.values(), values)):
            return None
    for cls, called in known.classes:
        if _called_of(cls) != called:
            return None
    given, dtypes = known.dtypes
    if [*map(_dtype_of, given)] != dtypes:
        return None
    called = known.called
    if called is not None and (layer._methods_of(type(layer)), called.now()) != known.methods:
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
    train = torch.is_grad_enabled() and (x.requires_grad or any(map(_learns, given)))
    handle = graph._planner.handle(*known.plan[train])
    numbers = handle.number, *known.numbers[train]
    seed = fused.draw_seed(graph) if known.dropout else None
    try:
        if train:
            out = Layer.at_once(fused.formula, numbers, graph, handle, x, None, *known.tensors, seed)
        else:
            out = run(numbers, (x, None, *known.tensors, seed))[0]
    except (RuntimeError, NotImplementedError):  # wrong arguments: the long way has the error in words
        return None
    return out if known.after is None else known.after(layer, out, x)
