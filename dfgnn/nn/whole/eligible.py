"""When a layer can be computed at once (`dfgnn.nn.whole.pair`), which is decided here alone.

A layer says what it consists of: its projections, vectors and numbers. It is computed at once if these are
all that it is (`knows_all_of`), if nothing hangs on them, and if the tensors are such as the functions take.
All else takes the way of single operations, which knows every option.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ... import functional
from ...engine import paths
from ...engine.paths import declined
from ...engine.traced_graph import in_use
from ...graph import Graph
from ...runtime.eager import is_eager
from .._terms import all_hooked, is_untouched, plain_linear
from .additive import Edges, gat_layer
from .gated import GatedTensors, gated_layer
from .pair import PairTensors, can_fuse, pair_layer, seed_of
from .traced import MOST_UNFOLDED, gat_recorded, pair_recorded

__all__ = [
    "Dropout",
    "attention_seed",
    "dot_at_once",
    "gat_at_once",
    "gated_at_once",
    "is_first_rows",
    "knows_all_of",
    "pair_at_once",
]

# The probability, and the seed of the mask; None: the layer draws one.
Dropout = tuple[float, Tensor | None]

# Why a layer is not computed at once, for :func:`dfgnn.explain`.
_CHANGED = "the attention, an option of the layer or a hook on all modules is not known to the fused layer"
_PROJECTION = (
    "a projection is no plain linear module, but one with hooks, a parametrization or a forward of its own"
)
_TENSORS = "features and parameters are not plain 2-d tensors of one dtype on the graph's device"
_EDGES = "the edges' attributes or their projection do not fit the fused layer"

_PLAIN = (nn.Parameter, Tensor)
_NONE = None, None
_NO_EDGES = None, None, None


@cache
def knows_all_of(cls: type) -> bool:
    """Whether the options that a layer is made with are those that its class names in ``AT_ONCE``: what is
    given at once takes care of these. A class without that name is not computed at once, nor one whose
    constructor has learnt more since, as a library's layers do."""
    owner = next((c for c in cls.__mro__ if "AT_ONCE" in vars(c)), None)
    if owner is None:
        return False
    options = inspect.signature(owner.__init__).parameters.values()  # type: ignore[misc]
    named = {x.name for x in options if x.kind is not inspect.Parameter.VAR_KEYWORD}
    return named <= {"self", *vars(owner)["AT_ONCE"].split()}


def _applies(layer: nn.Module, attention: Callable[..., Any]) -> bool:
    knows_all = _known_to_compilers if torch.compiler.is_compiling() else knows_all_of
    is_ours = getattr(layer, "attention", attention) is attention
    return is_ours and knows_all(type(layer)) and not all_hooked()


def _known_to_compilers(cls: type) -> bool:
    return knows_all_of(cls)


_known_to_compilers._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see `pyg._base`


def is_first_rows(x_dst: Tensor, x: Tensor) -> bool:
    """Whether these are the first rows of x, or x itself, for autograd, too: as samplers give a block's
    destinations, ``x[:num_dst]``. Who has the gradient of x then needs none of theirs."""
    if x_dst is x:
        return True
    if (
        not is_eager(x)
        or not is_eager(x_dst)
        or x.layout is not torch.strided
        or x_dst.layout is not torch.strided
        or x_dst.data_ptr() != x.data_ptr()
        or (x_dst.dtype, x_dst.device, x_dst.dim()) != (x.dtype, x.device, x.dim())
        or (x_dst.stride(), x_dst.shape[1:]) != (x.stride(), x.shape[1:])
        or len(x_dst) > len(x)
    ):
        return False
    if not torch.is_grad_enabled() or not (x.requires_grad or x_dst.requires_grad):
        return True
    node = x_dst.grad_fn
    if node is None or node.name() != "SliceBackward0" or x_dst._backward_hooks or x_dst.retains_grad:
        return False
    return x.requires_grad and node.next_functions[0] == tuple(torch.autograd.graph.get_gradient_edge(x))[:2]


def attention_seed(layer: Any, graph: Any, x: Tensor, dropout_p: float) -> Tensor | None:
    """The seed that a layer draws for dropout, for two computations with the same mask: the layer's result,
    which must not depend on whether the attention is returned, and the attention. None: without dropout, or
    where the layer is not computed at once, so that one computation gives both."""
    known = functional.gat_attention, functional.gatv2_attention, functional.dot_attention
    if dropout_p == 0 or type(graph) is not Graph or layer.attention not in known or not is_eager(x):
        return None
    return seed_of(graph, dropout_p)


# Up to so many products in a projection, and elements that are gathered along edges, a layer of 32-bit
# features is computed as such under autocast, too: each cast is a launch, and kernels are not what a small
# graph waits for. Dtypes of results are those of autocast.
_MOST_PRODUCTS, _MOST_GATHERED = 2**30, 2**24


def _is_small(graph: Any, x: Tensor, weight: Tensor, attr: Tensor | None) -> bool:
    width = weight.shape[0]
    return (
        x.shape[0] * weight.numel() <= _MOST_PRODUCTS
        and graph.num_edges * width <= _MOST_GATHERED
        and (attr is None or attr.numel() * width <= _MOST_PRODUCTS)
    )


def _in_autocast(
    graph: Any, x: Tensor, x_dst: Tensor | None, weight: Tensor, attr: Tensor | None = None
) -> tuple[Tensor, Tensor | None, bool, torch.dtype]:
    """Features as the layer is computed in here; whether that is the dtype of autocast; and what a linear
    layer would give. attr: of edges, which are projected, too."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x, x_dst, False, x.dtype
    dtype = torch.get_autocast_dtype(kind)
    all_wide = x.dtype is weight.dtype is torch.float32 and (x_dst is None or x_dst.dtype is torch.float32)
    if all_wide and _is_small(graph, x, weight, attr):
        return x, x_dst, False, dtype
    if x_dst is not None and x_dst.dtype is not dtype:
        x_dst = x_dst.to(dtype)
    return x if x.dtype is dtype else x.to(dtype), x_dst, True, dtype


def _are_plain(x: Tensor, tensors: tuple[Tensor | None, ...], dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether these parameters are ordinary tensors of one of the types, on the device of x."""
    device = x.device
    for t in tensors:
        if t is not None and not (type(t) in _PLAIN and t.dtype in dtypes and t.device == device):
            return False
    return True


def _result(dtype: torch.dtype, wide: Any) -> torch.dtype:
    """The dtype of the result: that of features, or what it becomes with `wide`, a tensor or a dtype."""
    if wide is None:
        return dtype
    wide = wide.dtype if isinstance(wide, Tensor) else wide
    return dtype if wide is dtype else torch.promote_types(dtype, wide)


def gat_at_once(
    layer: Any,
    graph: Any,
    x: Tensor,
    linear: Any,
    attn_src: Tensor,
    attn_dst: Tensor,
    bias: Tensor | None,
    *,
    dropout: Dropout,
    wide: Tensor | None = None,
    of_edges: tuple[Tensor, Any, Tensor] | None = None,
) -> Tensor | None:
    """``[N_dst, H * D]`` of an additive layer with its bias, in the dtype of features and ``wide`` together,
    where `gat_layer` gives it; else None. of_edges: attributes, their projection and their vector."""
    if not _applies(layer, functional.gat_attention):
        return declined("layer", _CHANGED)
    if torch.compiler.is_compiling():
        if of_edges is not None:
            return None
        return gat_recorded(layer, graph, x, linear, attn_src, attn_dst, bias, dropout[0], wide)
    plain = plain_linear(linear)
    if plain is None or plain[1] is not None:
        return declined("layer", _PROJECTION)
    x, _, autocast, dtype = _in_autocast(graph, x, None, plain[0])
    known = (x.dtype, torch.float32)
    if not (
        can_fuse(graph, x, plain[0], autocast) and _are_plain(x, (attn_src, attn_dst, bias, plain[0]), known)
    ):
        return declined("layer", _TENSORS)
    edges = None
    if of_edges is not None:
        edges = _edges(graph, x, known, *of_edges)
        if edges is None:
            return declined("layer", _EDGES)
    if paths.recorder is not None:
        paths.recorder.took("layer", type(layer).__name__)
    return gat_layer(
        graph, x, plain[0], attn_src, attn_dst, bias, negative_slope=layer.negative_slope,
        dropout_p=dropout[0], dtype=_result(dtype, wide), edges=edges, seed=dropout[1],
    )  # fmt: skip


def _edges(
    graph: Graph, x: Tensor, dtypes: tuple[torch.dtype, ...], attr: Tensor, linear: Any, attn: Tensor
) -> Edges | None:
    plain = plain_linear(linear)
    if plain is None or plain[1] is not None or not is_eager(attr) or attr.dim() != 2:
        return None
    if graph.edge_mask is not None:  # fixed capacity: gradients of edges that are not in use are not written
        return None
    weight = plain[0]
    if attr.shape[1] != weight.shape[1] or not _are_plain(x, (weight, attn), dtypes):
        return None
    if torch.is_autocast_enabled(x.device.type) and attr.is_floating_point():
        attr = attr.to(weight.dtype)
    if not attr.dtype == weight.dtype == attn.dtype or attr.device != x.device:
        return None
    return Edges(attr, weight, attn)


# What autocast casts.
_CAST = torch.float32, torch.float16, torch.bfloat16


def _projected_edges(
    graph: Graph, x: Tensor, dtypes: tuple[torch.dtype, ...], heads: int, attr: Tensor, linear: Any
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Attributes in x's dtype, and the weight and the bias of their projection."""
    plain = plain_linear(linear)
    if plain is None or not is_eager(attr):
        return None
    weight, bias = plain
    if attr.dtype is not x.dtype and attr.dtype in _CAST and torch.is_autocast_enabled(x.device.type):
        attr = attr.to(x.dtype)
    if not (
        attr.dtype is x.dtype
        and len(attr) == graph.num_edges
        and can_fuse(graph, attr, weight, len(dtypes) > 1)
        and _are_plain(x, (weight, bias), dtypes)
        and (attr.shape[1] * heads >= len(weight) or len(attr) * len(weight) <= MOST_UNFOLDED[x.device.type])
    ):
        return None
    if graph.edge_mask is not None:  # fixed capacity: what is there of edges that are not in use may be NaN
        attr = in_use(graph.edge_mask, attr)
    return attr, weight, bias


def pair_at_once(
    layer: Any,
    graph: Any,
    score: str,
    x: Tensor,
    x_dst: Tensor | None,
    value: Any,
    key: Any,
    query: Any,
    *,
    heads: int,
    skip: Any = None,
    of_edges: tuple[Tensor, Any] | None = None,
    attn: Tensor | None = None,
    bias: Tensor | None = None,
    negative_slope: float = 1.0,
    scale: float = 1.0,
    dropout: Dropout = (0.0, None),
    wide: Any = None,
) -> Tensor | None:
    """``[N_dst, H * D]`` of a layer with a score of pairs and these projections, in the dtype of features and
    ``wide`` together, where `pair_layer` gives it; else None.

    key, query, skip: None for what ``value`` gives, or none. x_dst: None for x, or its first rows where
    ``value`` projects the query, too. of_edges: attributes and their projection, which is added to keys and
    values.
    """
    function = functional.dot_attention if score == "dot" else functional.gatv2_attention
    if not _applies(layer, function):
        return declined("layer", _CHANGED)
    if torch.compiler.is_compiling():
        return pair_recorded(
            graph, score, x, x_dst, value, key, query, heads, skip, of_edges, attn, bias,
            (negative_slope, scale, dropout[0]), wide,
        )  # fmt: skip
    parameters: list[Any] = []
    for linear in (value, key, query, skip):
        found = _NONE if linear is None else plain_linear(linear)
        if found is None:
            return declined("layer", _PROJECTION)
        parameters += found
    weight, at_dst = parameters[0], [w for w in parameters[4::2] if w is not None]
    attr = None if of_edges is None else of_edges[0]
    x, x_dst, autocast, dtype = _in_autocast(graph, x, x_dst, weight, attr)
    known = (x.dtype, torch.float32) if autocast else (x.dtype,)
    shape = weight.shape if x_dst is None else (weight.shape[0], x_dst.shape[-1])
    if not (
        can_fuse(graph, x, weight, autocast)
        and (key is None or parameters[2].shape == weight.shape)
        and all(w.shape == shape for w in at_dst)
        and (x_dst is None or not at_dst or can_fuse(graph, x_dst, at_dst[0], autocast))
        and _are_plain(x, (*parameters, attn, bias), known)
    ):
        return declined("layer", _TENSORS)
    tensors = PairTensors._make(
        [x, x_dst, *parameters[:6], attn, bias, *parameters[6:], *_NO_EDGES, dropout[1]]
    )
    if of_edges is not None:
        edges = _projected_edges(graph, x, known, heads, *of_edges)
        if edges is None:
            return declined("layer", _EDGES)
        attr, edge_weight, edge_bias = edges
        tensors = tensors._replace(edge_attr=attr, edge_weight=edge_weight, edge_bias=edge_bias)
    if paths.recorder is not None:
        paths.recorder.took("layer", type(layer).__name__)
    return pair_layer(
        graph, score, tensors, heads, negative_slope=negative_slope, scale=scale, dropout_p=dropout[0],
        dtype=_result(dtype, wide),
    )  # fmt: skip


def dot_at_once(
    graph: Any,
    x: Tensor,
    x_dst: Tensor | None,
    value: nn.Module,
    key: nn.Module | None,
    query: nn.Module | None,
    layer: Any,
    dropout: Dropout = (0.0, None),
    of_edges: tuple[Tensor, Any] | None = None,
) -> Tensor | None:
    """`pair_at_once` of a layer of dot products with DGL's contract."""
    return pair_at_once(
        layer, graph, "dot", x, x_dst, value, key, query, heads=layer.num_heads,
        scale=1 / math.sqrt(layer.out_feats), dropout=dropout, of_edges=of_edges,
    )  # fmt: skip


def gated_at_once(layer: Any, graph: Any, x: Tensor, mean: bool) -> Tensor | None:
    """``[N, C]`` of torch_geometric's ResGatedGraphConv without attributes of edges, where `gated_layer`
    gives it; else None."""
    if (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled(x.device.type)
        or not knows_all_of(type(layer))  # type: ignore[arg-type]
        or type(layer.act) is not nn.Sigmoid
        or not is_untouched(layer.act)
    ):
        return declined("layer", _CHANGED)
    skip = (layer.lin_skip,) if layer.root_weight else ()
    linear = [plain_linear(lin) for lin in (layer.lin_key, layer.lin_query, layer.lin_value, *skip)]
    if any(found is None for found in linear):
        return declined("layer", _PROJECTION)
    weights, biases = zip(*linear)  # type: ignore[misc]
    rows_fit = x.device.type == "cpu" or len(weights[0]) * x.element_size() % 16 == 0  # as kernels load them
    if (
        any(bias is None for bias in biases[:3])
        or any(bias is not None for bias in biases[3:])
        or not rows_fit
        or not all(can_fuse(graph, x, weight) for weight in weights)
        or not _are_plain(x, (*weights, *biases, layer.bias), (x.dtype,))
        or graph.num_src != graph.num_dst
    ):
        return declined("layer", _TENSORS)
    tensors = GatedTensors._make([x, *(*weights, None)[:4], *biases[:3], layer.bias])
    if paths.recorder is not None:
        paths.recorder.took("layer", type(layer).__name__)
    return gated_layer(graph, tensors, mean)
