"""A script that was written for DGL: what published models ask of it, in their shapes and options.

``python as_dgl_script.py FILE`` writes the results of every section there. It imports DGL's names alone, and
is run with DGL, and without it by ``python -m dfgnn.run --as-dgl``.
"""

import sys

import dgl
import dgl.function as fn
import dgl.nn as dglnn
import numpy as np
import scipy.sparse
import torch
from dgl import DGLGraph
from dgl.dataloading import GraphDataLoader, MultiLayerFullNeighborSampler
from dgl.nn.functional import edge_softmax
from dgl.nn.pytorch import AvgPooling, GraphConv, MaxPooling
from dgl.nn.pytorch.glob import GlobalAttentionPooling, SumPooling
from dgl.utils import expand_as_pair

SECTIONS = {}


def section(function):
    SECTIONS[function.__name__] = function
    return function


def grads(loss, *tensors):
    return torch.autograd.grad(loss, tensors, retain_graph=True)


def plain_attention(src, dst, n, query, key, value):
    """Attention in plain PyTorch: queries [n, H, D] at destinations, keys and values [E, H, ...] on edges."""
    score = (key * query[dst]).sum(-1) / np.sqrt(key.shape[1] * key.shape[2])
    high = (
        score.detach()
        .new_full((n, score.shape[1]), -1e30)
        .scatter_reduce(0, dst[:, None].expand_as(score), score.detach(), "amax")
    )
    exp = (score - high[dst]).exp()
    total = exp.new_zeros(high.shape).index_add(0, dst, exp)
    weight = (exp / total[dst])[..., None, None]
    return value.new_zeros(n, *value.shape[1:]).index_add(0, dst, weight * value)


@section
def se3_attention():
    """An SE(3) Transformer's attention over a graph of residues: RFdiffusion's calls and shapes."""
    torch.manual_seed(0)
    length, heads, channels = 20, 4, 8
    xyz = torch.randn(length, 3).cumsum(0)
    src, dst = torch.where(torch.cdist(xyz, xyz) + torch.eye(length) * 99 < 3)
    graph = dgl.graph((src, dst), num_nodes=length).to(xyz.device)
    graph.edata["rel_pos"] = (xyz[dst] - xyz[src]).detach()
    assert isinstance(graph, DGLGraph) and torch.equal(graph.edges()[0], src)
    edges = graph.num_edges()
    weight = torch.randn(3, heads * channels, requires_grad=True)
    query = torch.randn(length, heads, channels, requires_grad=True)
    value = torch.randn(edges, heads, 2, 3, requires_grad=True)
    key = torch.tanh(graph.edata["rel_pos"] @ weight).view(edges, heads, channels)
    score = dgl.ops.e_dot_v(graph, key, query).squeeze(-1)
    score /= np.sqrt(heads * channels)
    weights = edge_softmax(graph, score)[..., None, None]
    out = dgl.ops.copy_e_sum(graph, weights * value)
    plain = plain_attention(src, dst, length, query, key, value)
    pooled = [pool(graph, out.flatten(1)) for pool in (AvgPooling(), MaxPooling())]
    return {
        "out": out, "pooled": pooled, "grads": grads(out.square().sum(), weight, query, value),
        "plain": plain, "plain_grads": grads(plain.square().sum(), weight, query, value),
    }  # fmt: skip


@section
def temporal_blocks():
    """Attention on blocks made by hand: what a temporal graph network does."""
    torch.manual_seed(0)
    num_dst, num_neighbours = 7, 12
    dst = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 4, 4, 6])
    block = dgl.create_block(
        (torch.arange(num_neighbours) + num_dst, dst),
        num_src_nodes=num_dst + num_neighbours,
        num_dst_nodes=num_dst,
    )
    block.srcdata["h"] = torch.randn(num_dst + num_neighbours, 6)
    block.edata["dt"] = torch.rand(num_neighbours)
    block.srcdata["ID"] = torch.arange(num_dst + num_neighbours)
    x, heads = block.srcdata["h"].requires_grad_(), 2
    query = x[:num_dst][block.edges()[1]].view(-1, heads, 3)
    key = (x[num_dst:] * block.edata["dt"][:, None])[block.edges()[0] - num_dst].view(-1, heads, 3)
    att = dgl.ops.edge_softmax(block, torch.nn.functional.leaky_relu((query * key).sum(2), 0.2))
    value = (x[num_dst:].view(-1, heads, 3) * att[:, :, None]).flatten(1)
    block.srcdata["v"] = torch.cat([torch.zeros(num_dst, value.shape[1]), value])
    block.update_all(fn.copy_u("v", "m"), fn.sum("m", "h"))
    first = block.dstdata["h"]
    block.edata["v"] = value
    block.update_all(fn.copy_e("v", "m"), fn.sum("m", "h"))
    result = torch.cat([block.dstdata["h"], block.srcdata["h"][: block.num_dst_nodes()]], 1)
    assert block.is_block and block.num_src_nodes() == 19 and block.num_dst_nodes() == 7
    assert torch.allclose(first, block.dstdata["h"], atol=1e-6)
    conv = dglnn.GATConv(6, 4, 2, allow_zero_in_degree=True)
    return {"out": result, "grads": grads(result.square().sum(), x), "layer": conv(block, x),
            "ends": [block.srcdata["ID"], block.srcnodes(), block.dstnodes(), block.in_degrees()],
            }  # fmt: skip


@section
def simple_hgn():
    """Attention with types of edges, as Simple-HGN writes it: by DGL's operations in a graph's local
    scope."""
    torch.manual_seed(0)
    matrix = scipy.sparse.random(30, 30, density=0.1, format="csr", random_state=0)
    graph = dgl.DGLGraph(matrix + matrix.T)
    graph = dgl.add_self_loop(dgl.remove_self_loop(graph))
    types = torch.randint(4, (graph.number_of_edges(),))
    table, x = torch.randn(4, 3), torch.randn(30, 3, 5, requires_grad=True)
    left, right = torch.randn(2, 1, 3, 5)

    def layer(graph, feat):
        with graph.local_scope():
            h_src, h_dst = expand_as_pair(feat, graph)
            graph.edata.update({"ee": table[types].unsqueeze(-1)})
            graph.srcdata.update({"ft": h_src, "el": (h_src * left).sum(-1, keepdim=True)})
            graph.dstdata.update({"er": (h_dst * right).sum(-1, keepdim=True)})
            graph.apply_edges(fn.u_add_v("el", "er", "e"))
            e = torch.nn.functional.leaky_relu(graph.edata.pop("e") + graph.edata.pop("ee"), 0.05)
            graph.edata["a"] = edge_softmax(graph, e)
            graph.update_all(fn.u_mul_e("ft", "a", "m"), fn.sum("m", "ft"))
            return graph.dstdata["ft"] + h_dst

    out = layer(graph, x)
    assert not graph.ndata and not graph.edata
    return {"out": out, "grads": grads(out.square().sum(), x)}


@section
def typed_layers():
    """A layer for each relation, in the modules' order of DGL."""
    relations = ("paper", "by", "author"), ("author", "writes", "paper"), ("paper", "cites", "paper")
    ends = ([0, 1, 1, 4, 2], [2, 0, 1, 1, 1]), ([2, 0, 1, 1], [0, 1, 1, 4]), ([3, 3, 0], [3, 0, 4])
    graph = dgl.heterograph(dict(zip(relations, ends)), num_nodes_dict={"author": 3, "paper": 6})
    conv = dglnn.HeteroGraphConv({
        "by": GraphConv(4, 3), "cites": GraphConv(4, 3),
        "writes": dglnn.GATConv(4, 3, 1, allow_zero_in_degree=True),
    }, aggregate="sum")  # fmt: skip
    torch.manual_seed(2)
    for parameter in conv.parameters():
        torch.nn.init.normal_(parameter)
    conv.mods["writes"].forward = lambda g, h, f=conv.mods["writes"].forward: f(g, h).flatten(1)
    return {"out": conv(graph, {"author": torch.randn(3, 4), "paper": torch.randn(6, 4)})}


@section
def samples_and_batches():
    torch.manual_seed(0)
    graph = dgl.graph((torch.randint(15, (50,)), torch.randint(15, (50,))), num_nodes=15)
    sampled = MultiLayerFullNeighborSampler(2).sample_blocks(graph, torch.tensor([2, 5]))
    counts = [b.num_edges() for b in sampled[2]]
    graphs = [graph, dgl.graph(([0, 1], [1, 3]), num_nodes=4), dgl.graph(([], []), num_nodes=2)]
    whole = dgl.batch(graphs)
    x, gate = torch.rand(21, 3), torch.nn.Linear(3, 1)
    pools = [pool(whole, x) for pool in (SumPooling(), MaxPooling(), GlobalAttentionPooling(gate))]
    loader = GraphDataLoader([(g, k) for k, g in enumerate(graphs)], batch_size=2)
    sizes = [(g.num_nodes(), labels.tolist()) for g, labels in loader]
    return {
        "sampled": [sampled[0].sort()[0], sampled[1], torch.tensor(counts)], "pools": pools,
        "sizes": torch.tensor(sizes[0][0]),
    }  # fmt: skip


@section
def graph_conv():
    torch.manual_seed(0)
    graph = dgl.add_self_loop(dgl.graph((torch.randint(9, (30,)), torch.randint(9, (30,))), num_nodes=9))
    found = []
    for norm in ("both", "left", "right", "none"):
        for sizes in ((5, 3), (3, 5)):
            conv = GraphConv(*sizes, norm=norm, activation=torch.relu)
            x, w = torch.randn(9, sizes[0], requires_grad=True), torch.rand(graph.num_edges())
            out = conv(graph, x, edge_weight=w)
            found += [out, *grads(out.square().sum(), x, conv.weight, conv.bias)]
    return {"out": found}


def _plain(value):
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value.detach()


if __name__ == "__main__":
    torch.save({name: _plain(function()) for name, function in SECTIONS.items()}, sys.argv[1])
