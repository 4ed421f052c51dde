"""Accelerated layers in the worker processes of loaders, compared with torch_geometric's in this process."""

import pytest
import torch
from covering import exhaustive
from every_layer import ATTR, EDGES, E, N, assert_equal, both, drawn, names, with_gradients
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput
from torch_geometric.utils import k_hop_subgraph

import dfgnn

LAYERS, X = names("pyg"), drawn(3, N, 8)


class Encoded(torch.utils.data.Dataset):
    """Subgraphs with the outputs of all layers on them, computed in the process that draws the subgraph."""

    def __init__(self, layers):
        self.layers, self.graph = layers, dfgnn.Graph.from_edge_index(EDGES, num_nodes=N)

    def __len__(self):
        return len(X)

    def __getitem__(self, number):
        chosen = torch.randperm(E, generator=torch.Generator().manual_seed(number))[: E - 5]
        given = dict(x=X[number], edges=EDGES[:, chosen], attr=ATTR[chosen])
        results = {
            name: [x.detach() for x in with_gradients(layer, name, **given)]
            for name, layer in self.layers.items()
        }
        graph = (
            EDGES if type(self.layers["pyg GATConv"]).__module__.startswith("torch_geometric") else self.graph
        )
        results["a pickled Graph"] = [self.layers["pyg GATConv"](X[number], graph).detach()]
        return results


@pytest.fixture(scope="module")
def datasets():
    """One dataset with torch_geometric's layers and one with ours. Ours are used once before the workers
    start, so that cached graphs and threads exist when the process forks."""
    theirs, ours = (Encoded(dict(zip(LAYERS, layers))) for layers in zip(*map(both, LAYERS)))
    ours[0]
    return theirs, ours


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("method, workers", [("fork", 2), pytest.param("spawn", 1, marks=exhaustive)])
def test_every_layer(datasets, method, workers):
    """A forked worker has the layers as they are; a spawned one gets them pickled."""
    theirs, ours = datasets
    loader = torch.utils.data.DataLoader(
        ours, None, num_workers=workers, multiprocessing_context=method, persistent_workers=True
    )
    for _ in range(2):
        for expected, actual in zip(theirs, loader, strict=True):
            assert actual.keys() == expected.keys() and len(actual) == len(LAYERS) + 1
            for name in expected:
                assert_equal(actual[name], expected[name])


class Hops(BaseSampler):
    """The whole neighbourhood of two hops: NeighborSampler's contract, without the package that it needs."""

    def __init__(self, edge_index):
        self.edge_index = edge_index

    def sample_from_nodes(self, index):
        nodes, edges, seeds, kept = k_hop_subgraph(index.node, 2, self.edge_index, num_nodes=N)
        rest = torch.ones(len(nodes), dtype=torch.bool)
        rest[seeds] = False
        order = torch.cat([seeds, rest.nonzero().flatten()])  # seeds come first
        row, col = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))[edges]
        given = index.input_id, index.time
        return SamplerOutput(nodes[order], row, col, kept.nonzero().flatten(), metadata=given)

    def sample_from_edges(self, index, neg_sampling=None):
        raise NotImplementedError


class Encode:
    """A transform of batches that a worker applies."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, data):
        with torch.no_grad():
            data.h = self.layer(data.x, data.edge_index)
        return data


def test_sampled_neighbourhoods():
    """A node loader, of which NeighborLoader is one, whose workers sample, and compute a first layer."""
    (first, ours_first), (second, ours_second) = both("pyg GATv2Conv"), both("pyg TransformerConv")
    data, seeds = Data(x=X[0], edge_index=EDGES), torch.arange(N)
    loader = NodeLoader(
        *(data, Hops(EDGES), seeds),
        transform=Encode(ours_first),
        **dict(batch_size=4, num_workers=1, multiprocessing_context="fork", persistent_workers=True),
        filter_per_worker=True,
    )
    whole = first(X[0], EDGES)
    expected = second(whole, EDGES)
    for _ in range(2):
        batches = list(loader)
        out = [ours_second(batch.h, batch.edge_index)[: batch.batch_size] for batch in batches]
        assert_equal([torch.cat(out)], [expected])
        assert torch.equal(torch.cat([batch.input_id for batch in batches]), seeds)
