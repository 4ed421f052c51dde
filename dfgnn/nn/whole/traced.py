"""What `_at_once` is to eager calls, while torch.compile records: a layer as its linear modules and one
operator, on rows of all heads, with nothing checked that would have to be checked again at every call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...engine import traced as _edge_attention
from ...engine import traced_graph as _edges
from ...engine.checks import DTYPES
from ...engine.traced_graph import EdgeList
from ...graph import Graph
from ...runtime.arguments import FEAT_IN_KEY, FEAT_IN_VALUE, Numbers, Tensors
from ...runtime.compiling import is_exporting
from .._terms import plain_linear

__all__ = ["gat_recorded", "pair_recorded"]

# Elements of projected attributes up to which they are made although they could be folded into the attention
# (`_edge_terms`), which takes more launches and less memory.
MOST_UNFOLDED = {"cpu": 2**16, "cuda": 2**23}

_LOAD = 16  # bytes that CUDA's kernels load at a time


class _Rows(NamedTuple):
    """Rows of heads, each with the padding that CUDA's kernels want behind it."""

    heads: int
    size: int
    padding: int

    def pad(self, x: Tensor | None) -> Tensor | None:
        """Of a weight [heads * size, F], or a vector."""
        if x is None or not self.padding:
            return x
        by_head = x.unflatten(0, (self.heads, self.size))
        return F.pad(by_head, (0, 0) * (x.dim() - 1) + (0, self.padding)).flatten(0, 1)

    def cut(self, x: Tensor) -> Tensor:
        """[N, heads * size] of an operator's result."""
        if not self.padding:
            return x
        return x.unflatten(1, (self.heads, self.size + self.padding))[..., : self.size].flatten(1)

    def project(self, linear: Any, x: Tensor) -> Tensor:
        """What a linear module gives, with the padding."""
        if not self.padding:
            return linear(x)
        weight, bias = plain_linear(linear)  # type: ignore[misc]  # see `_rows`
        return F.linear(x, self.pad(weight), self.pad(bias))  # type: ignore[arg-type]


def _rows(heads: int, size: int, x: Tensor, *linears: Any) -> _Rows | None:
    """None where these modules cannot be given rows with padding, which they need."""
    kind, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    padding = -size % (_LOAD // dtype.itemsize) if kind == "cuda" else 0
    if padding and any(linear is not None and plain_linear(linear) is None for linear in linears):
        return None
    return _Rows(heads, size, padding)


def _stand_in(graph: Any, x: Tensor) -> EdgeList | None:
    """What stands for the graph, where its operators take features such as these."""
    if is_exporting() or not isinstance(graph, (Graph, EdgeList)) or x.dim() != 2 or x.dtype not in DTYPES:
        return None
    kind = x.device.type
    if kind != graph.device.type or kind not in MOST_UNFOLDED:
        return None
    return _edges.stand_in(graph)


def _within(rows: _Rows, x: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The bias, where the operator is to add it, or what comes after."""
    apart = rows.padding or bias is None or bias.dtype != x.dtype
    return (None, bias) if apart else (bias, None)


def _seed(dropout_p: float, x: Tensor) -> Tensor | None:
    return torch.randint(0, 2**62, (1,), device=x.device) if dropout_p > 0 else None


def _result(out: Tensor, bias: Tensor | None, wide: Any) -> Tensor:
    if wide is not None:
        out = out.to(torch.promote_types(out.dtype, wide.dtype if isinstance(wide, Tensor) else wide))
    return out if bias is None else out + bias


def gat_recorded(
    layer: Any,
    graph: Any,
    x: Tensor,
    linear: Any,
    attn_src: Tensor,
    attn_dst: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    wide: Tensor | None,
) -> Tensor | None:
    """`_at_once.gat_at_once` without edges' attributes."""
    edges, rows = _stand_in(graph, x), _rows(*attn_src.shape[-2:], x, linear)
    if edges is None or rows is None:
        return None
    feat = rows.project(linear, x)
    if feat.dtype not in (attn_src.dtype, torch.float16, torch.bfloat16):
        attn_src, attn_dst = attn_src.to(feat.dtype), attn_dst.to(feat.dtype)
    within, after = _within(rows, feat, bias)
    train = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (feat, attn_src, attn_dst, within)
    )
    out = _edge_attention.gat(
        edges, feat, attn_src, attn_dst, _seed(dropout_p, x), within, float(layer.negative_slope),
        float(dropout_p), train,
    )  # fmt: skip
    out = rows.cut(out.clone() if train else out)  # see `_autograd`
    return _result(out, after, wide)


def pair_recorded(
    graph: Any,
    score: str,
    x: Tensor,
    x_dst: Tensor | None,
    value: Any,
    key: Any,
    query: Any,
    heads: int,
    skip: Any,
    of_edges: tuple[Tensor, Any] | None,
    attn: Tensor | None,
    bias: Tensor | None,
    numbers: tuple[float, float, float],
    wide: Any,
) -> Tensor | None:
    """`_at_once.pair_at_once`. numbers: negative_slope, scale and dropout_p."""
    weight = getattr(value, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    rows = _rows(heads, weight.shape[0] // heads, x, value, key, query, *(of_edges or ())[1:])
    edges, feat, flags = _stand_in(graph, x), None, 0
    if edges is None or rows is None:
        return None
    if of_edges is not None:
        attr, linear = of_edges
        folded = attr.shape[-1] * heads < weight.shape[0]
        if attr.dim() != 2 or folded and attr.shape[0] * weight.shape[0] > MOST_UNFOLDED[x.device.type]:
            return None
        feat = rows.project(linear, attr).unflatten(1, (heads, -1))
        flags = FEAT_IN_KEY | FEAT_IN_VALUE
    end = x if x_dst is None else x_dst
    # In torch_geometric's order, in which lazy parameters draw their first values.
    if score == "dot":
        dst = None if query is None else rows.project(query, end)
        src = None if key is None else rows.project(key, x)
        v = rows.project(value, x)
        src = v if src is None else src
    else:
        v, src = rows.project(value, x), None
        dst = None if query is None else rows.project(query, end)
        assert attn is not None
        attn = rows.pad(attn.to(v.dtype).flatten())
    if dst is None:
        dst = v if edges.num_src == edges.num_dst else v[: edges.num_dst]
    within, after = _within(rows, v, bias)
    seed = _seed(numbers[2], x)
    tensors = Tensors(v, src, dst, attn, None, None, None, None, feat, seed, within)
    train = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    slope, scale, dropout_p = map(float, numbers)
    out, _ = _edge_attention.attention(
        edges, score, tensors, Numbers(slope, scale, dropout_p, flags), False, False, train, "auto", heads
    )
    out = _result(rows.cut(out.clone() if train else out), after, wide)  # see `_autograd`
    return out if skip is None else out + skip(end)
