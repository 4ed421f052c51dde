"""What DGL's layers with edge features need: sums of edges' rows over nodes, with other weights for each
head, and the addition of the rows of an edge's two nodes to the edge's own row.
Tensors with one row per edge are in the user's order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import functional
from ...engine import plain as _plain
from ...engine.edge_maps import edges_as_sources, rows_of_destinations, rows_of_sources, sum_of_edges
from ...graph import Graph
from ...runtime import eager as _eager
from ...runtime.compiling import is_exporting

# Device type -> how many elements a step of `_AddEnds` gathers. On the CPU a step fits into the cache, and
# all steps are several times as fast as one gather of all edges; a GPU needs enough elements to be busy.
_STEP = {"cpu": 1 << 20, "cuda": 1 << 24}


def sums_per_head(graph: Graph, weight: Tensor, rows: Tensor) -> list[Tensor]:
    """Of each head the sums over the edges e into i of weight[e, ..., h] rows[e, ..., :].

    weight: [E, *, H].  rows: [E, *, D].  Returns H tensors [N_dst, *, D], without a tensor of E x H x D.
    """
    prefix = rows.shape[1:-1]
    if torch.compiler.is_dynamo_compiling() and not is_exporting():
        terms = (w.unsqueeze(-1) * rows for w in weight.to(rows.dtype).unbind(-1))
        sums = (sum_of_edges(graph, x.flatten(1)) for x in terms)
        return [x.view(graph.num_dst, *prefix, rows.shape[-1]) for x in sums]
    edges = edges_as_sources(graph)
    flat = rows.reshape(len(rows), prefix.numel(), rows.shape[-1])
    per_head = weight.reshape(*flat.shape[:2], weight.shape[-1]).unbind(-1)
    sums = (functional.spmm(edges, w.contiguous(), flat) for w in per_head)
    return [x.view(graph.num_dst, *prefix, rows.shape[-1]) for x in sums]


def add_ends(graph: Graph, rows: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """rows[e] + src[j] + dst[i] for every edge e from j to i. Unless a compiler or a transform is active, it
    overwrites ``rows``.

    rows: [E, D].  src: [N_src, D].  dst: [N_dst, D]. Gradients are deterministic, unlike those of indexing.
    """
    # A compiler fuses the additions with what follows; on meta there is nothing to add.
    if torch.compiler.is_compiling() or rows.is_meta:
        return rows + rows_of_sources(graph, src) + rows_of_destinations(graph, dst)
    if _eager.transformed(rows, src, dst):
        j, i = _plain.ends_of(graph).edge_index
        return rows + src[j] + dst[i]
    return _AddEnds.apply(rows, src, dst, graph)


class _AddEnds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, src, dst, graph):
        ctx.graph = graph
        ctx.mark_dirty(rows)
        step = max(1, _STEP[rows.device.type] // max(1, rows.shape[1]))
        for part, j, i in zip(rows.split(step), *(ends.split(step) for ends in graph.edge_index)):
            part += src.index_select(0, j)
            part += dst.index_select(0, i)
        return rows

    @staticmethod
    def backward(ctx, grad):
        sums = [
            sum_of_edges(ctx.graph, grad, reverse) if needed else None
            for needed, reverse in zip(ctx.needs_input_grad[1:3], (True, False))
        ]
        return grad, *sums, None
