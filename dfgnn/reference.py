"""The functions of :mod:`dfgnn.functional` in plain, differentiable PyTorch.

The oracle of the tests, and a readable definition of the mathematics. Everything is computed in the dtype of
the inputs, on any device, and tensors with an edge dimension (E x H and E x H x D) are materialised: use
:mod:`dfgnn.functional` for work. Gradients come from autograd and may be differentiated again. The graph is a
Graph.

    z_ij = gate_ij raw_ij + e^s_ij       s_ij = LeakyReLU(z_ij) + b_ij, -inf where masked
    alpha_ij = softmax of s_ij over the edges into i         a_ij = w_ij m_ij / (1 - p) alpha_ij
    out_i = sum_j a_ij v_ij

where b and w are ``bias`` and ``weight``, e^s is ``edge.score``, p is ``dropout_p``, m_ij is 0 for dropped
edges and 1 for others, gate is 1, or dot_attention's ``scale`` of edges, and
raw_ij = score_src[j] + score_dst[i] (:func:`gat_attention`),
<att, LeakyReLU(q_i + k_j + e_ij)> (:func:`gatv2_attention`) or scale <q_i, k_j + e_ij>
(:func:`dot_attention`). A sink is one more score of each softmax, without a value. A row without edges, or
whose scores are all -inf, is zero and so are its gradients. Besides their own arguments the functions take
those that layers pass within the library: ``gate`` and ``out_bias``, and dot_attention a ``negative_slope``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .graph import Graph
from .runtime.arguments import draw_seed
from .runtime.attention_options import (
    OF_LAYERS,
    AttentionResult,
    BiasOptions,
    BlockOptions,
    EdgeOptions,
    EdgeProductResult,
    EdgeTerm,
    Projected,
    ScoreOptions,
    SinkOptions,
    public,
)
from .runtime.batches import batched
from .runtime.rules import rows_at
from .runtime.tracing import sums_of_rows

_MASK32 = 0xFFFFFFFF


def _edge_index(graph: Graph) -> Tensor:
    if getattr(graph, "edge_mask", None) is not None:
        raise NotImplementedError("reference: graph: expected an exact one, got one of fixed capacity")
    return graph.edge_index


@public(EdgeOptions, more=OF_LAYERS, taken=True)
@batched("value")
def gat_attention(
    graph: Graph,
    value: Tensor,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    *,
    negative_slope: float = 0.2,
    edge: EdgeTerm | None = None,
    **options: Any,
) -> Any:
    """Additive attention of GAT; see :func:`dfgnn.functional.gat_attention`."""
    src, dst = _edge_index(graph)
    raw = value.new_zeros(src.shape[0], value.shape[1]) if score_src is None else rows_at(score_src, src)
    if score_dst is not None:
        raw = raw + rows_at(score_dst, dst)
    _, of_value, term = edge or EdgeTerm()
    return attend(graph, raw, _plus(rows_at(value, src), of_value), negative_slope, term, **options)


@public(EdgeOptions, more=OF_LAYERS, taken=True)
@batched("query")
def gatv2_attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    att: Tensor,
    *,
    negative_slope: float = 0.2,
    edge: EdgeTerm | None = None,
    **options: Any,
) -> Any:
    """Dynamic attention of GATv2; see :func:`dfgnn.functional.gatv2_attention`."""
    src, dst = _edge_index(graph)
    of_key, _, term = edge or EdgeTerm()
    z = _plus(rows_at(key, src) + rows_at(query, dst), of_key)
    raw = sums_of_rows(att * F.leaky_relu(z, negative_slope))
    return attend(graph, raw, rows_at(key, src), term=term, **options)


@public(EdgeOptions, more=(*OF_LAYERS, "negative_slope"), taken=True)
@batched("query")
def dot_attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | Tensor | None = None,
    negative_slope: float = 1.0,
    edge: EdgeTerm | None = None,
    **options: Any,
) -> Any:
    """Dot-product attention; see :func:`dfgnn.functional.dot_attention`."""
    src, dst = _edge_index(graph)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if isinstance(scale, Tensor) and scale.dim() > 0:
        scale, options["gate"] = 1.0, scale
    of_key, of_value, term = edge or EdgeTerm()
    keys, values = _plus(rows_at(key, src), of_key), _plus(rows_at(value, src), of_value)
    raw = sums_of_rows(rows_at(query, dst) * keys) * scale
    return attend(graph, raw, values, negative_slope, term, **options)


@public(ScoreOptions, more=OF_LAYERS, taken=True)
@batched("value")
def agnn_attention(
    graph: Graph,
    value: Tensor,
    query: Tensor | None = None,
    *,
    beta: float | Tensor = 1.0,
    **options: Any,
) -> Any:
    """Cosine attention of AGNN; see :func:`dfgnn.functional.agnn_attention`."""
    key = F.normalize(value, dim=-1)
    unit = beta * (key if query is None else F.normalize(query, dim=-1))
    return dot_attention(graph, unit, key, value, scale=1.0, **options)


@public(SinkOptions, more=OF_LAYERS, taken=True)
@batched("value")
def flex_attention(
    graph: Graph,
    score_fn: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_attr: Tensor | None = None,
    *,
    params: Sequence[Tensor] = (),
    **options: Any,
) -> Any:
    """Attention with any score; see :func:`dfgnn.functional.flex_attention`."""
    src, dst = _edge_index(graph)
    return attend(
        graph,
        score_fn(rows_at(query, dst), rows_at(key, src), edge_attr, *params),
        rows_at(value, src),
        **options,
    )


@public(BiasOptions)
@batched("query")
def edge_product_attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_attr: Tensor,
    *,
    clamp: float | None = None,
    return_edges: str | None = None,
    **options: Any,
) -> Any:
    """Attention with scores sum_d q_id k_jd e_ijd; see :func:`dfgnn.functional.edge_product_attention`."""
    src, dst = _edge_index(graph)
    products = rows_at(query, dst) * rows_at(key, src) * edge_attr / math.sqrt(query.shape[-1])
    raw = sums_of_rows(products)
    found = attend(graph, raw if clamp is None else raw.clamp(-clamp, clamp), rows_at(value, src), **options)
    if isinstance(found, Tensor) and return_edges is None:
        return found
    out, attention = (found, None) if isinstance(found, Tensor) else found
    return EdgeProductResult(out, {None: None, "products": products, "scores": raw}[return_edges], attention)


@public(SinkOptions)
@batched("value")
def score_attention(graph: Graph, score: Tensor, value: Tensor, **options: Any) -> Any:
    """Attention with given scores; see :func:`dfgnn.functional.score_attention`."""
    values = rows_at(value, _edge_index(graph)[0])
    return attend(graph, _per_head(score).expand(-1, value.shape[1]), values, **options)


def attend(
    graph: Graph,
    raw: Tensor,
    value: Tensor,
    slope: float = 1.0,
    term: Tensor | Projected | None = None,
    *,
    return_attention: bool = False,
    **options: Any,
) -> Tensor | AttentionResult:
    """What all functions do with the scores ``raw [E, H]`` and the values ``value [E, H, D]`` of the edges.

    Options are those of :func:`dfgnn.functional.gat_attention`; ``kernel_options`` have no meaning here.
    slope: of the LeakyReLU.  term: [E, H], added to the scores before it.
    """
    given = {name: x for name, x in options.items() if x is not None}
    _, dst = _edge_index(graph)
    z = raw * _per_head(given["gate"]) if "gate" in given else raw
    term = F.linear(*term) if isinstance(term, Projected) else term
    z = z if term is None else z + term
    score = F.leaky_relu(z, slope) if slope != 1 else z
    if "bias" in given:
        score = score + given["bias"]
    if "mask" in given:
        score = score.masked_fill(~_per_head(given["mask"]), -math.inf)
    attention = softmax_by(score, dst, graph.num_dst, given.get("sink"))
    dropout_p = given.get("dropout_p", 0.0)
    if dropout_p > 0:
        seed = draw_seed(value.device, given.get("generator"))
        mask = dropout_mask(seed, graph.num_edges, score.shape[1], dropout_p, value.device)
        attention = attention * mask.to(attention.dtype)
    if "weight" in given:
        attention = attention * _per_head(given["weight"])
    attention = attention.to(value.dtype)
    out = value.new_zeros(graph.num_dst, *value.shape[1:])
    out = out.index_add(0, dst, attention[:, :, None] * value)
    if "out_bias" in given:
        out = out + given["out_bias"]
    return AttentionResult(out, attention) if return_attention else out


def edge_softmax(
    graph: Graph,
    score: Tensor,
    *,
    sink: Tensor | None = None,
    kernel_options: dict[str, Any] | None = None,
) -> Tensor:
    """Softmax over the edges into each destination; as :func:`dfgnn.functional.edge_softmax`."""
    flat = score.reshape(score.shape[0], math.prod(score.shape[1:]))
    sink = None if sink is None else sink.reshape(-1)
    return softmax_by(flat, _edge_index(graph)[1], graph.num_dst, sink).view_as(score)


@batched("query")
def sddmm(graph: Graph, query: Tensor, key: Tensor) -> Tensor:
    """<q_i, k_j> per edge and head; as :func:`dfgnn.functional.sddmm`."""
    src, dst = _edge_index(graph)
    return sums_of_rows(rows_at(query, dst) * rows_at(key, src))


@batched("value")
def spmm(graph: Graph, weight: Tensor, value: Tensor) -> Tensor:
    """Sum of w_ij v_j over the edges into i; as :func:`dfgnn.functional.spmm`."""
    src, dst = _edge_index(graph)
    out = value.new_zeros(graph.num_dst, *value.shape[1:])
    return out.index_add(0, dst, _per_head(weight)[:, :, None].to(value.dtype) * rows_at(value, src))


def softmax_by(score: Tensor, dst: Tensor, num_dst: int, sink: Tensor | None = None) -> Tensor:
    """Softmax of ``score [E, H]`` over the edges with the same ``dst [E]``; all -inf gives 0. sink: [H], one
    more score of each softmax."""
    index = dst[:, None].expand_as(score)
    top = score.new_full((num_dst, score.shape[1]), -math.inf)
    top = top.scatter_reduce(0, index, score.detach(), "amax")
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    top = top.masked_fill(top == -math.inf, 0)  # so that exp(-inf - top) is 0, not NaN
    weight = torch.exp(score - rows_at(top, dst))
    total = torch.zeros_like(top).index_add(0, dst, weight)
    if sink is not None:
        total = total + torch.exp(sink - top)
    return weight / rows_at(total.masked_fill(total == 0, 1), dst)


def dropout_mask(
    seed: int | Tensor, edges: int | Tensor, num_heads: int, p: float, device: torch.device | str = "cpu"
) -> Tensor:
    """The mask that the kernels use: ``[E, H]`` float64, 0 where dropped, else 1 / (1 - p).

    edges: how many there are, on ``device``; or which, int64 [E]. Edge ``e`` (in the user's order) and head
    ``h`` are dropped when word ``h % 4`` of ``philox(seed, counter=(e, 0, h // 4, 0))`` is below
    ``p * 2**32``; ``p = 1`` drops every edge.
    """
    ids = torch.arange(edges, device=device) if isinstance(edges, int) else edges
    if p >= 1:
        return torch.zeros(len(ids), num_heads, dtype=torch.float64, device=ids.device)
    edge = (ids & _MASK32)[:, None]
    group = torch.arange((num_heads + 3) // 4, device=ids.device)[None, :]
    words = philox(seed, edge, torch.zeros_like(edge), group, torch.zeros_like(edge))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :num_heads]
    return (bits >= math.floor(p * 2**32)).to(torch.float64) / (1 - p)


def philox(
    key: int | Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, rounds: int = 7
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32 of a 64-bit key and four 32-bit counters held in int64 tensors, which broadcast.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, where seven rounds pass all tests
    of BigCrush.
    """
    k0, k1 = key & _MASK32, key >> 32 & _MASK32
    for _ in range(rounds):
        hi0, lo0 = _multiply_32(0xD2511F53, c0)
        hi1, lo1 = _multiply_32(0xCD9E8D57, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return tuple(torch.broadcast_tensors(c0, c1, c2, c3))


def _multiply_32(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of the 64-bit product; b is split so that no partial product leaves int64."""
    low = (b & 0xFFFF) * a
    middle = (b >> 16) * a + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF


def _plus(rows: Tensor, term: Tensor | Projected | None) -> Tensor:
    """rows [E, H, D] plus a term of the edges: [E, H, D], [E, D] for all heads, or projected."""
    if term is None:
        return rows
    if isinstance(term, Projected):
        return rows + F.linear(*term).unflatten(1, rows.shape[1:])
    return rows + (term if term.dim() == 3 else term[:, None])


def _per_head(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[:, None]


@public(BlockOptions)
def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    key_offsets: Tensor | None = None,
    *,
    scale: float | Tensor | None = None,
    key_bias: Tensor | None = None,
    pair_bias: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | Tensor | None = None,
    return_attention: bool = False,
) -> Any:
    """Attention within blocks, a block at a time; see :func:`dfgnn.functional.block_attention`."""
    scale = 1 / math.sqrt(query.shape[2]) if scale is None else scale
    key_offsets = offsets if key_offsets is None else key_offsets
    heads = query.shape[1]
    out = query.new_zeros(query.shape[0], heads, value.shape[2])
    seed = draw_seed(query.device, generator) if dropout_p > 0 else None
    attention = [value.new_zeros(0, heads)]
    bounds = torch.stack([offsets[:-1], offsets[1:], key_offsets[:-1], key_offsets[1:]], 1).tolist()
    pairs = 0
    for row, row_end, first, end in bounds:
        if row == row_end or first == end:
            continue
        shape, begin = (row_end - row, end - first, heads), pairs
        pairs += shape[0] * shape[1]
        score = scale * torch.einsum("ihd,jhd->hij", query[row:row_end], key[first:end])
        if softcap is not None:
            score = softcap * (score / softcap).tanh()
        if key_bias is not None:
            score = score + _per_head(key_bias[first:end]).T.unsqueeze(1)
        if pair_bias is not None:
            score = score + pair_bias[begin:pairs].view(shape).permute(2, 0, 1)
        if sink is not None:
            score = torch.cat([score, sink.view(-1, 1, 1).expand(*score.shape[:2], 1)], 2)
        hidden = (score == -math.inf).all(2, keepdim=True)
        weight = score.masked_fill(hidden, 0).softmax(2).masked_fill(hidden, 0)[..., : end - first]
        if seed is not None:
            ids = torch.arange(begin, pairs, device=query.device)
            mask = dropout_mask(seed, ids, heads, dropout_p).view(shape)
            weight = weight * mask.permute(2, 0, 1).to(weight.dtype)
        weight = weight.to(value.dtype)
        some = torch.einsum("hij,jhd->ihd", weight, value[first:end])
        out = out.index_add(0, torch.arange(row, row_end, device=out.device), some)
        attention.append(weight.permute(1, 2, 0).reshape(-1, heads))
    return AttentionResult(out, torch.cat(attention)) if return_attention else out
