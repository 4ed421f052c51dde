"""The base class of the layers: whether a layer runs fused, and the arguments and results that they share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense.linear import Linear

from ...engine.checks import DTYPES
from ...runtime import torch_internals as internals
from ...runtime.torch_internals import transforms_active
from ...runtime.transforms import any_batched
from .._errors import check_constructor, check_sizes, wrong_argument, wrong_features
from .._fallback import PLAIN, Called, foreign_mode, foreign_tensor, is_from, warn
from .._terms import LINEAR, all_hooked, is_untouched
from ..whole.eligible import fused_layer, refuse_parameters
from ..whole.spec import LayerSpec
from . import VERSION
from ._edges import attention_result
from ._graph import for_upstream

LIBRARY = "torch_geometric"
LINEAR.append(Linear)
_METHODS = (
    "message",
    "aggregate",
    "message_and_aggregate",
    "update",
    "edge_update",
    "propagate",
    "edge_updater",
)
_HOOKS = tuple(
    f"_{step}_forward_{when}"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("pre_hooks", "hooks")
)


def _written_by_library(cls: type, names: tuple[str, ...]) -> dict[str, Any]:
    """The methods of a class of torch_geometric by name, with None for those that were replaced before."""
    methods = {name: getattr(cls, name) for name in names}
    return {name: x if is_from("torch_geometric", x) else None for name, x in methods.items()}


_METHODS_OF_BASE = _written_by_library(MessagePassing, _METHODS)


class FusedConv:
    """Mixin of the layers: ``class GATConv(FusedConv, torch_geometric.nn.GATConv)``.

    Adds no state, so that an instance of torch_geometric's class becomes a fused layer, and one again, by
    assigning ``__class__``.
    """

    # What `_changed_since` compares: the methods when they were last found to be the library's.
    _methods_found: ClassVar[Any] = ()
    # The value of `node_dim` (the dimension of nodes in message passing) that torch_geometric's class sets.
    _node_dim: ClassVar[int] = 0

    if TYPE_CHECKING:  # otherwise TorchScript would read these annotations, too
        attention: Callable[..., Any]  # of `functional`, or of `reference`: the same layer on plain PyTorch
        add_self_loops: bool
        inspector: Any
        _orig_propagate: ClassVar[Any]
        bias: Tensor | None
        concat: bool
        dropout: float
        heads: int
        out_channels: int
        training: bool
        _methods_of_library: ClassVar[dict[str, Any]]
        _called: ClassVar[Called]

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if FusedConv in cls.__bases__:
            cls._methods_of_library = _written_by_library(_upstream(cls), _METHODS)
            cls._called = Called(_upstream(cls))
            cls.__init__ = check_constructor(cls.__init__)  # type: ignore[method-assign]
            cls.forward = _fused_or_upstream(cls, cls.forward)  # type: ignore[attr-defined]

    @classmethod
    def why_not(cls, layer: MessagePassing) -> str | None:
        """What ``layer``, of this class or torch_geometric's, is set up for that the fused forward does not
        do."""
        return fusable(layer, cls)

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], self.heads, self.out_channels)

    def _fused(
        self, spec: LayerSpec, graph: Any, x: Tensor, x_dst: Tensor | None, residual, wanted: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The result of `fused_layer`, with the mean over heads and the residual; and its seed."""
        bias = None
        if not self.concat and self.heads > 1 and spec.bias is not None:
            bias, spec = spec.bias, spec._replace(bias=None)
        out, seed = fused_layer(self, spec, graph, x, x_dst, wanted)
        if out is not None:
            size = self.out_channels
            if out.shape[-1] != self.heads * size or bias is not None and bias.shape != (size,):
                refuse_parameters(self, spec)
            if not self.concat and self.heads > 1:
                out = self._heads(out).mean(-2)
                out = out if bias is None else out + bias
            out = out if residual is None else out + residual
        return out, seed

    def _options(self, seed: Tensor | None = None, **options: Any) -> dict[str, Any]:
        """The attention's arguments, with its dropout. seed: that of dropout, if it was drawn before."""
        options["dropout_p"] = self.dropout if self.training else 0.0
        return options if seed is None else {**options, "_seed": seed}

    def _attend(
        self, graph: Any, inputs: tuple, options: dict[str, Any], dtype: torch.dtype, residual, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's result in this dtype, with the residual and the bias; and the attention, or None."""
        fused_bias, bias = self._split_bias(inputs[0].dtype)
        result = self.attention(graph, *inputs, **options, out_bias=fused_bias, return_attention=wanted)
        out, attention = result if wanted else (result, None)
        out = self._merged(out, bias, residual, dtype)
        return out, attention if attention is None else attention.to(dtype)

    def _split_bias(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """(bias that the operator adds, because it computes in this dtype; bias that is added later): one is
        None."""
        bias = self.bias
        if self.concat and bias is not None and bias.dtype == dtype:
            return self._heads(bias), None
        return None, bias

    def _merged(self, out: Tensor, bias: Tensor | None, residual=None, dtype=None) -> Tensor:
        """The attention's result ``[N, *, H, C]`` as the layer returns it, with bias and residual."""
        out = out.flatten(-2) if self.concat else out.mean(-2)
        out = out if dtype is None else out.to(dtype)
        out = out if residual is None else out + residual
        return out if bias is None else out + bias

    def _returned(self, edge_index: Any, graph: Any, out: Tensor, attention: Tensor | None) -> Any:
        """The result, or if there is an attention a pair with it (`attention_result`)."""
        if attention is None:
            return out
        return out, attention_result(edge_index, attention, graph, self.add_self_loops)

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        # At the first instance of a class torch_geometric compiles that class's message passing, which the
        # library's forward calls. Our classes get what is compiled for the library's classes, even if an
        # instance of ours comes first.
        cls = type(self)
        library = _upstream(cls)
        self.inspector.get_source(library)  # it caches sources by class name, which both classes share
        if FusedConv in cls.__bases__:
            self.inspector._cls = library
            self.__class__ = library
            try:
                self._set_jittable_templates(raise_on_error)
            finally:
                self.__class__ = cls
            return
        super()._set_jittable_templates(raise_on_error)  # type: ignore[misc]
        # Explanations call the class's original methods (`_orig_...`). If cls took its base's compiled method
        # for the original one, it gets the base's original method instead.
        for base in cls.__mro__[1:]:
            if vars(base).get("_jinja_propagate", cls) is vars(cls).get("_orig_propagate"):
                cls._orig_propagate = base._orig_propagate  # type: ignore[attr-defined]

    def __prepare_scriptable__(self):
        # torch.jit.script calls this method for a module to compile in place of self. It cannot compile the
        # fused forward, so that it gets a copy of torch_geometric's class. A user's subclass, which may
        # change the results, is not replaced.
        if FusedConv not in type(self).__bases__:
            return self
        warn(type(self), LIBRARY, "TorchScript")
        plain = copy.copy(self)
        plain.__class__ = _upstream(type(self))
        return plain


def _fused_or_upstream(cls: Any, fused: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer: ``fused``, or torch_geometric's, with a warning that says why, once per class
    and reason."""

    @functools.wraps(fused)
    def forward(self, *args, **kwargs):
        own = self.__dict__
        if not (own.get("heads", 1) and own.get("out_channels", 1)):
            check_sizes(self)
        values, reason = (*args, *kwargs.values()), self.why_not(self)
        if reason is None and not torch.compiler.is_compiling():
            foreign = foreign_tensor(values)
            reason = None if foreign is None else f"features are a {foreign}"
        if reason is None and transforms_active() and any_batched(_integers(values)):
            reason = "torch.func.vmap gives each sample edges of its own"
        if reason is None:
            return fused(self, *args, **kwargs)
        warn(type(self), LIBRARY, reason, stacklevel=5)
        kwargs = {name: for_upstream(x) for name, x in kwargs.items()}
        return super(cls, self).forward(*map(for_upstream, args), **kwargs)

    return forward


def _integers(values: Any) -> list[Tensor]:
    """The integer tensors among these values and in dictionaries: edges, and what else edges depend on."""
    flat = [x for value in values for x in (value.values() if isinstance(value, dict) else (value,))]
    return [x for x in flat if isinstance(x, Tensor) and not x.is_floating_point()]


def fusable(module: MessagePassing, cls: Any = None, aggregation: Any = SumAggregation) -> str | None:
    """None if the fused path does what this module is set up for, else the reason why it does not.

    cls: the fused class that it has, or is to get instead of torch_geometric's. aggregation: the class of
    aggregations that this path computes.
    """
    # This runs at every call of a layer, and on a small graph its Python time counts. Most tests read only
    # attributes. Those that call slow functions run only after a cheap test has found something unusual.
    cls, compiling = type(module) if cls is None else cls, torch.compiler.is_compiling()
    state = module.__dict__
    aggr = module.aggr_module if compiling else state["_modules"].get("aggr_module")
    if type(aggr) is not aggregation:
        # `aggr` is the option of the constructor, `aggr_module` the module that is called.
        named = module.aggr in ("add", "sum")
        return f"aggr_module={type(aggr).__name__}" if named else f"aggr={module.aggr!r}"
    if not is_untouched(aggr):
        return "aggr_module has hooks or a forward of its own"
    if all_hooked():
        return "there are hooks on all modules"
    if module.flow != "source_to_target":
        return f"flow={module.flow!r}"
    if module.decomposed_layers > 1:
        return f"decomposed_layers={module.decomposed_layers}"
    if module.explain:
        return "an explanation is active"
    if "parametrizations" in module._modules:  # which may draw random numbers at each access
        return "its parameters have parametrizations"
    if module.node_dim != cls._node_dim:
        return f"node_dim={module.node_dim}"
    if not compiling:
        if internals.num_function_modes() or internals.num_dispatch_modes():
            mode = foreign_mode()
            if mode is not None:
                return f"a mode is active, {mode}"
        if not PLAIN.issuperset(map(type, state["_parameters"].values())):
            foreign = foreign_tensor(module._parameters.values())
            if foreign is not None:
                return f"a parameter is a {foreign}"
    hooks = [getattr(module, name) for name in _HOOKS] if compiling else map(state.__getitem__, _HOOKS)
    if any(hooks):
        return "message passing hooks are registered"
    for name in _METHODS:
        if name in state and _is_changed(state[name], name, cls):
            return f"{name} is overridden"
    reason = _changed_in_class(cls) if compiling else _changed_since(cls)
    if reason is not None:
        return reason
    traced = torch.jit.is_tracing() if compiling else internals.tracing_state() is not None
    return "TorchScript" if traced or torch.jit.is_scripting() else None


_methods_of = attrgetter(*_METHODS)


def _changed_since(cls: Any) -> str | None:
    """`_changed_in_class`, but at first only compares the methods with those that were found to be the
    library's."""
    methods = (*_methods_of(cls), cls._called.now())
    if cls._methods_found == methods:
        return None
    reason = _changed_in_class(cls)
    if reason is None:
        cls._methods_found = methods
    return reason


def _changed_in_class(cls: Any) -> str | None:
    """The reason of `fusable` that holds for all instances of a class, or None."""
    changed = next((name for name in _METHODS if _is_changed(getattr(cls, name), name, cls)), None)
    if changed is not None:
        return f"{changed} is overridden"
    replaced = cls._called.replaced()
    return None if replaced is None else f"{replaced} was replaced, in torch_geometric or in torch"


# This mark is what torch.compiler.assume_constant_result sets, whose call would import the compiler. The
# function runs once, while a compiler records. Compiled code does not repeat it, because at every call it
# would cost a small graph too much time, for a change that is rare.
_changed_in_class._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _upstream(cls: type) -> Any:
    """The library's class to which FusedConv was added."""
    return cls.__mro__[cls.__mro__.index(FusedConv) + 1]


def _is_changed(method: Any, name: str, cls: Any) -> bool:
    method = getattr(method, "__func__", method)
    if method is cls._methods_of_library[name] or method is _METHODS_OF_BASE[name]:
        return False
    # torch_geometric compiles its own propagate and edge_updater for each class.
    compiled = (f"{base.__module__}_{base.__name__}_{name}" for base in cls.__mro__)
    return method.__module__ not in compiled


def wants_attention(return_attention_weights: bool | None) -> bool:
    """Whether GATConv and GATv2Conv return the attention: since torch_geometric 2.8 if that is true, before
    if it is a bool, whichever."""
    return isinstance(return_attention_weights, bool) if VERSION < (2, 8) else bool(return_attention_weights)


def ends(layer: nn.Module, x: Any) -> tuple[Tensor, Tensor | None]:
    """Source and destination features ``[N, F]`` or ``[B, N, F]``; both are x where it is one tensor."""
    if isinstance(x, Tensor):
        check_rows(layer, "x", x)
        return x, x
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        where = f"{type(layer).__name__}: x"
        raise TypeError(f"{where}: expected a tensor [N, F] or a pair of them, got {type(x).__name__}")
    x_src, x_dst = x
    check_rows(layer, "x[0]", x_src)
    if x_dst is not None:
        check_rows(layer, "x[1]", x_dst)
        if x_src.shape[:-2] != x_dst.shape[:-2]:
            raise wrong_argument(
                layer, "x[1]", f"a batch as x[0], {list(x_src.shape[:-2])}", list(x_dst.shape[:-2])
            )
    return x_src, x_dst


def both_ends(layer: nn.Module, x: Any) -> tuple[Tensor, Tensor]:
    """`ends` of a layer that reads the destinations' features, too."""
    x_src, x_dst = ends(layer, x)
    if x_dst is None:
        raise wrong_argument(layer, "x", "features of the destinations, too", "None for x[1]")
    return x_src, x_dst


def check_rows(layer: nn.Module, name: str, x: Any) -> None:
    """Raise TypeError or ValueError unless x is ``[N, F]``, or ``[B, N, F]``: B sets on one graph."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        raise wrong_features(layer, name, x, "[N, F]")
    if x.dim() not in (2, 3):
        where = f"{type(layer).__name__}: {name}"
        raise ValueError(f"{where}: expected shape [N, F] or [B, N, F], got {list(x.shape)}")


def is_batch(x: Any) -> bool:
    """Whether features, or the sources' of a pair, are ``[B, N, F]``, for which layers use `over_batch`."""
    x = x[0] if isinstance(x, (tuple, list)) else x
    return isinstance(x, Tensor) and x.dim() == 3


def over_batch(layer: Callable[..., Any], *features: Any) -> Any:
    """``layer(*features)`` for features ``[B, N, F]``, where layer is a function of ``[N, F]`` (or of pairs
    or dicts of such features), by vmap. The attentions of all sets are one, with more heads
    (`dfgnn.engine.autograd`); dropout differs between sets.

    The results may be tuples and dicts. Whatever in them is not a dense floating-point tensor has to be the
    same for all sets, and is returned without B.
    """
    dims = tree_map(lambda x: 0 if is_batch(x) else None, features)
    alike: Any = None

    def call(*features: Any) -> list[Tensor]:
        nonlocal alike
        leaves, structure = tree_flatten(layer(*features))
        own = [_is_dense(x) and x.is_floating_point() for x in leaves]
        alike = [None if is_own else x for is_own, x in zip(own, leaves)], own, structure
        return [x for is_own, x in zip(own, leaves) if is_own]

    found = iter(torch.func.vmap(call, in_dims=dims, randomness="different")(*features))
    leaves, own, structure = alike
    return tree_unflatten([next(found) if is_own else x for is_own, x in zip(own, leaves)], structure)


def _is_dense(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided
