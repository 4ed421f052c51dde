"""The base class of the layers: what it takes for a fused forward, and arguments and results they share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense.linear import Linear

from ...graph import Graph, cache
from .._errors import check_constructor, says_errors
from .._fused_or_upstream import METHODS, fused_or_pyg, methods_of, warn, why_upstream
from .._linear import LINEAR
from .._upstream import Called, is_from
from ..fused.operator_call import fused_layer, refuse_parameters
from ..fused.spec import LayerSpec
from ._edges import attention_result, edge_attributes
from ._x_and_edge_index import for_upstream

LIBRARY = "torch_geometric"
LINEAR.append(Linear)
# When this module is imported, which is before or after a program replaces some of them.
_METHODS_OF_BASE = {name: getattr(MessagePassing, name) for name in METHODS}


class PyGLayer:
    """Mixin of the layers: ``class GATConv(PyGLayer, torch_geometric.nn.GATConv)``.

    Adds no state, so that an instance of torch_geometric's class becomes a fused layer, and one again, by
    assigning ``__class__``.
    """

    # What `why_upstream` reads of a class. The classes of aggregations that the fused forward computes:
    _aggregations: ClassVar[tuple[type, ...]] = (SumAggregation,)
    # The value of `node_dim` (the dimension of nodes in message passing) that torch_geometric's class sets.
    _node_dim: ClassVar[int] = 0
    # A function that returns why the fused forward of a layer cannot run, for reasons of this class alone.
    _special_reason: ClassVar[Any] = None
    # The methods as they were when they were last found to be the library's; and a function that reads them.
    _methods_found: ClassVar[Any] = ()
    _methods_of: ClassVar[Any] = methods_of

    if TYPE_CHECKING:  # otherwise TorchScript would read these annotations, too
        attention: Callable[..., Any]  # of `functional`, or of `reference`: the same layer on plain PyTorch
        add_self_loops: bool
        inspector: Any
        _orig_propagate: ClassVar[Any]
        bias: Tensor | None
        _modules: dict[str, Any]
        concat: bool
        dropout: float
        heads: int
        out_channels: int
        training: bool
        _methods_of_library: ClassVar[dict[str, tuple[Any, ...]]]
        _called: ClassVar[Called]

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if PyGLayer in cls.__bases__:
            library = _upstream(cls)
            # The library's methods are those of its class and of MessagePassing. A method that was replaced
            # before this class was made is left out, because it is not the library's.
            cls._methods_of_library = {
                name: tuple(x for x in (getattr(library, name), of_base) if is_from("torch_geometric", x))
                for name, of_base in _METHODS_OF_BASE.items()
            }
            cls._called = Called(library)
            cls.__init__ = check_constructor(cls.__init__)  # type: ignore[method-assign]
            forward: Any = cls.forward  # type: ignore[attr-defined]
            says_errors(forward, "TypeError, ValueError: an argument is not as described, or sizes differ.")
            cls.forward = fused_or_pyg(cls, forward, for_upstream)  # type: ignore[attr-defined]

    @classmethod
    def why_not(cls, layer: MessagePassing) -> str | None:
        """What ``layer``, of this class or torch_geometric's, is set up for that the fused forward does not
        do."""
        return why_upstream(layer, cls)

    def _usual_edges(
        self, x: Tensor, x_dst: Tensor | None, edges: Any, edge_attr: Tensor | None
    ) -> tuple[Graph, Tensor | None] | None:
        """The graph, and the attributes of its edges, of a usual call (`nn.prepared`); None if it is none."""
        own, num_src = self.__dict__, x.shape[0]
        num_dst = num_src if x_dst is None else x_dst.shape[0]
        if type(edges) is Tensor:
            if edges.layout is not torch.strided or edges.is_meta:
                return None
        elif type(edges) is not Graph:
            return None
        loops = own.get("add_self_loops", False)
        graph, edge_map = cache.graph_of(edges, num_src, num_dst, loops, type(self).__name__)
        if type(edges) is Graph and (graph.num_src != num_src or graph.num_dst != num_dst):
            return None
        if edge_attr is None:
            return graph, None
        if own["_modules"].get("lin_edge") is None or type(edge_attr) is not Tensor or not edge_attr.shape[0]:
            return None
        fill_value, layer = own.get("fill_value"), cast(torch.nn.Module, self)
        return graph, edge_attributes(layer, edges, edge_attr, graph, edge_map, fill_value)

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], self.heads, self.out_channels)

    def _joins_heads(self) -> bool:
        """Whether the result has all heads, not their mean."""
        return self.concat or self.heads == 1

    def _fused(
        self, spec: LayerSpec, graph: Any, x_src: Tensor, own_dst: Tensor | None, x_dst: Any, wanted: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The result of `fused_layer`, with what follows it; and its seed. x_dst: destinations' features;
        own_dst: those that the operator reads, None where they are x_src or not read."""
        out, seed = fused_layer(self, spec, graph, x_src, own_dst, wanted)
        if out is not None:
            size, bias = self.out_channels, getattr(self, "bias", None)
            mean = not self._joins_heads() and bias is not None and bias.shape != (size,)
            if out.shape[-1] != self.heads * size or mean:
                refuse_parameters(self, spec)
            out = self._finish(out, x_dst)
        return out, seed

    def _keeps_features(self) -> bool:
        return True

    def _finisher(self) -> Any:
        """What follows the operator in a usual call."""
        return None if self._joins_heads() else type(self)._finish

    def _finish(self, out: Tensor, x_dst: Tensor) -> Tensor:
        """The layer's result from that of its operator: with heads that are averaged, their mean, to which
        residual and bias are added."""
        if self.concat or self.heads == 1:
            return out
        out = out.view(-1, self.heads, self.out_channels).mean(1)
        bias, res = self.bias, self._modules.get("res")
        out = out if bias is None else out + bias
        return out if res is None else out + res(x_dst)

    def _options(self, seed: Tensor | None = None, **options: Any) -> dict[str, Any]:
        """The attention's arguments, with its dropout. seed: that of dropout, if it was drawn before."""
        options["dropout_p"] = self.dropout if self.training else 0.0
        return options if seed is None else {**options, "generator": seed}

    def _result(
        self, edge_index: Any, graph: Any, out: Any, inputs: tuple, options: dict[str, Any],
        dtype: torch.dtype, residual: Tensor | None, wanted: bool,
    ) -> Any:  # fmt: skip
        """The layer's result in this dtype, with the residual and the bias, unless it is ``out``, which was
        computed at once; and where it is wanted, a pair with the attention (`attention_result`)."""
        fused_bias, bias = self._split_bias(inputs[0].dtype) if out is None else (None, None)
        found = self.attention(graph, *inputs, **options, out_bias=fused_bias, return_attention=wanted)
        if out is None:
            out = self._merged(found[0] if wanted else found, bias, residual, dtype)
        if not wanted:
            return out
        return out, attention_result(edge_index, found[1].to(dtype), graph, self.add_self_loops)

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

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        # At the first instance of a class torch_geometric compiles that class's message passing, which the
        # library's forward calls. Our classes get what is compiled for the library's classes, even if an
        # instance of ours comes first.
        cls = type(self)
        library = _upstream(cls)
        self.inspector.get_source(library)  # it caches sources by class name, which both classes share
        if PyGLayer in cls.__bases__:
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
        if PyGLayer not in type(self).__bases__:
            return self
        warn(type(self), LIBRARY, "TorchScript")
        plain = copy.copy(self)
        plain.__class__ = _upstream(type(self))
        return plain


def _upstream(cls: type) -> Any:
    """The library's class to which PyGLayer was added."""
    return cls.__mro__[cls.__mro__.index(PyGLayer) + 1]


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
