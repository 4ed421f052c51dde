"""dfgnn.compat compared with DGL: the same script with either, whose names are all that differs."""

import importlib

import pytest
import torch

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
