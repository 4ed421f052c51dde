"""Other libraries' attention on the same inputs.

A builder takes (layer, graph, dropout) and returns a function of the layer's inputs by name; it raises where
the library is not installed or has no such layer. Graph formats are built outside the timing.
"""

import math
import os

import torch
import torch.nn.functional as F

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

    def gat(feat, alpha_src, alpha_dst):
        return aggregate(F.leaky_relu(alpha_src[src] + alpha_dst[dst], SLOPE), feat)

    def gatv2(x_src, x_dst, attn):
        return aggregate((F.leaky_relu(x_src[src] + x_dst[dst], SLOPE) * attn).sum(-1), x_src)

    def dot(query, key, value):
        return aggregate((query[dst] * key[src]).sum(-1) / math.sqrt(query.shape[-1]), value)

    return {"gat": gat, "gatv2": gatv2, "dot": dot}[layer]


def pyg_compile(layer: str, graph, dropout: float = 0.0):
    """The same under torch.compile, in one graph."""
    function = pyg(layer, graph, dropout)
    # Past its limit of recompilations, torch.compile would run eagerly without a word.
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, dynamic=False)


def dgl(layer: str, graph, dropout: float = 0.0):
    """DGL's operators, as its GATConv, GATv2Conv and DotGatConv use them."""
    os.environ.setdefault("DGLBACKEND", "pytorch")  # else the answer is written to the home directory
    import dgl as library

    src, dst = graph.edge_index
    g = library.graph((src.int(), dst.int()), num_nodes=graph.num_dst)
    g.create_formats_()
    ops = library.ops

    def weights(score):
        return F.dropout(ops.edge_softmax(g, score), dropout)

    def gat(feat, alpha_src, alpha_dst):
        score = F.leaky_relu(ops.u_add_v(g, alpha_src.unsqueeze(-1), alpha_dst.unsqueeze(-1)), SLOPE)
        return ops.u_mul_e_sum(g, feat, weights(score))

    def gatv2(x_src, x_dst, attn):
        score = (F.leaky_relu(ops.u_add_v(g, x_src, x_dst), SLOPE) * attn).sum(-1, keepdim=True)
        return ops.u_mul_e_sum(g, x_src, weights(score))

    def dot(query, key, value):
        score = ops.u_dot_v(g, key, query) / math.sqrt(query.shape[-1])
        return ops.u_mul_e_sum(g, value, weights(score))

    return {"gat": gat, "gatv2": gatv2, "dot": dot}[layer]


def turbo_gnn(layer: str, graph, dropout: float = 0.0):
    """turbo-gnn (Fomina et al., ICML 2026, arXiv 2605.31500), CUDA only: its GATv2 and its dot-product
    attention, as released (0.1.0rc4) and untuned.

    Its "K" is of the node that aggregates and its "Q" of the neighbour.
    """
    import turbo_gnn as library

    if layer == "gat":
        raise NotImplementedError("turbo-gnn has no GAT")
    if dropout:
        raise NotImplementedError("turbo-gnn has no dropout of attention weights")
    csr, reverse = graph.csr(), graph.reverse_csr()
    adjacency = library.AdjacencyForwardBackwardWithNodeBuckets.from_csr(
        csr.indptr, csr.indices, reverse.indptr, reverse.indices, index_dtype=torch.int32
    )

    def gatv2(x_src, x_dst, attn):
        out = library.gatv2_aggr(
            adjacency, x_dst, x_neighbors=x_src, attention_weights=attn, negative_slope=SLOPE
        )
        return out.view_as(x_dst)

    def dot(query, key, value):
        scale = 1 / math.sqrt(query.shape[-1])
        x = query.flatten(1)  # only its shape is used
        return library.graph_transformer_aggr(adjacency, x, Q=key, K=query, V=value, scale=scale)

    return {"gatv2": gatv2, "dot": dot}[layer]


PEERS = {"dgl": dgl, "pyg": pyg, "pyg-compile": pyg_compile, "turbo-gnn": turbo_gnn}
# Those that are timed in CUDA graphs, too: plain PyTorch. A library's own launches need not survive a capture
# (turbo-gnn's end the process).
CAPTURED = ("pyg", "pyg-compile")
# What a peer's time over ours is called, by kind of timing.
SPEEDUPS = {"eager": "speedup", "kernels": "speedup_kernels"}
