"""Reference results of the layers in float64, computed in chunks of edges to limit their memory.

The formulas are those of ``csrc/core/params.h``, with the gradients written out instead of autograd. The code
does not use the kernels, their plans or the reverse CSR; it runs on the device of its inputs.

ds is the gradient of scores; lse is the log of the sum of exp(score) over a row.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_SLOPE = 0.2  # of the layers' LeakyReLU
# The tensor with the features of a chunk's edges has at most this number of bytes.
_CHUNK_BYTES = 2**28


def error(x: Tensor, reference: Tensor) -> float:
    """||x - reference|| / ||reference||, or ||x|| where the reference is zero."""
    norm = float(reference.norm())
    return float((x.double() - reference).norm()) / (norm or 1.0)


def gat(
    graph, value: Tensor, score_src: Tensor, score_dst: Tensor, grad_out: Tensor | None = None
) -> dict[str, Tensor]:
    """``out`` of :func:`dfgnn.functional.gat_attention` and, with ``grad_out``, the gradient of every input.

    value [N_src, H, D], score_src [N_src, H], score_dst [N_dst, H], any floating dtype. Results in float64,
    by name.
    """
    value, score_src, score_dst = value.double(), score_src.double(), score_dst.double()

    def score(src, dst):
        return F.leaky_relu(score_src[src] + score_dst[dst], _SLOPE)

    def gradients(grads, src, dst, ds):
        dz = torch.where(score_src[src] + score_dst[dst] > 0, ds, _SLOPE * ds)
        grads["score_src"].index_add_(0, src, dz)
        grads["score_dst"].index_add_(0, dst, dz)

    inputs = {"value": value, "score_src": score_src, "score_dst": score_dst}
    return _attention(graph, inputs, "value", score, gradients, grad_out)


def gatv2(
    graph, key: Tensor, query: Tensor, att: Tensor, grad_out: Tensor | None = None
) -> dict[str, Tensor]:
    """``out`` of :func:`dfgnn.functional.gatv2_attention` and, with ``grad_out``, the gradient of each input.

    key [N_src, H, D], query [N_dst, H, D], att [H, D], any floating dtype. Results in float64, by name.
    """
    key, query, att = key.double(), query.double(), att.double()

    def score(src, dst):
        return (att * F.leaky_relu(key[src] + query[dst], _SLOPE)).sum(-1)

    def gradients(grads, src, dst, ds):
        u, ds = key[src] + query[dst], ds[..., None]
        du = torch.where(u > 0, ds * att, _SLOPE * ds * att)
        grads["key"].index_add_(0, src, du)
        grads["query"].index_add_(0, dst, du)
        grads["att"] += (ds * F.leaky_relu(u, _SLOPE)).sum(0)

    inputs = {"key": key, "query": query, "att": att}
    return _attention(graph, inputs, "key", score, gradients, grad_out)


def dot(
    graph, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor | None = None
) -> dict[str, Tensor]:
    """``out`` of :func:`dfgnn.functional.dot_attention` and, with ``grad_out``, the gradient of every input.

    query [N_dst, H, D], key [N_src, H, D], value [N_src, H, Dv], any floating dtype. Results in float64,
    by name.
    """
    query, key, value = query.double(), key.double(), value.double()
    scale = 1 / math.sqrt(query.shape[-1])

    def score(src, dst):
        return (query[dst] * key[src]).sum(-1) * scale

    def gradients(grads, src, dst, ds):
        ds = ds[..., None] * scale
        grads["query"].index_add_(0, dst, ds * key[src])
        grads["key"].index_add_(0, src, ds * query[dst])

    inputs = {"query": query, "key": key, "value": value}
    return _attention(graph, inputs, "value", score, gradients, grad_out)


def _attention(
    graph, inputs: dict[str, Tensor], values: str, score, gradients, grad_out: Tensor | None
) -> dict[str, Tensor]:
    """values: which of the inputs is summed up. score(src, dst): of some edges [edges, H]. gradients(grads,
    src, dst, ds): adds the scores' gradients ds of some edges to those of the inputs."""
    value = inputs[values]
    out, lse = _forward(graph, score, value)
    if grad_out is None:
        return {"out": out}
    grad_out = grad_out.double()
    delta = (grad_out * out).sum(-1)
    grads = {name: torch.zeros_like(x) for name, x in inputs.items()}
    for src, dst in _chunks(graph, value):
        g = grad_out[dst]
        alpha = torch.exp(score(src, dst) - lse[dst])
        grads[values].index_add_(0, src, alpha[..., None] * g)
        gradients(grads, src, dst, alpha * ((g * value[src]).sum(-1) - delta[dst]))
    return {"out": out, **grads}


def _chunks(graph, features: Tensor):
    """(src, dst), int64, of all edges, in chunks whose edges x features tensor has ``_CHUNK_BYTES``."""
    csr = graph.csr()
    step = max(_CHUNK_BYTES // (8 * features[0].numel()), 1)
    for begin in range(0, graph.num_edges, step):
        src = csr.indices[begin : begin + step].long()
        place = torch.arange(begin, begin + len(src), device=src.device)
        yield src, torch.searchsorted(csr.indptr, place, right=True) - 1


def _forward(graph, score, value: Tensor) -> tuple[Tensor, Tensor]:
    """out [N_dst, H, Dv] and lse [N_dst, H] (+inf without edges) for score(src, dst) -> [edges, H]."""
    heads = value.shape[1]
    top = value.new_full((graph.num_dst, heads), -math.inf)
    for src, dst in _chunks(graph, value):
        top.scatter_reduce_(0, dst[:, None].expand(-1, heads), score(src, dst), "amax")
    total = torch.zeros_like(top)
    out = value.new_zeros(graph.num_dst, *value.shape[1:])
    for src, dst in _chunks(graph, value):
        weight = torch.exp(score(src, dst) - top[dst])
        total.index_add_(0, dst, weight)
        out.index_add_(0, dst, weight[..., None] * value[src])
    empty = total == 0
    lse = torch.where(empty, math.inf, top + total.log())
    return out / total.masked_fill(empty, 1)[..., None], lse
