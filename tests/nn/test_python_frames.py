"""How many Python frames a step takes: on a small graph they cost more than the kernels.

The numbers are what the code takes, counted and so free of noise. A change that needs more has to be worth
the time of every small step; one that needs fewer lowers the limit.
"""

import sys
from pathlib import Path

import pytest
import torch

import dfgnn
from dfgnn import Graph, nn
from dfgnn.nn import dgl as dgl_layers

torch_geometric = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
from dfgnn.nn import pyg  # noqa: E402
from dfgnn.nn.pyg import _x_and_edge_index  # noqa: E402

PACKAGE = Path(dfgnn.__file__).parent
NODES = 50


def frames(call, warm=3):
    """The files of the Python functions that ``call`` enters, in order; those of dfgnn from its folder on."""
    for _ in range(warm):
        call()
    found = []

    def note(frame, event, _):
        if event == "call":
            found.append(Path(frame.f_code.co_filename))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [x.relative_to(PACKAGE).as_posix() if x.is_relative_to(PACKAGE) else "torch" for x in found[1:]]


def edges():
    return torch.randint(NODES, (2, 200), generator=torch.Generator().manual_seed(0))


FORMS = {
    "tensor": lambda edge_index: edge_index,
    "int32": lambda edge_index: edge_index.int(),
    "transposed": lambda edge_index: edge_index.t().contiguous().t(),
    "Graph": lambda edge_index: Graph.from_edge_index(edge_index, num_nodes=NODES),
}


@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_hit_of_the_graph_cache(form, self_loops):
    """A layer gets its cached graph in at most six Python frames, and the cache calls no function of another
    file. For a Graph, whose version with loops is cached elsewhere, it takes at most twelve."""
    layer, x, edge_index = pyg.GATConv(4, 2), torch.zeros(NODES, 4), FORMS[form](edges())
    files = frames(lambda: _x_and_edge_index.layer_graph(layer, edge_index, x, x, None, self_loops))
    ours = [name for name in files if name != "torch"]
    if form == "Graph":
        assert len(files) <= 12, files
    else:
        assert len(files) <= 6, files
        assert ours == [ours[0], *["graph/cache.py"] * (len(ours) - 1)], files


def test_a_miss_is_seen():
    """Frames of a miss exceed those of a hit, so that the limits above are those of hits."""
    layer, x = pyg.GATConv(4, 2), torch.zeros(NODES, 4)
    assert len(frames(lambda: _x_and_edge_index.layer_graph(layer, edges(), x, x, None, True))) > 15


# Layer and kind of call -> (most frames of a training step, most of them within dfgnn's files). Autocast
# itself takes ten frames.
STEPS = {
    "pyg GATConv": (28, 12),
    "pyg GATv2Conv": (28, 12),
    "pyg TransformerConv": (28, 12),
    "dgl GATConv": (26, 9),
    "dgl GATv2Conv": (26, 9),
    "dgl DotGatConv": (25, 9),
    "ours GraphTransformerConv": (25, 9),
    "pyg GATConv edges": (41, 21),
    "pyg TransformerConv edges": (37, 18),
    "pyg GATv2Conv edges": (42, 22),
    "pyg GATConv block": (29, 13),
    "pyg GATConv pair": (28, 12),
    "pyg GATv2Conv pair": (28, 12),
    "pyg TransformerConv pair": (28, 12),
    "dgl GATConv pair": (26, 9),
    "dgl DotGatConv pair": (25, 9),
    "pyg GATConv mean": (30, 13),
    "pyg GATv2Conv residual": (28, 12),
    "pyg GATConv autocast": (39, 16),
}
OPTIONS = {"edges": {"edge_dim": 3}, "mean": {"concat": False}, "residual": {"residual": True}}


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step(name):
    library, layer, kind = (*name.split(), "")[:3]
    x, edge_index, extra = torch.randn(NODES, 8), edges(), ()
    if kind == "edges":
        extra = (torch.randn(edge_index.shape[1], 3),)
    if library == "pyg":
        conv = getattr(pyg, layer)(8, 4, heads=2, **OPTIONS.get(kind, {}))
        features = (x, x[:]) if kind == "block" else (x, x.clone()) if kind == "pair" else x
        arguments = features, edge_index, *extra
    else:
        graph = Graph.from_edge_index(edge_index, num_nodes=NODES).add_self_loops()
        conv = getattr(dgl_layers if library == "dgl" else nn, layer)(8, 4, num_heads=2)
        arguments = graph, (x, x.clone()) if kind == "pair" else x

    def step():
        if kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                out = conv(*arguments)
        else:
            out = conv(*arguments)
        out.sum().backward()

    files = frames(step)
    most, most_of_ours = STEPS[name]
    assert len(files) <= most, files
    assert sum(file != "torch" for file in files) <= most_of_ours, files
