"""Other libraries' attention on the same inputs.

A builder takes (layer, graph, dropout) and returns a function of the layer's inputs by name; it raises if the
library is not installed or has no such layer. Graph formats are built before the timing.
"""

import math
import os

import torch
import torch.nn.functional as F

from .measure import milliseconds

SLOPE = 0.2


def pyg(layer: str, graph, dropout: float = 0.0):
    """PyG: gather, ``utils.softmax``, ``utils.scatter``, as its GATConv, GATv2Conv and TransformerConv
    compute."""
    from torch_geometric.utils import scatter, softmax

    src, dst = graph.edge_index
    n = graph.num_dst

    def aggregate(score, value):
        alpha = F.dropout(softmax(score, dst, num_nodes=n), dropout)
        return scatter(alpha.unsqueeze(-1) * value[src], dst, dim=0, dim_size=n, reduce="sum")

    def gat(value, score_src, score_dst):
        return aggregate(F.leaky_relu(score_src[src] + score_dst[dst], SLOPE), value)

    def gatv2(key, query, att):
        return aggregate((F.leaky_relu(key[src] + query[dst], SLOPE) * att).sum(-1), key)

    def dot(query, key, value):
        return aggregate((query[dst] * key[src]).sum(-1) / math.sqrt(query.shape[-1]), value)

    return {"gat": gat, "gatv2": gatv2, "dot": dot}[layer]


def pyg_compile(layer: str, graph, dropout: float = 0.0):
    """PyTorch Geometric's operations under torch.compile, in one graph."""
    function = pyg(layer, graph, dropout)
    # With fullgraph, torch.compile raises an error beyond its limit of recompilations.
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, dynamic=False)


def dgl(layer: str, graph, dropout: float = 0.0):
    """DGL's operators, as its GATConv, GATv2Conv and DotGatConv use them."""
    os.environ.setdefault("DGLBACKEND", "pytorch")  # else DGL writes a file to the home directory
    import dgl as library

    src, dst = graph.edge_index
    g = library.graph((src.int(), dst.int()), num_nodes=graph.num_dst)
    g.create_formats_()
    theirs = library.ops

    def weights(score):
        return F.dropout(theirs.edge_softmax(g, score), dropout)

    def gat(value, score_src, score_dst):
        score = F.leaky_relu(theirs.u_add_v(g, score_src.unsqueeze(-1), score_dst.unsqueeze(-1)), SLOPE)
        return theirs.u_mul_e_sum(g, value, weights(score))

    def gatv2(key, query, att):
        score = (F.leaky_relu(theirs.u_add_v(g, key, query), SLOPE) * att).sum(-1, keepdim=True)
        return theirs.u_mul_e_sum(g, key, weights(score))

    def dot(query, key, value):
        score = theirs.u_dot_v(g, key, query) / math.sqrt(query.shape[-1])
        return theirs.u_mul_e_sum(g, value, weights(score))

    return {"gat": gat, "gatv2": gatv2, "dot": dot}[layer]


def turbo_gnn(layer: str, graph, dropout: float = 0.0):
    """turbo-gnn (Fomina et al., ICML 2026, arXiv 2605.31500), CUDA only: its GATv2 and its dot-product
    attention, tuned at the first call over the values that its own tuner tries.

    Its "K" is of the node that aggregates and its "Q" of the neighbour.
    """
    import turbo_gnn as library

    if layer == "gat":
        raise NotImplementedError("turbo-gnn has no GAT")
    if dropout:
        raise NotImplementedError("turbo-gnn has no dropout of attention weights")

    def gatv2(adjacency, warps, key, query, att):
        out = library.gatv2_aggr(
            adjacency, query, x_neighbors=key, attention_weights=att, negative_slope=SLOPE, **warps
        )
        return out.view_as(query)

    def dot(adjacency, warps, query, key, value):
        scale = 1 / math.sqrt(query.shape[-1])
        x = query.flatten(1)  # turbo-gnn uses only its shape
        return library.graph_transformer_aggr(adjacency, x, Q=key, K=query, V=value, scale=scale, **warps)

    function = {"gatv2": gatv2, "dot": dot}[layer]
    chosen: dict[str, tuple] = {}

    def attention(**inputs):
        if not chosen:
            chosen["options"] = _tune_turbo_gnn(library, graph, function, inputs)
        return function(*chosen["options"], **inputs)

    return attention


def _tune_turbo_gnn(library, graph, function, inputs) -> tuple:
    """The adjacency and the numbers of warps with which turbo-gnn's forward and backward take least time.

    The values of each option are tried one option after the other, forward's before backward's.
    """
    csr, reverse = graph.csr(), graph.reverse_csr()
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}

    def adjacency(quantile: float):
        return library.AdjacencyForwardBackwardWithNodeBuckets.from_csr(
            csr.indptr,
            csr.indices,
            reverse.indptr,
            reverse.indices,
            quantile=quantile,
            index_dtype=torch.int32,
        )

    def time(options: tuple) -> float:
        def step():
            out = function(*options, **leaves)
            return torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))

        step()
        return min(milliseconds(step, graph.device)[0] for _ in range(3))

    best: tuple = min(((adjacency(q), {}) for q in (-1, 0.9, 0.95, 0.99)), key=time)
    for light, heavy in (
        ("forward_light_warps", "forward_heavy_warps"),
        ("backward_light_warps", "backward_heavy_warps"),
    ):
        warps = [{light: a, heavy: b} for a in (1, 2, 4) for b in (8, 16, 32)]
        best = min(((best[0], {**best[1], **some}) for some in warps), key=time)
    return best


def dgnn(layer: str, graph, dropout: float = 0.0):
    """dgNN (Zhang et al., MLSys 2022), CUDA and float32 only: its GAT.

    Its results are wrong for heads of more than 32 elements where rows are longer than 32 edges.
    """
    import fused_gatconv as library

    if layer != "gat":
        raise NotImplementedError("dgNN has no GATv2 and no dot-product attention")
    csr, reverse = graph.csr(), graph.reverse_csr(need_eids=True)
    rows = csr.indptr.int(), csr.indices.int()
    columns = reverse.indptr.int(), reverse.indices.int()
    # Edge k in the order by source is edge permute[k] in the order by destination.
    ids = reverse.eids.long()
    permute = (ids if csr.eids is None else csr.eids.long().argsort()[ids]).int()

    class Gat(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value, score_src, score_dst):
            out, *more = library.gat_forward(score_dst, score_src, *rows, SLOPE, value, dropout)
            largest, total, mask = more
            ctx.save_for_backward(value, score_src, score_dst, largest, total, mask)
            return out

        @staticmethod
        def backward(ctx, grad):
            value, score_src, score_dst, largest, total, mask = ctx.saved_tensors
            of_feat, of_dst, of_src = library.gat_backward(
                SLOPE, dropout, *rows, *columns, permute, largest, total, mask, value, score_dst, score_src,
                grad.contiguous(),
            )  # fmt: skip
            return of_feat, of_src, of_dst

    def gat(value, score_src, score_dst):
        if value.dtype is not torch.float32:
            raise NotImplementedError("dgNN computes in float32 only")
        return Gat.apply(value, score_src, score_dst)

    return gat


PEERS = {"PyG": pyg, "DGL": dgl, "turbo-gnn": turbo_gnn, "dgNN": dgnn}
