"""What attention consists of: softmax over the edges into a node, products of its ends, weighted sums."""

import math
from typing import Any

from torch import Tensor

from ..engine import by_index, edge_maps
from ..engine.argument_checks import Checker, GraphLike, for_device, given_graph, without_padding
from ..graph import Graph
from ..graph.fixed_capacity import OF_BUFFER
from ..runtime.batches import batched
from ..runtime.wrong_call import says_calls
from .gat import gat


@says_calls
def edge_softmax(
    graph: GraphLike,
    score: Tensor,
    *,
    sink: Tensor | None = None,
    kernel_options: dict[str, Any] | None = None,
) -> Tensor:
    r"""Softmax of given scores over the edges into each destination; -inf masks an edge.

    graph: a Graph, a DGLGraph or an ``edge_index``, as in :func:`gat_attention`; an ``edge_index`` has as
    many nodes as its largest id + 1.  score: [E, ...] in the order in which the graph's edges were given;
    float32, float64, float16 or bfloat16.  sink: [...], one more score of every softmax, and kernel_options,
    as in :func:`gat_attention`.  Returns a tensor like score. The twin of
    ``dgl.nn.functional.edge_softmax`` and ``torch_geometric.utils.softmax``; with the weighted sum behind it
    :func:`score_attention` is one call. Differentiable and deterministic; raises as :func:`gat_attention`
    does.
    """
    plain = sink is None and kernel_options is None
    if plain and type(graph) is Tensor and isinstance(score, Tensor) and by_index.takes_rows(score):
        out = _softmax_of_tensor(graph, score)
        if out is not None:
            return out
    if type(graph) is not Graph:
        graph = given_graph("edge_softmax", graph)
    if plain and by_index.takes_of(graph, score) and score.shape[0] == graph.num_edges:
        return by_index.softmax(score, graph.edge_index[1], graph.num_dst, masked=True)
    check = Checker("edge_softmax", graph, "score", score)
    graph = check.graph
    if score.dim() == 0 or score.shape[0] != graph.num_edges:
        shape = f"shape [{graph.num_edges}, ...]"
        raise check.error(ValueError, "score", shape, f"{list(score.shape)}; it has a row per edge")
    check.tensor("score", score, [score.shape])
    if sink is not None:
        check.tensor("sink", sink, [score.shape[1:]], (check.dtype, check.acc))
        sink = sink.reshape(-1)
    flat = score.reshape(graph.num_edges, math.prod(score.shape[1:]))
    if flat.shape[1] == 0:
        return score.clone()
    # Computed as the weights of additive attention, whose nodes' terms are 0 and whose bias is the score.
    ends = flat.new_zeros(graph.num_src, flat.shape[1])
    result = gat(
        graph, ends.unsqueeze(2), ends, None, negative_slope=1.0, bias=flat, return_attention=True,
        sink=sink, kernel_options=kernel_options, function="edge_softmax",
    )  # fmt: skip
    return result.attention.view(score.shape)


def _softmax_of_tensor(edge_index: Tensor, score: Tensor) -> Tensor | None:
    """The softmax without making a Graph, which would take longer. None where a Graph is needed (while graphs
    of fixed capacity exist, whose buffer this may be), or has to raise an error."""
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.shape[1] == 0 or OF_BUFFER:
        return None
    dst = edge_index[1]
    if not by_index.takes(score, dst):
        return None
    low, high = edge_index.aminmax()
    return None if low < 0 else by_index.softmax(score, dst, int(high) + 1, masked=True)


@says_calls
@batched("query")
def sddmm(graph: GraphLike, query: Tensor, key: Tensor) -> Tensor:
    r"""Sampled dense-dense product: q_i . k_j for every edge j -> i and head.

    graph: a Graph, a DGLGraph or an ``edge_index``, as in :func:`gat_attention`; its sizes are the rows of
    key and query.  query: [num_dst, H, D].  key: [num_src, H, D], same dtype: float32, float64, float16 or
    bfloat16. Returns [E, H] in the order in which the graph's edges were given. Sums run in float32 (float64
    for float64). Differentiable any number of times: its gradients are :func:`spmm`. Deterministic; raises as
    :func:`gat_attention` does.
    """
    if type(graph) is not Graph:
        graph = given_graph("sddmm", graph, key, query)
    check = Checker("sddmm", graph, "query", query)
    graph = check.graph
    check.tensor("query", query, [(graph.num_dst, None, None)])
    check.tensor("key", key, [(graph.num_src, *query.shape[1:])])
    out: Tensor = check.in_use(edge_maps.sddmm(graph, *for_device(check, query, key)))
    return out


@says_calls
@batched("value")
def spmm(graph: GraphLike, weight: Tensor, value: Tensor) -> Tensor:
    r"""Weighted neighbour sum: out_i = sum_j w_ij v_j, the weights as they are given, without a softmax.

    graph: a Graph, a DGLGraph or an ``edge_index``, as in :func:`gat_attention`; an ``edge_index`` has as
    many sources, and destinations, as value has rows.  weight: w [E] or [E, H], in the order in which the
    graph's edges were given.  value: v [num_src, H, D], same dtype: float32, float64, float16 or
    bfloat16. Returns [num_dst, H, D]. Sums run in float32 (float64 for float64). Differentiable any number
    of times: its gradients are :func:`sddmm` and itself. Deterministic; raises as :func:`gat_attention` does.
    """
    if type(graph) is not Graph:
        graph = given_graph("spmm", graph, value)
    check = Checker("spmm", graph, "value", value)
    graph = check.graph
    if value.dim() < 3 and isinstance(weight, Tensor) and weight.dim() == 3:
        what = f"shape [{graph.num_src}, any, any], behind the weight"
        raise check.error(ValueError, "value", what, f"{list(value.shape)}: are the two swapped?")
    check.tensor("value", value, [(graph.num_src, None, None)])
    heads, dim = value.shape[1:]
    check.tensor("weight", weight, [(graph.num_edges,), (graph.num_edges, heads)])
    if weight.dim() == 1:
        weight = weight.unsqueeze(1).expand(-1, heads)
    (values,) = for_device(check, value)
    return without_padding(edge_maps.spmm(graph, check.in_use(weight), values), dim)
