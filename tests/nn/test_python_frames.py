"""How many Python frames a step takes: on a small graph they cost more than the kernels.

The numbers are what the code takes, counted and so free of noise. A change that needs more has to be worth
the time of every small step; one that needs fewer lowers the limit.
"""

import sys
from pathlib import Path

import pytest
import torch

import dfgnn
from dfgnn import Graph
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
    """From a layer's question to the graph that is kept: at most six frames, and the cache answers without
    leaving its file. The loops of a Graph are kept beside it."""
    layer, x, edge_index = pyg.GATConv(4, 2), torch.zeros(NODES, 4), FORMS[form](edges())
    files = frames(lambda: _x_and_edge_index.graph_of(layer, edge_index, x, x, None, self_loops))
    ours = [name for name in files if name != "torch"]
    if form == "Graph":
        assert len(files) <= 12, files
    else:
        assert len(files) <= 6, files
        assert ours == [ours[0], *["graph/cache.py"] * (len(ours) - 1)], files


def test_a_miss_is_seen():
    """Frames of a miss exceed those of a hit, so that the limits above are those of hits."""
    layer, x = pyg.GATConv(4, 2), torch.zeros(NODES, 4)
    assert len(frames(lambda: _x_and_edge_index.graph_of(layer, edges(), x, x, None, True))) > 15


# Layer -> (most frames of a training step, most of them within dfgnn's files).
STEPS = {
    "pyg GATConv": (25, 9),
    "pyg GATv2Conv": (25, 9),
    "pyg TransformerConv": (25, 9),
    "dgl GATConv": (25, 8),
    "dgl GATv2Conv": (25, 8),
    "dgl DotGatConv": (24, 8),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step(name):
    library, layer = name.split()
    x, edge_index = torch.randn(NODES, 8), edges()
    if library == "pyg":
        conv, arguments = getattr(pyg, layer)(8, 4, heads=2), (x, edge_index)
    else:
        graph = Graph.from_edge_index(edge_index, num_nodes=NODES).add_self_loops()
        conv, arguments = getattr(dgl_layers, layer)(8, 4, num_heads=2), (graph, x)
    files = frames(lambda: conv(*arguments).sum().backward())
    most, most_of_ours = STEPS[name]
    assert len(files) <= most, files
    assert sum(file != "torch" for file in files) <= most_of_ours, files
