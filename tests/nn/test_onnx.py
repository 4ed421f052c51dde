"""torch.onnx.export of the layers, through plain operations, against onnxruntime on graphs of other sizes."""

import warnings

import pytest
import torch
from torch import nn

import dfgnn

WHY = "ONNX: onnx, onnxscript and onnxruntime are not installed (about 60 MB)"
pytest.importorskip("onnx", reason=WHY)
pytest.importorskip("onnxscript", reason=WHY)
ort = pytest.importorskip("onnxruntime", reason=WHY)

N, E = 20, 60
EXPORTERS = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "TorchScript"])


def export(module, args, path, dynamo, axes):
    """Exports the module to ``path``. axes: for each argument {dimension: name} of the sizes that may
    vary."""
    sizes = {name: torch.export.Dim(name, min=2) for each in axes for name in each.values()}
    names = [f"input_{k}" for k in range(len(args))]
    if dynamo:
        shapes = tuple({k: sizes[name] for k, name in each.items()} for each in axes)
        options = {"dynamic_shapes": shapes, "verbose": False}
    else:
        options = {"dynamic_axes": dict(zip(names, axes)), "opset_version": 18}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), args, path, input_names=names, dynamo=dynamo, **options)
    session = ort.InferenceSession(path)

    def run(*args):
        (out,) = session.run(None, {name: x.numpy() for name, x in zip(names, args)})
        return torch.from_numpy(out)

    return run


PYG = {
    "GATConv": lambda p: p.GATConv(8, 4, 2),
    "GATConv with edges": lambda p: p.GATConv(8, 4, 2, edge_dim=3, add_self_loops=False),
    "GATv2Conv": lambda p: p.GATv2Conv(8, 4, 2, edge_dim=3, add_self_loops=False),
    "TransformerConv": lambda p: p.TransformerConv(8, 4, 2, beta=True),
    "TransformerConv with edges": lambda p: p.TransformerConv(8, 4, 2, edge_dim=3),
    "AGNNConv": lambda p: p.AGNNConv(),
    "AGNNConv without loops": lambda p: p.AGNNConv(add_self_loops=False),
    "SuperGATConv": lambda p: p.SuperGATConv(8, 4, 2),
    "SuperGATConv without loops": lambda p: p.SuperGATConv(8, 4, 2, add_self_loops=False),
    "ResGatedGraphConv": lambda p: p.ResGatedGraphConv(8, 4),
    "GENConv": lambda p: p.GENConv(8, 4, edge_dim=3),
    "GATEConv": lambda p: p.GATEConv(8, 8, 3),
}
WITH_EDGES = "GENConv", "GATEConv"  # which have no attribute edge_dim


@pytest.mark.parametrize("build", PYG.values(), ids=PYG)
@EXPORTERS
def test_pyg(build, dynamo, tmp_path):
    pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
    from dfgnn.nn import pyg

    conv = build(pyg)
    if type(conv).__name__ == "GENConv" and not dynamo:
        pytest.skip("torch_geometric's own is written, with wrong numbers (docs/migrating_from_pyg.md)")
    with_edges = type(conv).__name__ in WITH_EDGES or getattr(conv, "edge_dim", None)

    def inputs(n, e):
        edges = torch.randint(n, (2, e))
        edge_attr = (torch.randn(e, 3),) if with_edges else ()
        return torch.randn(n, 8), edges, *edge_attr

    axes = [{0: "nodes"}, {1: "edges"}, {0: "edges"}]
    args = inputs(N, E)
    run = export(conv, args, tmp_path / "model.onnx", dynamo, axes[: len(args)])
    # In torch_geometric's own operations onnxruntime 1.24 refuses a graph without edges.
    for sizes in ((N, E), (33, 100), (7, 5), *(((7, 0), (1, 0)) if dynamo else ())):
        args = inputs(*sizes)
        torch.testing.assert_close(run(*args), conv(*args).detach(), rtol=1e-4, atol=1e-5)


OWN = {
    "GATConv": lambda: dfgnn.nn.dgl.GATConv(8, 4, 2, residual=True),
    "GATv2Conv": lambda: dfgnn.nn.dgl.GATv2Conv(8, 4, 2),
    "DotGatConv": lambda: dfgnn.nn.dgl.DotGatConv(8, 4, 2),
    "AGNNConv": lambda: dfgnn.nn.dgl.AGNNConv(),
    "GraphTransformerConv": lambda: dfgnn.nn.GraphTransformerConv(8, 4, 2),
}


class OnGraph(nn.Module):
    def __init__(self, graph, conv):
        super().__init__()
        self.held, self.conv = graph, conv

    def forward(self, x):
        return self.conv(self.held, x)


@pytest.mark.parametrize("build", OWN.values(), ids=OWN)
def test_on_a_graph(build, tmp_path):
    """A module with a Graph among its attributes: the ONNX file contains the graph's edges as constants."""
    graph = dfgnn.Graph.from_edge_index(torch.randint(N, (2, E)), num_nodes=N).add_self_loops()
    module = OnGraph(graph, build())
    run = export(module, (torch.randn(N, 8),), tmp_path / "model.onnx", True, [{}])
    x = torch.randn(N, 8)
    torch.testing.assert_close(run(x), module(x).detach(), rtol=1e-4, atol=1e-5)


def test_the_older_exporter_on_a_graph(tmp_path):
    graph = dfgnn.Graph.from_edge_index(torch.randint(N, (2, E)), num_nodes=N).add_self_loops()
    with pytest.raises(NotImplementedError, match="dynamo: expected True"):
        export(OnGraph(graph, OWN["GATConv"]()), (torch.randn(N, 8),), tmp_path / "model.onnx", False, [{}])
