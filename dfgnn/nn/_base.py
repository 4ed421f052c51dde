"""Base classes of the layers with DGL's contracts, and the checks and initialisations that they share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.argument_checks import DTYPES, wrong_shape
from ..graph import Graph
from ..runtime import torch_internals as internals
from ._errors import (
    CALL_ERRORS,
    blame_parameters,
    check_constructor,
    check_fits,
    check_flags,
    flags_of,
    projected,
    says_errors,
    wrong_argument,
    wrong_features,
)
from ._fused_or_upstream import upstream_runs
from ._graph import as_graph, check_in_degrees, names_of_ends
from ._linear import is_untouched
from .fused.operator_call import fused_layer, made_by, refuse_parameters
from .fused.spec import LayerSpec, spelled
from .prepared import again, prepare


def fused_or_dgl(cls: type, forward: Any) -> Any:
    """The forward of a layer: ``forward``, or that of DGL's layer (`upstream_runs`). It first tries the usual
    call, ``layer(graph, x)`` (`nn.prepared`). Its errors name a parameter that has got another shape."""
    flags = flags_of(forward)

    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        recording, usual = internals.is_dynamo_recording(), len(args) == 2 and not kwargs
        if usual and not recording:
            out = again(self, args[1], args[0])
            if out is not None:
                return out
        if not usual:
            check_flags(self, flags, args, kwargs)
        graph = args[0] if args else kwargs.get("graph", kwargs.get("g"))
        features = [x for name, x in kwargs.items() if name not in ("graph", "g")]
        if upstream_runs(self, graph, *args[1:], *features):
            return super(cls, self).forward(*args, **kwargs)  # type: ignore[misc]
        if recording:
            return forward(self, *args, **kwargs)
        try:
            out = forward(self, *args, **kwargs)
        except CALL_ERRORS as error:
            blame_parameters(self, error, args, kwargs)
            raise
        finally:
            made = made_by(self)
        if usual:
            prepare(self, made, args[1], args[0])
        return out

    return call


def renamed(name: str) -> property:
    """A property for the attribute that DGL gives this name."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))


class DGLLayer(nn.Module):
    """A layer that may have DGL's class of the same name as its last base (:mod:`dfgnn.nn.dgl`).

    So it is constructed by ``nn.Module.__init__(self)``: ``super()`` would be DGL's. It has the attributes of
    DGL's layer, so that an instance of either class becomes one of the other by assigning ``__class__``.
    """

    #: The function of `functional` that the layer calls; a user may set the function of `reference` instead.
    attention: Callable[..., Any]

    #: Names of sub-modules that the engine computes without calling them -> the classes that it can compute.
    _in_engine: dict[str, tuple[type, ...]] = {}
    #: Whether DGL's layer stores data of the sources and of the destinations in the graph under one name, so
    #: that one overwrites the other if these are the same nodes. Then DGL's own forward has to run.
    _one_name_for_ends = False

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls) and cls.__module__.startswith(f"{__package__}."):
            cls.__init__ = check_constructor(cls.__init__)  # type: ignore[method-assign]
        if "forward" in vars(cls) and cls.__module__.startswith(f"{__package__}."):
            says_errors(cls.forward, "As :meth:`GATConv.forward`.")
            cls.forward = fused_or_dgl(cls, cls.forward)  # type: ignore[method-assign]

    @classmethod
    def why_not(cls, layer: nn.Module) -> str | None:
        """What ``layer``, of this class or DGL's, is set up for that the fused forward does not do."""
        modules = layer._modules
        for name, known in cls._in_engine.items():
            module: Any = modules[name] if name in modules else getattr(layer, name)
            if type(module) not in known:
                return f"{name} is {_article(type(module).__name__)}"
            if not is_untouched(module):
                return f"there are hooks on {name}, or it has a forward of its own"
        return None

    def _read_parameters(self) -> Iterable[Tensor | None]:
        """The parameters that are read here, and not by a module that is called."""
        return self._parameters.values()


class GraphLayer(DGLLayer):
    """A layer that refuses destinations without in-edges unless ``allow_zero_in_degree``."""

    _allow_zero_in_degree: bool
    allow_zero_in_degree = renamed("_allow_zero_in_degree")

    def set_allow_zero_in_degree(self, set_value: bool) -> None:
        self.allow_zero_in_degree = set_value

    def _graph(self, graph: Any) -> Graph:
        """The graph as the engine takes it, with its in-degrees checked."""
        fused = as_graph(graph, self)
        if not self._allow_zero_in_degree:
            check_in_degrees(graph, fused, f"{type(self).__name__}: ")
        return fused


class AttentionLayer(GraphLayer):
    """A layer with ``num_heads`` heads (H) of size ``out_feats`` (D)."""

    num_heads = renamed("_num_heads")
    out_feats = renamed("_out_feats")

    def _usual_edges(
        self, x: Tensor, x_dst: Tensor | None, graph: Any, edge_attr: None
    ) -> tuple[Graph, None] | None:
        """The graph of a usual call (`nn.prepared`), without attributes of edges; None if it is none."""
        if type(graph) is not Graph:
            return None
        src, dst = graph._structure.src, graph._structure.dst
        if dst.num_rows != (src.num_rows if x_dst is None else x_dst.shape[0]):
            return None
        return (graph, None) if self._allow_zero_in_degree or dst.has_empty is False else None

    def _keeps_features(self) -> bool:
        """Whether the fused operator gets the features as they are given: their dropout does nothing now."""
        drop = self._modules.get("feat_drop")
        return drop is None or (isinstance(drop, (nn.Dropout, nn.Identity)) and not dropout_p(drop))

    def _finisher(self) -> Any:
        """What follows the operator in a usual call: it gets the layer, the result and the features."""
        return type(self)._after

    def _after(self, out: Tensor, x: Tensor) -> Tensor:
        return out.view(-1, self._num_heads, self._out_feats)

    def _set_sizes(self, in_feats: int | tuple[int, int], out_feats: int, num_heads: int) -> None:
        self._num_heads = num_heads
        self._in_src_feats, self._in_dst_feats = as_pair(in_feats)
        self._out_feats = out_feats

    def _add_projections(self, in_feats: int | tuple[int, int]) -> None:
        """Adds ``fc``, or ``fc_src`` and ``fc_dst`` if in_feats is a pair: DGL's names."""
        width = self.num_heads * self.out_feats
        if isinstance(in_feats, tuple):
            self.fc_src = nn.Linear(in_feats[0], width, bias=False)
            self.fc_dst = nn.Linear(in_feats[1], width, bias=False)
        else:
            self.fc = nn.Linear(in_feats, width, bias=False)

    def _projections(self) -> tuple[nn.Linear, nn.Linear]:
        return (self.fc, self.fc) if hasattr(self, "fc") else (self.fc_src, self.fc_dst)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.out_feats))

    def _attend(
        self,
        spec: LayerSpec,
        graph: Graph,
        feat: Any,
        ends: tuple[Tensor, Tensor],
        return_attention: bool,
        options: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Any]:
        """The layer of GATv2 or dot products that ``spec`` describes: ``[N_dst, *, H, D]``, and the attention
        ``[E, *, H, 1]`` or None. It is one autograd function where that is possible, else computed operation
        by operation.

        feat: the argument from which ``ends`` were made, for errors. options: arguments of the attention that
        fused layers do not have.
        """
        whole = seed = None
        if not options:
            x_dst = None if spec.query is None or ends[0] is ends[1] else ends[1]
            whole, seed = fused_layer(self, spec, graph, ends[0], x_dst, return_attention)
            if whole is not None and not return_attention:
                return self._heads(whole), None
        refuse_parameters(self, spec)
        source, destination = names_of_ends("feat", feat)
        prefix = ends[0].shape[1:-1]
        more = {**(options or {}), **({} if seed is None else {"generator": seed})}

        def project(name: str) -> Any:
            if name == "edge":
                return self._edges(spec, prefix.numel())
            linear, at_dst = getattr(spec, name), name == "query"
            if linear is None:
                return None
            rows = projected(self, destination if at_dst else source, linear, ends[at_dst])
            return self._heads(rows).flatten(1, -2)

        def attend(value: Tensor, key: Any, query: Any, edges: dict[str, Any]) -> Any:
            query = value[: graph.num_dst] if query is None else query
            if spec.score == "dot":
                inputs = query, value if key is None else key, value
                edges["scale"] = spec.scale
            else:
                attn = spec.vectors[0][0].to(value.dtype).expand(*prefix, -1, -1)
                inputs = query, value, attn.flatten(0, -2)
                edges["negative_slope"] = spec.negative_slope
            return self.attention(
                graph, *inputs, **edges, **more, dropout_p=spec.dropout_p, return_attention=return_attention
            )

        # The sources are projected first, as in DGL's layer: parametrizations may draw random numbers.
        rows = {"value": project("value")} if spec.key is None else {}
        result = spelled(spec.score, lambda name: rows[name] if name in rows else project(name), attend)
        out, attention = self._unpack(result, prefix)
        return out if whole is None else self._heads(whole), attention

    def _edges(self, spec: LayerSpec, sets: int) -> dict[str, Any]:
        """The attention's arguments for attributes of edges. sets: the size of the batch, which is folded
        into the heads: all heads of the first element, then those of the next."""
        return {}

    def _unpack(self, result: Tensor | tuple[Tensor, Tensor], prefix: Sequence[int]) -> tuple:
        """out ``[N_dst, *, H, D]`` and attention ``[E, *, H, 1]`` (or None), from the engine's result.

        The engine takes the batch dimensions ``prefix`` as further heads.
        """
        out, attention = result if isinstance(result, tuple) else (result, None)
        out = out.unflatten(1, (*prefix, self.num_heads))
        if attention is not None:
            attention = attention.unflatten(1, (*prefix, self.num_heads)).unsqueeze(-1)
        return out, attention


class LeakyLayer(AttentionLayer):
    """A layer with dropout of features and attention, a LeakyReLU of scores, a residual and an activation.

    A subclass sets ``res_fc`` and ``activation``.
    """

    res_fc: nn.Module | None
    activation: Callable[[Tensor], Tensor] | None

    _in_engine = {"leaky_relu": (nn.LeakyReLU,), "attn_drop": (nn.Dropout, nn.Identity)}

    negative_slope = property(
        lambda self: self.leaky_relu.negative_slope,
        lambda self, value: setattr(self.leaky_relu, "negative_slope", value),
    )

    def _add_pointwise(self, feat_drop: float, attn_drop: float, negative_slope: float) -> None:
        self.feat_drop = nn.Dropout(feat_drop)
        self.attn_drop = nn.Dropout(attn_drop)
        self.leaky_relu = nn.LeakyReLU(negative_slope)

    def _after(self, out: Tensor, x: Tensor) -> Tensor:
        out = out.view(-1, self._num_heads, self._out_feats)
        plain = self.res_fc is None and self.activation is None
        return out if plain else self._finish(out, x)

    def _finish(self, out: Tensor, h_dst: Tensor) -> Tensor:
        """Adds the residual to out ``[N_dst, *, H, D]`` and applies the activation."""
        if self.res_fc is not None:
            out = out + self._heads(self.res_fc(h_dst))
        return out if self.activation is None else self.activation(out)


def as_pair(sizes: int | tuple[int, int]) -> tuple[int, int]:
    return sizes if isinstance(sizes, tuple) else (sizes, sizes)


def dropout_p(dropout: nn.Module) -> float:
    """The probability that a Dropout applies now; 0 for an Identity."""
    return dropout.p if dropout.training and isinstance(dropout, nn.Dropout) else 0.0


def add_bias(layer: nn.Module, bias: bool, width: int) -> None:
    """Give the layer its ``bias``, or a buffer None in its place, as DGL's layers have it."""
    if bias:
        layer.bias = nn.Parameter(torch.empty(width))
    else:
        layer.register_buffer("bias", None)


def zero(*biases: Tensor | None) -> None:
    for bias in biases:
        if bias is not None:
            nn.init.zeros_(bias)


def xavier(*weights: Tensor) -> None:
    """Xavier normal with gain sqrt(2), drawn in this order."""
    for weight in weights:
        nn.init.xavier_normal_(weight, gain=nn.init.calculate_gain("relu"))


def reset_linear(*linears: nn.Linear | None) -> None:
    """Xavier uniform for the weights, drawn in this order, and zero for the biases."""
    for linear in linears:
        if linear is not None:
            nn.init.xavier_uniform_(linear.weight)
            zero(linear.bias)


def check_edge_rows(
    layer: nn.Module, name: str, x: Any, linear: nn.Module, graph: Graph, prefix: Sequence[int]
) -> None:
    """Raise TypeError or ValueError unless ``x`` is ``[E, *, any]`` with the features' leading dimensions, as
    ``linear`` takes them."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        raise wrong_features(layer, name, x, "[E, *, F_e]")
    expected = [graph.num_edges, *prefix]
    if list(x.shape[:-1]) != expected:
        shape = ", ".join(str(n) for n in expected)
        raise wrong_argument(layer, name, f"shape [{shape}, any], a row per edge", list(x.shape))
    check_fits(layer, name, linear, x)


def check_per_edge(layer: nn.Module, name: str, x: Any, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise TypeError or ValueError unless ``x``, an option on edges, is None or has one of the shapes."""
    if x is None or isinstance(x, Tensor) and x.shape in shapes:
        return
    where = f"{type(layer).__name__}: {name}"
    if not isinstance(x, Tensor):
        raise TypeError(f"{where}: expected a tensor, got {type(x).__name__}")
    raise ValueError(f"{where}: {wrong_shape(name, x, shapes)}")


def _article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"
