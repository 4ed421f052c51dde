"""The functions of :mod:`dfgnn.functional` in plain, differentiable PyTorch.

The oracle of the tests, and a readable definition of the mathematics. Everything is computed in the dtype of
the inputs, on any device, and tensors with an edge dimension (E x H and E x H x D) are materialised: use
:mod:`dfgnn.functional` for work. Gradients come from autograd and may be differentiated again.

    alpha_ij = softmax of s_ij over the edges into i         a_ij = w_ij m_ij / (1 - p) alpha_ij
    out_i = sum_j a_ij v_j

with s_ij = LeakyReLU(alpha_src[j] + alpha_dst[i] + b_ij) (:func:`gat_attention`) or
s_ij = scale <q_i, k_j> + b_ij (:func:`dot_attention`). A row without edges, or whose scores are all -inf, is
zero and so are its gradients.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .graph import Graph

_MASK32 = 0xFFFFFFFF


def gat_attention(
    graph: Graph,
    feat: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor | None,
    *,
    negative_slope: float = 0.2,
    edge_bias: Tensor | None = None,
    edge_weight: Tensor | None = None,
    out_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    schedule: str = "auto",
    _seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Additive attention of GAT; arguments and result as in :func:`dfgnn.functional.gat_attention`.

    ``schedule`` is accepted for symmetry and has no meaning here.
    """
    src, dst = graph.edge_index
    z = alpha_src[src]
    if alpha_dst is not None:
        z = z + alpha_dst[dst]
    if edge_bias is not None:
        z = z + edge_bias
    score = F.leaky_relu(z, negative_slope)
    result = _aggregate(graph, score, feat, edge_weight, dropout_p, return_attention, _seed)
    if out_bias is None:
        return result
    return (result[0] + out_bias, result[1]) if return_attention else result + out_bias


def dot_attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    edge_bias: Tensor | None = None,
    edge_weight: Tensor | None = None,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    schedule: str = "auto",
    _seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Dot-product attention; arguments and result as in :func:`dfgnn.functional.dot_attention`.

    ``schedule`` is accepted for symmetry and has no meaning here.
    """
    src, dst = graph.edge_index
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    score = (query[dst] * key[src]).sum(-1) * scale
    if edge_bias is not None:
        score = score + edge_bias
    return _aggregate(graph, score, value, edge_weight, dropout_p, return_attention, _seed)


def edge_softmax(score: Tensor, dst: Tensor, num_dst: int) -> Tensor:
    """Softmax of ``score [E, H]`` over the edges with the same ``dst [E]``; all -inf gives 0."""
    index = dst[:, None].expand_as(score)
    top = score.new_full((num_dst, score.shape[1]), -math.inf)
    top = top.scatter_reduce(0, index, score.detach(), "amax")
    top = top.masked_fill(top == -math.inf, 0)  # exp(-inf - 0) = 0, where -inf - -inf would be NaN
    weight = torch.exp(score - top[dst])
    total = torch.zeros_like(top).index_add(0, dst, weight)
    return weight / total.masked_fill(total == 0, 1)[dst]


def dropout_mask(
    seed: int, num_edges: int, num_heads: int, p: float, device: torch.device | str = "cpu"
) -> Tensor:
    """The mask that the kernels use: ``[E, H]`` float64, 0 where dropped, else 1 / (1 - p).

    Edge ``e`` (in the user's order) and head ``h`` are dropped when word ``h % 4`` of
    ``philox(seed, counter=(e, 0, h // 4, 0))`` is below ``p * 2**32``; ``p = 1`` drops every edge.
    """
    if p >= 1:
        return torch.zeros(num_edges, num_heads, dtype=torch.float64, device=device)
    edge = torch.arange(num_edges, device=device)[:, None]
    group = torch.arange((num_heads + 3) // 4, device=device)[None, :]
    words = philox(seed, edge, torch.zeros_like(edge), group, torch.zeros_like(edge))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :num_heads]
    return (bits >= math.floor(p * 2**32)).to(torch.float64) / (1 - p)


def philox(key: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of a 64-bit key and four 32-bit counters held in int64 tensors, which broadcast.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    k0, k1 = key & _MASK32, key >> 32 & _MASK32
    for _ in range(10):
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


def _aggregate(graph, score, value, edge_weight, dropout_p, return_attention, seed):
    src, dst = graph.edge_index
    attention = edge_softmax(score, dst, graph.num_dst)
    if dropout_p > 0:
        if seed is None:
            seed = torch.randint(0, 2**62, (1,), device=value.device)
        mask = dropout_mask(int(seed), graph.num_edges, score.shape[1], dropout_p, value.device)
        attention = attention * mask.to(attention.dtype)
    if edge_weight is not None:
        attention = attention * (edge_weight if edge_weight.dim() == 2 else edge_weight[:, None])
    attention = attention.to(value.dtype)
    out = value.new_zeros(graph.num_dst, *value.shape[1:])
    out = out.index_add(0, dst, attention[:, :, None] * value[src])
    return (out, attention) if return_attention else out
