"""GPSConv computes what torch_geometric's does."""

import copy

import pytest
import torch
from beside import compare
from of_pyg import torch_geometric

import dfgnn
from dfgnn.nn import pyg
from dfgnn.nn.pyg.gps import blocks_of

PyG = torch_geometric.nn
BATCHES = {
    "mixed": [7, 1, 12, 5],
    "alike": [6, 6, 6],
    "one": [20],
    "missing": [4, 0, 9],
    "large": [21, 21, 21],
    "padded": [30, 26, 0, 29],
}


def inputs(sizes):
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    x = torch.randn(len(batch), 8, dtype=torch.float64)
    return x, torch.randint(len(batch), (2, 40)), batch


def layers(**options):
    torch.manual_seed(1)
    conv = options.pop("conv", PyG.GCNConv(8, 8))
    theirs = PyG.GPSConv(8, conv, heads=2, **options).double()
    ours = copy.deepcopy(theirs)
    report = dfgnn.accelerate(ours)
    assert type(ours) is pyg.GPSConv and report.replaced[0].after is pyg.GPSConv
    return theirs, ours


@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm", "graph_norm", None])
@pytest.mark.parametrize("name", BATCHES)
def test_same_as_theirs(name, norm):
    theirs, ours = layers(norm=norm)
    x, edge_index, batch = inputs(BATCHES[name])
    compare(theirs, ours, x, edge_index, batch)
    compare(theirs.eval(), ours.eval(), x, edge_index, batch)


def test_without_local_attention_and_biases():
    theirs, ours = layers(conv=None, attn_kwargs={"bias": False})
    compare(theirs, ours, *inputs(BATCHES["mixed"]))


def test_a_conv_with_more_arguments():
    theirs, ours = layers(conv=PyG.GATConv(8, 4, heads=2, edge_dim=3))
    assert type(ours.conv) is pyg.GATConv
    compare(theirs, ours, *inputs(BATCHES["mixed"]), edge_attr=torch.randn(40, 3, dtype=torch.float64))


@pytest.mark.parametrize("options", [{}, {"attn_type": "performer"}])
def test_their_own_forward(options, recwarn):
    """torch_geometric's own forward runs for a single graph, whose attention is dense, and for another kind
    of attention; a warning says so in the second case."""
    torch.manual_seed(1)
    theirs = PyG.GPSConv(8, PyG.GCNConv(8, 8), heads=2, **options).double().eval()
    ours = pyg.GPSConv(8, PyG.GCNConv(8, 8), heads=2, **options).double().eval()
    ours.load_state_dict(theirs.state_dict())
    x, edge_index, batch = inputs(BATCHES["mixed"])
    given = (x, edge_index, batch) if options else (x, edge_index)
    torch.testing.assert_close(ours(*given), theirs(*given))
    said = [w for w in recwarn if issubclass(w.category, dfgnn.nn.FallbackWarning)]
    assert len(said) == 1 and ("performer" in str(said[0].message).lower()) == bool(options)
    assert ("batch=None" in str(said[0].message)) == (not options)
    (kept,) = [k for k in dfgnn.accelerate(theirs).kept if k.cls is PyG.GPSConv] or [None]
    assert (kept is not None) == bool(options)


def test_hooks_are_honoured():
    pair, given = layers(norm=None), inputs(BATCHES["mixed"])
    for layer in pair:
        layer.attn.register_forward_hook(lambda module, args, out: (2 * out[0], out[1]))
    with pytest.warns(dfgnn.nn.FallbackWarning, match="attn has hooks"):
        torch.testing.assert_close(*(layer(*given) for layer in pair))


@pytest.mark.parametrize("name", ["mixed", "padded"])
def test_second_derivatives_of_attention_in_blocks(name):
    _, ours = layers(conv=None, norm=None, act="tanh")
    x, edge_index, batch = inputs(BATCHES[name])
    other = copy.deepcopy(ours)
    other.attention = dfgnn.reference.block_attention
    found = []
    for layer in (ours, other):
        leaf = x.clone().requires_grad_()
        inner = (leaf, *layer.parameters())
        first = torch.autograd.grad(layer(leaf, edge_index, batch).square().sum(), inner, create_graph=True)
        found.append((first, torch.autograd.grad(sum(g.square().sum() for g in first), inner)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mixed", "padded"])
def test_every_dtype(name, dtype):
    x, edge_index, batch = inputs(BATCHES[name])
    theirs, ours = (layer.to(dtype) for layer in layers(conv=None, norm=None))
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 0.05}
    torch.testing.assert_close(*(m(x.to(dtype), edge_index, batch) for m in (ours, theirs)), **tolerance)


def test_dropout():
    _, ours = layers(dropout=0.0, norm=None, attn_kwargs={"dropout": 0.5})
    given = inputs(BATCHES["alike"])
    assert not torch.equal(ours(*given), ours(*given))
    assert torch.equal(ours.eval()(*given), ours(*given))


def test_compilers_record_blocks():
    """Compilers record a single graph for any numbers of nodes and graphs; an unsorted batch is an error when
    it runs."""
    torch._dynamo.reset()
    _, ours = layers(norm=None)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    for name in ("mixed", "missing", "one"):
        x, edge_index, batch = inputs(BATCHES[name])
        leaves = x.requires_grad_(), *ours.parameters()
        outs = compiled(x, edge_index, batch), ours(x, edge_index, batch)
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), leaves) for out in outs))
    x, edge_index, batch = inputs(BATCHES["mixed"])
    with pytest.raises(RuntimeError, match="batch: expected sorted values"):
        compiled(x, edge_index, batch.flip(0))
    rows, edges = {0: torch.export.Dim("n", min=3)}, {1: torch.export.Dim("e", min=2)}
    program = torch.export.export(ours.eval(), (x, edge_index, batch), dynamic_shapes=(rows, edges, rows))
    assert "block_attention_forward" in str(program.graph)
    more = inputs(BATCHES["padded"])
    torch.testing.assert_close(program.module()(*more), ours(*more))


def test_blocks_are_kept():
    x, _, batch = inputs(BATCHES["missing"])
    offsets = blocks_of(x, batch)
    assert offsets is blocks_of(x, batch) and offsets.tolist() == [0, 4, 13]
    with pytest.raises(ValueError, match="batch: expected sorted values"):
        blocks_of(x, batch.flip(0))
    with pytest.raises(ValueError, match=r"batch: expected shape \[13\]"):
        blocks_of(x, batch[1:])
