"""What a fused layer records under torch.compile: its linear modules and one operator.

The operator takes rows of all heads, and a plan that is found when the compiled code runs. Nothing is checked
here that the compiled code would have to check again at every call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...engine import compiler_attention, compiler_graph
from ...engine.argument_checks import DTYPES
from ...engine.compiler_graph import EdgeList
from ...graph import Graph
from ...runtime.arguments import FEAT_IN_KEY, FEAT_IN_VALUE, AttentionInputs, Numbers, Tensors, draw_seed
from ...runtime.eager import needs_backward
from ...runtime.torch_internals import is_exporting
from .._linear import is_lazy, plain_linear
from .spec import LayerSpec, spelled

#: Device type -> the largest number of elements of projected edge attributes with which they are computed,
#: although the projection could be folded into the attention (see `engine.edge_projection`): folding takes
#: less memory, but more launches.
MOST_UNFOLDED = {"cpu": 2**16, "cuda": 2**23}


def folds(attr: Tensor, heads: int, width: int, score: str = "dot") -> bool:
    """Whether the projection of these attributes to `width` columns is folded into the attention: if its
    result is large, and an edge has fewer attributes than a head has columns; on the CPU also if attributes
    require gradients, because [E, width] would then be needed several times, in forward, backward and second
    derivatives. The answer does not depend on the grad mode, so that the result does not, either. On the CPU
    `engine.edge_scores` computes GATv2's scores without these columns, which has the same purpose."""
    if score == "additive_v2":
        return not attr.is_cuda and attr.shape[0] * width > MOST_UNFOLDED["cpu"]
    learns = not attr.is_cuda and attr.requires_grad
    most = MOST_UNFOLDED.get(attr.device.type)  # None: on meta, where nothing takes memory
    return (learns or attr.shape[1] * heads < width) and most is not None and len(attr) * width > most


#: Bytes that a CUDA kernel loads at a time, so that it needs zeros at the end of heads of other sizes.
_LOAD = 16


class Rows(NamedTuple):
    """Rows of heads, each with the padding that CUDA's kernels need."""

    heads: int
    size: int
    padding: int

    @classmethod
    def on(cls, device: str, heads: int, size: int, dtype: torch.dtype) -> Rows:
        """The rows that kernels on this type of device take."""
        return cls(heads, size, -size % (_LOAD // dtype.itemsize) if device == "cuda" else 0)

    def pad(self, x: Tensor | None) -> Tensor | None:
        """A weight [heads * size, F], or a vector, with the padding."""
        if x is None or not self.padding:
            return x
        by_head = x.unflatten(0, (self.heads, self.size))
        return F.pad(by_head, (0, 0) * (x.dim() - 1) + (0, self.padding)).flatten(0, 1)

    def pad_columns(self, x: Tensor) -> Tensor:
        """Rows [N, heads * size] with the padding."""
        return F.pad(x.unflatten(1, (self.heads, self.size)), (0, self.padding)).flatten(1)

    def cut(self, x: Tensor) -> Tensor:
        """An operator's result [N, heads * size] without the padding."""
        if not self.padding:
            return x
        return x.unflatten(1, (self.heads, self.size + self.padding))[..., : self.size].flatten(1)

    def project(self, linear: Any, x: Tensor) -> Tensor:
        """The projection by a linear module, with the padding."""
        if not self.padding:
            return linear(x)
        weight, bias = plain_linear(linear)  # type: ignore[misc]  # see `_rows`
        return F.linear(x, self.pad(weight), self.pad(bias))  # type: ignore[arg-type]


def _rows(heads: int, size: int, x: Tensor, linears: tuple[Any, ...]) -> Rows | None:
    """How rows are padded; None if they need padding that these modules cannot be given."""
    kind, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    rows = Rows.on(kind, heads, size, dtype)
    if rows.padding and any(linear is not None and plain_linear(linear) is None for linear in linears):
        return None
    return rows


def _traced_graph(graph: Any, x: Tensor) -> EdgeList | None:
    """The traced graph of the recorded program, or None if its operators do not take such features."""
    if is_exporting() or not isinstance(graph, (Graph, EdgeList)) or x.dim() != 2 or x.dtype not in DTYPES:
        return None
    kind = x.device.type
    if kind != graph.device.type or kind not in MOST_UNFOLDED:
        return None
    return compiler_graph.for_compiler(graph)


def _size(spec: LayerSpec) -> int | None:
    """The size of a head; None if it is not known before the layer has run."""
    if spec.score == "additive":
        return spec.vectors[0].shape[-1]
    weight = getattr(spec.value, "weight", None)
    return weight.shape[0] // spec.heads if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _records_edges(spec: LayerSpec, size: int, device: str) -> bool:
    """Whether the operator takes the layer's projected attributes of edges, or there are none."""
    if spec.edges is None:
        return True
    if spec.score == "additive":
        return False
    attr, width = spec.edges[0], spec.heads * size
    if attr.dim() != 2:
        return False
    is_folded = spec.score == "dot" and attr.shape[-1] * spec.heads < width
    return not is_folded or attr.shape[0] * width <= MOST_UNFOLDED[device]


def traced_layer(spec: LayerSpec, graph: Any, x: Tensor, x_dst: Tensor | None) -> Tensor | None:
    """The layer's result [num_dst, H * D]; None where it is to be recorded operation by operation."""
    linears = spec.value, spec.key, spec.query, None if spec.edges is None else spec.edges[1]
    # A lazy module has no size yet, and the layer calls such modules in torch_geometric's order.
    if spec.score == "gate" or is_lazy(spec.skip) or any(map(is_lazy, linears)):
        return None
    if spec.score == "additive" and spec.query is not None:
        return None
    size = _size(spec)
    if size is None:
        return None
    edges, rows = _traced_graph(graph, x), _rows(spec.heads, size, x, linears)
    if edges is None or rows is None or not _records_edges(spec, size, x.device.type):
        return None
    end = x if x_dst is None else x_dst
    attr, of_edges = (None, None) if spec.edges is None else spec.edges
    projections: dict[str, tuple[Any, Any]] = {
        "value": (spec.value, x),
        "key": (spec.key, x),
        "query": (spec.query, end),
        "edge": (of_edges, attr),
    }

    def project(name: str) -> Tensor | None:
        if name == "skip":  # without padding, because the result to which it is added has none
            return None if spec.skip is None else spec.skip(end)
        linear, features = projections[name]
        return None if linear is None else rows.project(linear, features)

    attend = _gat if spec.score == "additive" else _attend
    return spelled(spec.score, project, lambda *ends: attend(spec, edges, rows, *ends))


def _seed(spec: LayerSpec, x: Tensor) -> Tensor | None:
    return draw_seed(x.device) if spec.dropout_p > 0 else None


def _bias(spec: LayerSpec, rows: Rows, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(bias that the operator adds, bias that is added later): one of them is None."""
    later = rows.padding or spec.bias is None or spec.bias.dtype != x.dtype
    return (None, spec.bias) if later else (spec.bias, None)


def _finished(spec: LayerSpec, rows: Rows, out: Tensor, train: bool, bias: Tensor | None) -> Tensor:
    # In training the result is a copy, because the caller may modify it and backward reads the operator's
    # own.
    out = rows.cut(out.clone() if train else out)
    if spec.wide is not None:
        wide = spec.wide.dtype if isinstance(spec.wide, Tensor) else spec.wide
        out = out.to(torch.promote_types(out.dtype, wide))
    return out if bias is None else out + bias


def _gat(spec: LayerSpec, edges: EdgeList, rows: Rows, feat: Tensor, *_: None) -> Tensor:
    attn_src, attn_dst = spec.vectors
    if feat.dtype not in (attn_src.dtype, torch.float16, torch.bfloat16):
        attn_src, attn_dst = attn_src.to(feat.dtype), attn_dst.to(feat.dtype)
    bias, later = _bias(spec, rows, feat)
    train = needs_backward((feat, attn_src, attn_dst, bias))
    tensors = feat, attn_src, attn_dst, _seed(spec, feat), bias
    out = compiler_attention.gat(edges, tensors, float(spec.negative_slope), float(spec.dropout_p), train)
    return _finished(spec, rows, out, train, later)


def _attend(
    spec: LayerSpec, edges: EdgeList, rows: Rows, value: Tensor, key: Any, query: Any, of_edges: Any
) -> Tensor:
    if query is None:
        query = value if edges.num_src == edges.num_dst else value[: edges.num_dst]
    attn, flags = None, 0
    if spec.score == "additive_v2":
        attn = rows.pad(spec.vectors[0].to(value.dtype).flatten())
    elif key is None:
        key = value
    if of_edges is not None:
        of_edges, flags = of_edges.unflatten(1, (rows.heads, -1)), FEAT_IN_KEY
        flags |= FEAT_IN_VALUE if spec.score == "dot" else 0
    bias, later = _bias(spec, rows, value)
    tensors = Tensors(
        value, key, query, attn, None, None, None, None, of_edges, _seed(spec, value), bias
    )  # fmt: skip
    train = needs_backward(tensors)
    numbers = Numbers(float(spec.negative_slope), float(spec.scale), float(spec.dropout_p), flags)
    inputs = AttentionInputs(edges, spec.score, tensors, numbers)
    out, _ = compiler_attention.attention(inputs, False, train, rows.heads)
    return _finished(spec, rows, out, train, later)
