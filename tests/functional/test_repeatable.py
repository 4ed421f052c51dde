"""Equal inputs give bitwise equal results and derivatives on several CPU threads (docs/numerics.md)."""

import pytest
import torch
from attention import derivatives
from covering import EXHAUSTIVE, some
from every_function import CASES
from every_layer import LAYERS, floats, made, names, of

from dfgnn import Graph
from dfgnn.engine import edge_projection

N, E, D = 300, 6000, 6  # so that PyTorch divides what it computes between threads
ORDERS = 3 if EXHAUSTIVE else 2
# One case of every kind of code; all of them exhaustively.
FEW = [
    "gat edges",
    "gatv2 projected",
    "dot sink, attention",
    "products",
    "terms shared",
    "score",
    "agnn",
    "flex",
    "blocks",
]


@pytest.fixture(scope="module")
def graph():
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(N - 1, (2, E), generator=generator)
    dst[: E * 3 // 4] = 3  # a row that is much longer than others, and than a work item
    return Graph.from_coo(src, dst, num_src=N, num_dst=N)


@some(FEW, CASES)
def test_functions(name, graph, monkeypatch, threads):
    """First derivatives with create_graph and without, second ones and, exhaustively, third ones. On 1, 2 and
    4 threads the results are the same: no sum of these sizes depends on the number of threads. A projection
    that is not folded is PyTorch's product of matrices, which does on some processors (MKL on Intel's)."""
    case = CASES[name]
    counts = (2, 2, 2) if "unfolded" in name else (2, 2, 2, 1, 4)
    monkeypatch.setattr(edge_projection, "_unfolds", edge_projection._unfolds)
    case.choose(monkeypatch)
    most = (
        min(ORDERS, 2) if case.in_blocks else ORDERS
    )  # third derivatives of attention within blocks are refused
    for orders in range(1, most + 1) if EXHAUSTIVE else (1, most):
        found = []
        for count in counts:
            threads(count)
            tensors = case.tensors(graph, D, D, 3, dtype=torch.float32, batch=False)
            leaves = {n: x.requires_grad_() for n, x in tensors.items()}
            found.append(derivatives(case(graph, leaves), [*leaves.values()], orders))
        for other in found[1:]:
            assert len(other) == len(found[0])
            assert all(map(torch.equal, other, found[0]))


FEW_LAYERS = "dgl GATConv", "dgl HGTConv", "pyg GATConv", "pyg ResGatedGraphConv"
FEW_LAYERS += ("pyg TransformerConv attributes",)


@pytest.mark.parametrize("count", [2, 4])
@some([name for name in FEW_LAYERS if name in names()], names())
def test_layers(name, count, threads):
    """The same on an equal number of threads; PyTorch's projections may depend on their number."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(N, (2, E), generator=generator)
    edge_index[:, :N] = torch.arange(N)
    edges = edge_index if of(name) == "pyg" else Graph.from_edge_index(edge_index, num_nodes=N)
    x, attr = torch.randn(N, 8, generator=generator), torch.randn(E, 3, generator=generator)
    threads(count)
    layer = made(name).float()
    # Third derivatives of attention within blocks are refused.
    for orders in range(1, min(ORDERS, 2 if name == "pyg GPSConv" else 3) + 1):
        found = []
        for _ in range(3):
            leaves = [x.clone().requires_grad_(), attr.clone().requires_grad_()]
            torch.manual_seed(1)
            results = floats(layer(*LAYERS[name].arguments(leaves[0], edges, leaves[1])))
            found.append(derivatives(results, [*leaves, *layer.parameters()], orders))
        for other in found[1:]:
            assert all(map(torch.equal, other, found[0]))
