"""What attention consists of: softmax over the edges into a node, products of its ends, weighted sums."""

import math

from torch import Tensor

from ..engine import by_index
from ..engine import products as _products
from ..engine.argument_checks import Checker, for_device, without_padding
from ..engine.given import GraphLike, graph_of
from ..graph import Graph
from ..graph.cache import sizes_of
from ..graph.fixed_capacity import OF_BUFFER
from ..runtime.batches import batched
from .additive import gat_attention


def edge_softmax(
    graph: GraphLike,
    score: Tensor,
    *,
    schedule: str = "auto",
    sink: Tensor | None = None,
    size: tuple[int, int] | None = None,
) -> Tensor:
    r"""Softmax of given scores over the edges into each destination; -inf masks an edge.

    graph: a Graph, a DGLGraph or an ``edge_index``, as in :func:`gat_attention`.  score: [E, ...] in the
    order in which the graph's edges were given; float32, float64, float16 or bfloat16.  sink: [...], one more
    score of every softmax, as in :func:`gat_attention`.  size: (num_src, num_dst) of an ``edge_index``; None:
    the largest id + 1.  Returns a tensor like score. The twin of ``dgl.nn.functional.edge_softmax`` and
    ``torch_geometric.utils.softmax``; with the weighted sum behind it :func:`score_attention` is one call.
    Differentiable and deterministic; raises as :func:`gat_attention` does.
    """
    plain = sink is None and schedule == "auto"
    if plain and type(graph) is Tensor and isinstance(score, Tensor) and by_index.takes_rows(score):
        out = _softmax_of_tensor(graph, score, sizes_of("edge_softmax", size))
        if out is not None:
            return out
    if type(graph) is not Graph or size is not None:
        graph = graph_of("edge_softmax", graph, size)
    if plain and by_index.takes_of(graph, score) and score.shape[0] == graph.num_edges:
        return by_index.softmax(score, graph.edge_index[1], graph.num_dst, masked=True)
    check = Checker("edge_softmax", graph, "score", score)
    graph = check.graph
    if score.dim() == 0 or score.shape[0] != graph.num_edges:
        raise check.error(ValueError, "score", f"shape [{graph.num_edges}, ...]", list(score.shape))
    check.tensor("score", score, [score.shape])
    if sink is not None:
        check.tensor("sink", sink, [score.shape[1:]], (check.dtype, check.acc))
        sink = sink.reshape(-1)
    flat = score.reshape(graph.num_edges, math.prod(score.shape[1:]))
    if flat.shape[1] == 0:
        return score.clone()
    # Computed as the weights of additive attention, whose nodes' terms are 0 and whose bias is the score.
    ends = flat.new_zeros(graph.num_src, flat.shape[1])
    _, attention = gat_attention(
        graph, ends.unsqueeze(2), ends, None, negative_slope=1.0, edge_bias=flat, return_attention=True,
        schedule=schedule, sink=sink,
    )  # fmt: skip
    return attention.view(score.shape)


def _softmax_of_tensor(edge_index: Tensor, score: Tensor, size: tuple[int, int] | None) -> Tensor | None:
    """The softmax without making a Graph, which would take longer. None where a Graph is needed (while graphs
    of fixed capacity exist, whose buffer this may be), or has to raise an error."""
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.shape[1] == 0 or OF_BUFFER:
        return None
    src, dst = edge_index.unbind()
    if not by_index.takes(score, dst):
        return None
    low, high = edge_index.aminmax()
    num_src, num_dst = (int(high) + 1,) * 2 if size is None else size
    if low < 0 or high >= min(num_src, num_dst) and (src.max() >= num_src or dst.max() >= num_dst):
        return None
    return by_index.softmax(score, dst, num_dst, masked=True)


@batched("query")
def sddmm(
    graph: GraphLike,
    query: Tensor,
    key: Tensor,
    *,
    scale: float = 1.0,
    size: tuple[int, int] | None = None,
) -> Tensor:
    r"""Sampled dense-dense product: scale q_i . k_j for every edge j -> i and head.

    graph: a Graph, a DGLGraph or an ``edge_index``, as in :func:`gat_attention`; of the latter size is
    (num_src, num_dst), or None for as many as key and query have rows.  query: [num_dst, H, D].  key:
    [num_src, H, D], same dtype: float32, float64, float16 or bfloat16. Returns [E, H] in the order in which
    the graph's edges were given. Sums run in float32 (float64 for float64). Differentiable any number of
    times: its gradients are :func:`spmm`. Deterministic; raises as :func:`gat_attention` does.
    """
    if type(graph) is not Graph or size is not None:
        graph = graph_of("sddmm", graph, size, key, query)
    check = Checker("sddmm", graph, "query", query)
    graph = check.graph
    check.tensor("query", query, [(graph.num_dst, None, None)])
    check.tensor("key", key, [(graph.num_src, *query.shape[1:])])
    check.number("scale", scale)
    out = check.in_use(_products.sddmm(graph, *for_device(check, query, key)))
    return out if scale == 1 else out * scale


@batched("feat")
def spmm(
    graph: GraphLike, edge_weight: Tensor, feat: Tensor, *, size: tuple[int, int] | None = None
) -> Tensor:
    r"""Weighted neighbour sum: out_i = sum_j w_ij feat_j, the weights as they are given, without a softmax.

    graph: a Graph, a DGLGraph or an ``edge_index``, as in :func:`gat_attention`; of the latter size is
    (num_src, num_dst), or None for as many of both as feat has rows.  edge_weight: w [E] or [E, H], in the
    order in which the graph's edges were given.  feat: [num_src, H, D], same dtype: float32, float64, float16
    or bfloat16. Returns [num_dst, H, D]. Sums run in float32 (float64 for float64). Differentiable any number
    of times: its gradients are :func:`sddmm` and itself. Deterministic; raises as :func:`gat_attention` does.
    """
    if type(graph) is not Graph or size is not None:
        graph = graph_of("spmm", graph, size, feat)
    check = Checker("spmm", graph, "feat", feat)
    graph = check.graph
    check.tensor("feat", feat, [(graph.num_src, None, None)])
    heads, dim = feat.shape[1:]
    check.tensor("edge_weight", edge_weight, [(graph.num_edges,), (graph.num_edges, heads)])
    if edge_weight.dim() == 1:
        edge_weight = edge_weight.unsqueeze(1).expand(-1, heads)
    (values,) = for_device(check, feat)
    return without_padding(_products.spmm(graph, check.in_use(edge_weight), values), dim)
