"""dfgnn.compat beside DGL: the same script with either, whose names are all that differs."""

import importlib

import pytest
import torch
from torch import nn

import dfgnn
import dfgnn.compat
import dfgnn.nn

dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
importlib.import_module("dgl.nn.functional")

RELATIONS = {
    ("paper", "by", "author"): ([0, 1, 1, 4, 2], [2, 0, 1, 1, 1]),
    ("author", "writes", "paper"): ([2, 0, 1, 1], [0, 1, 1, 4]),
    ("paper", "cites", "paper"): ([3, 3, 0], [3, 0, 4]),
}
SIZES = {"author": 3, "paper": 6}


class Theirs:
    graph_module, fn, ops, nn = dgl, dgl.function, dgl.ops, dgl.nn
    edge_softmax = staticmethod(dgl.nn.functional.edge_softmax)


class Ours:
    graph_module, fn, ops, nn = dfgnn.compat, dfgnn.compat.function, dfgnn.ops, dfgnn.nn.dgl
    edge_softmax = staticmethod(dfgnn.ops.edge_softmax)


def both(script, *arguments):
    """Checks that a script gives the same results with DGL and with dfgnn.compat; returns them."""
    found = []
    for library in (Theirs, Ours):
        torch.manual_seed(0)
        found.append(script(library, *arguments))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    return found[1]


def homogeneous(library):
    src, dst = torch.randint(20, (2, 70))
    g = library.graph_module.graph((src, dst), num_nodes=20)
    g.ndata["h"], g.ndata["k"] = torch.rand(20, 2, 3) + 0.5, torch.rand(20, 2, 3) + 0.5
    g.edata["w"] = torch.rand(70, 2, 1) + 0.5
    return g


def test_relations():
    """The pattern of DGL's HGT example: attention per relation, then a mean over relations."""

    def script(library):
        g = library.graph_module.heterograph(RELATIONS, num_nodes_dict=SIZES)
        x = {kind: torch.randn(size, 2, 4) for kind, size in sorted(SIZES.items())}
        for src, name, dst in sorted(RELATIONS):
            part = g[src, name, dst]
            part.srcdata["k"], part.dstdata["q"] = x[src], x[dst]
            part.srcdata[f"v_{name}"] = x[src] + 1
            part.apply_edges(library.fn.v_dot_u("q", "k", "t"))
            score = library.edge_softmax(part, part.edata.pop("t").sum(-1), norm_by="dst")
            part.edata["t"] = score.unsqueeze(-1)
        fn = library.fn
        g.multi_update_all(
            {name: (fn.u_mul_e(f"v_{name}", "t", "m"), fn.sum("m", "t")) for _, name, _ in sorted(RELATIONS)},
            cross_reducer="mean",
        )
        assert g.ntypes == ["author", "paper"] and sorted(g.etypes) == ["by", "cites", "writes"]
        assert g.num_nodes() == 9 and g.num_nodes("paper") == 6 and g.num_edges("by") == 5
        return {kind: g.nodes[kind].data["t"] for kind in g.ntypes}, g.in_degrees(etype="cites")

    both(script)


def test_homogeneous_of_relations():
    def script(library):
        g = library.graph_module.heterograph(RELATIONS, num_nodes_dict=SIZES)
        g = library.graph_module.to_homogeneous(g)
        types = library.graph_module.NTYPE, library.graph_module.ETYPE
        conv = library.nn.HGTConv(8, 4, 2, 2, 3).eval()
        out = conv(g, torch.randn(9, 8), g.ndata[types[0]], g.edata[types[1]])
        return out, torch.stack(g.edges()), g.ndata[types[0]], g.edata[types[1]], g.ndata["_ID"]

    both(script)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_layers(name):
    def script(library):
        g = homogeneous(library)
        g = library.graph_module.add_self_loop(library.graph_module.remove_self_loop(g)).int().to("cpu")
        conv = getattr(library.nn, name)(5, 4, 3)
        x = torch.randn(20, 5, requires_grad=True)
        out, attention = conv(g, x, get_attention=True)
        return out, attention, torch.autograd.grad(out.square().sum(), x)[0], g.edata["w"]

    both(script)


class Attention(nn.Module):
    """In the style of Platonov et al.'s code: heads last, operators by name."""

    def __init__(self, ops, edge_softmax, dim=12, heads=3):
        super().__init__()
        self.ops, self.edge_softmax, self.heads = ops, edge_softmax, heads
        self.scores_u, self.scores_v = nn.Linear(dim, heads), nn.Linear(dim, heads, bias=False)

    def forward(self, graph, x):
        scores = self.ops.u_add_v(graph, self.scores_u(x), self.scores_v(x))
        weights = self.edge_softmax(graph, nn.functional.leaky_relu(scores, 0.2))
        values = x.reshape(len(x), -1, self.heads)
        return self.ops.u_mul_e_sum(graph, values, weights).flatten(1)


def test_attention_by_operators():
    def script(library):
        g = library.graph_module.to_bidirected(homogeneous(library))
        degrees = g.out_degrees().float()
        x = torch.randn(20, 12, requires_grad=True)
        h = library.ops.u_mul_e_sum(g, x, 1 / library.ops.u_mul_v(g, degrees, degrees) ** 0.5)
        out = Attention(library.ops, library.edge_softmax)(g, h) + library.ops.copy_u_mean(g, x)
        return out, torch.autograd.grad(out.square().sum(), x)[0]

    both(script)


@pytest.mark.parametrize("call, error, message", [
    (lambda g: g.update_all(None, "sum"), dfgnn.nn.dgl.DGLError, "reduce function: expected a function"),
    (lambda g: g.ndata.update(h=torch.ones(3)), dfgnn.nn.dgl.DGLError, "expected 20 rows"),
    (lambda g: g["nothing"], dfgnn.nn.dgl.DGLError, "etype: expected one of"),
    (lambda g: g.num_nodes("nothing"), dfgnn.nn.dgl.DGLError, "ntype: expected one of"),
    (lambda g: g.multi_update_all({}, "product"), dfgnn.nn.dgl.DGLError, "cross_reducer: expected one of"),
    (lambda g: dfgnn.compat.heterograph(RELATIONS, SIZES).dfgnn_graph, ValueError, "expected one relation"),
])  # fmt: skip
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call(homogeneous(Ours))


def test_the_same_names_as_dgl():
    # Names that dgl itself may lack: `sparse` exists only for the torch that DGL was built for, and DGLBlock
    # is in dgl.heterograph.
    ours = {"install_as_dgl", "sparse", "DGLBlock"}
    assert [name for name in dfgnn.compat.__all__ if not hasattr(dgl, name) and name not in ours] == []
    before = {"copy_src", "copy_edge"}  # names that DGL had before 1.0
    functions = vars(dfgnn.compat.function)
    found = {n for n in functions if n[1:2] == "_" and n[0] in "uve" or n.startswith("copy")} - before
    assert all(hasattr(dgl.function, name) for name in found) and len(found) == 32
