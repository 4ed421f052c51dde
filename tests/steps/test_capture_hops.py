"""dfgnn.capture on samples with a graph for each layer, compared with plain training; on a GPU from CUDA
graphs."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dfgnn
from dfgnn.capturing import CaptureWarning
from dfgnn.graph.sampling import NeighborSampler

pytest.importorskip("torch_geometric.nn")
import captured_training

import dfgnn.nn.pyg as fused

NODES, EDGES, CLASSES = 200, 1600, 3
MAKE = {
    "gat": lambda a, b: fused.GATConv(a, b, heads=2, add_self_loops=False),
    "gat_loops": lambda a, b: fused.GATConv(a, b, heads=2),
    "gatv2_edges": lambda a, b: fused.GATv2Conv(a, b, heads=2, edge_dim=2, add_self_loops=False),
    "transformer_edges": lambda a, b: fused.TransformerConv(a, b, heads=2, edge_dim=2),
    "gen_edges": lambda a, b: fused.GENConv(a, 2 * b, edge_dim=2, norm="layer"),
}


class Net(nn.Module):
    """Two layers on blocks, with norms, which rows that are not in use could disturb, and attributes."""

    def __init__(self, conv="gat", dropout=0.0):
        super().__init__()
        self.convs = nn.ModuleList([MAKE[conv](6, 8), MAKE[conv](16, 8)])
        self.lins = nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 16)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(16), nn.BatchNorm1d(16)])
        self.out, self.edges, self.dropout = nn.Linear(16, CLASSES), "edges" in conv, dropout

    def forward(self, batch):
        x = batch["x"]
        for layer, lin, norm, hop in zip(self.convs, self.lins, self.norms, batch["sample"].hops):
            end = x[: hop.num_dst]
            attr = (batch["attr"][hop.edge_ids],) if self.edges else ()
            x = F.dropout(norm(layer((x, end), hop.edge_index, *attr) + lin(end)).relu(), self.dropout)
        return self.out(x)


class ByGraph(Net):
    """The same network, whose layers get the hops' graphs instead of their edge_index."""

    def forward(self, batch):
        x = batch["x"]
        for lin, norm, hop in zip(self.lins, self.norms, batch["sample"].hops):
            h = lin(x).unflatten(1, (2, 8))
            x = norm(dfgnn.functional.dot_attention(hop.graph, h[: hop.num_dst], h, h).flatten(1)).relu()
        return self.out(x)


def loss_of(model):
    return lambda batch: F.cross_entropy(model(batch), batch["y"])


def samples(device, sizes=(30, 30, 30, 12), graphs=True, fanouts=(4, 3)):
    """Sampled batches; the last one has fewer seeds."""
    torch.manual_seed(0)
    graph = dfgnn.Graph.from_edge_index(torch.randint(NODES, (2, EDGES)), NODES).to(device)
    x, y = torch.randn(NODES, 6).to(device), torch.randint(CLASSES, (NODES,)).to(device)
    attr = torch.randn(EDGES, 2).to(device)
    sampler, generator = NeighborSampler(graph, fanouts), torch.Generator(device).manual_seed(0)
    found = []
    for count in sizes:
        seeds = torch.randperm(NODES)[:count].to(device)
        sample = sampler.sample(seeds, generator, graphs=graphs)
        found.append({"sample": sample, "x": x[sample.nodes], "y": y[seeds], "attr": attr, "name": "kept"})
    return found


trained = functools.partial(captured_training.trained, make_loss=loss_of)
assert_same_training = functools.partial(captured_training.assert_same_training, make_loss=loss_of)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("conv", list(MAKE))
def test_the_loss_curve_is_that_of_plain_training(device, conv, graphs):
    _, step = assert_same_training(samples(device, graphs=graphs), device, lambda: Net(conv))
    assert step.captures == (len(step.capacities) if device == "cuda" else 0)
    assert "nodes / " in repr(step) and "31 nodes" in repr(step)  # 30 seeds and one spare node


@pytest.mark.parametrize("graphs", [True, False])
def test_by_the_graphs_of_the_hops(device, graphs):
    """Layers get the hops' graphs; eager steps make these of the edges if the samples have none."""
    data, make_net = samples(device, graphs=graphs), ByGraph
    got, _, step = trained(data, device, make_net)
    want, _, _ = trained(samples(device), device, make_net, captured=False)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert step.replays == len(got) - 1 and step.eager_steps == 1


def test_capacities_by_hop(device):
    data = samples(device)
    counts = [
        [len(b["sample"].nodes), *(n for h in b["sample"].hops for n in (h.edge_index.shape[1], h.num_dst))]
        for b in data
    ]
    capacity = tuple(max(column) + 5 for column in zip(*counts))
    _, step = assert_same_training(data, device, Net, capacities=[capacity])
    (made,) = step.capacities
    # Capacities are raised until no two of them are equal, so that a size tells what it counts.
    assert all(0 <= a - b <= len(capacity) for a, b in zip(made.counts(), capacity))
    assert len(set(made.counts())) == len(capacity)
    step = trained(data[:1], device, Net, capacities=[capacity[:3]])[2]
    with pytest.raises(ValueError, match=r"capacities: expected 5 numbers, \(nodes, edges, nodes, .* got \("):
        step(data[1])
    step = trained(data[:1], device, Net, capacities=[tuple(n - 10 for n in capacity)])[2]
    with pytest.warns(CaptureWarning, match=r"a batch of [\d,]+ nodes / .* does not fit into a capacity"):
        step(data[1])


def test_what_a_step_sees(device):
    """Masks of the ends and edges of each hop, and results without rows that are not in use."""
    seen, model = [], Net().to(device).eval()

    def outputs(batch):
        seen.append(([len(m) for m in batch["node_masks"]], [len(m) for m in batch["edge_masks"]]))
        for hop, ends, nodes, edges in zip(
            batch["sample"].hops, batch["node_masks"][1:], batch["node_masks"], batch["edge_masks"]
        ):
            assert hop.graph.num_src == hop.num_src == len(nodes)
            assert hop.num_dst == len(ends) and hop.edge_index.shape[1] == len(hop.edge_ids) == len(edges)
        assert batch["name"] == "kept"
        return model(batch), batch["node_masks"][1]

    step, data = dfgnn.capture(outputs, model, debug=device == "cpu"), samples(device)
    for batch in data[:1] + data:
        out, mask = step(batch)
        with torch.no_grad():
            torch.testing.assert_close(out, model(batch), rtol=1e-4, atol=1e-5)
        assert len(mask) == batch["sample"].hops[0].num_dst and mask.all()
    assert step.replays == 4 and len({str(s) for s in seen}) > 2


def test_two_samples_are_refused(device):
    first, second = samples(device)[:2]
    step = trained([first], device, Net)[2]
    with pytest.raises(TypeError, match=r"expected one sample in the dict, got \['sample', 'other'\]"):
        step(first | {"other": second["sample"]})
    with pytest.warns(CaptureWarning, match="a batch is not like the first one"):
        step(first | {"more": second["x"]})


def test_a_sample_of_one_hop_and_levels_of_one_size(device):
    """A hop has as many destinations as sources, so that the number of rows does not tell them apart; the
    padded numbers do."""
    graph = dfgnn.Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4).to(device)
    sampler, x = NeighborSampler(graph, (2, 2)), torch.randn(4, 6, device=device)
    orders = [torch.tensor(order, device=device) for order in ([3, 1, 2, 0], [0, 1, 2, 3], [1, 0, 3, 2])]
    found = []
    for seeds in orders:
        sample = sampler.sample(seeds, graphs=False)
        assert [hop.num_src for hop in sample.hops] == [4, 4] and sample.hops[1].num_dst == 4
        found.append({"sample": sample, "x": x[sample.nodes], "y": seeds % CLASSES})
    assert_same_training(found, device, Net)
