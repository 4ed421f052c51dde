"""dfgnn.capture on a GPU alone: masks, waits, loaders, and captures that are torch's own."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch_geometric")
from captured_training import Net, batches, full_graph, graph_loss, graphs, trained

import dfgnn
import dfgnn.nn.pyg as fused


@pytest.fixture
def gpu():
    return "cuda"


@pytest.mark.gpu
def test_dropout_advances_and_repeats_with_the_seed(gpu):
    data = batches(2)
    curves = []
    for _ in range(2):
        torch.manual_seed(3)
        model = Net(dropout=0.5).to(gpu)
        step = dfgnn.capture(graph_loss(model), model, torch.optim.SGD(model.parameters(), 0.0))
        curves.append(torch.stack([step(data[k % 2]) for k in range(9)]))
    torch.testing.assert_close(curves[0], curves[1])  # close, not equal: pooling sums by atomics
    assert len(curves[0].unique()) == 9  # nothing is learnt: only masks differ


@pytest.mark.gpu
def test_the_first_replay_waits_for_the_capture(gpu, late_capture):
    """Capturing writes to the generator's offset, on its own stream, and a replay reads it."""

    def make_loss(model):
        return lambda b: late_capture() or F.cross_entropy(model(b)[b.train_mask], b.node_y[b.train_mask])

    data, make_net = [full_graph(gpu)] * 2, lambda: Net(pool=None, dropout=0.5)
    got, _, step = trained(data, gpu, make_net, make_loss, epochs=1)
    want, _, _ = trained(data, gpu, make_net, make_loss, epochs=1, captured=False)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert step.replays == 1


@pytest.mark.gpu
def test_a_wait_is_an_error_that_leaves_no_trace(gpu):
    data = batches(3)
    model = Net().to(gpu)
    step = dfgnn.capture(
        lambda b: F.cross_entropy(model(b), b.y) * (1 + 0 * b.x.abs().sum().item()),
        model,
        torch.optim.Adam(model.parameters()),
        check=False,
    )
    step(data[0])
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="the step waits for the device"):
        step(data[1])
    assert all(x.equal(before[name]) for name, x in model.state_dict().items())


@pytest.mark.gpu
def test_edges_that_the_step_makes_are_an_error(gpu):
    conv, x = fused.GATConv(8, 4).to(gpu), torch.randn(50, 8, device=gpu)

    def loss():
        return conv(x, torch.randint(50, (2, 200), device=gpu)).square().mean()

    step = dfgnn.capture(loss, conv, torch.optim.Adam(conv.parameters()))
    step()
    with pytest.raises(RuntimeError, match="the step waits for the device"):
        step()


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_with_a_loader_that_pins_memory(gpu, workers):
    from torch_geometric.loader import DataLoader

    gc.collect()  # CUDA objects of other tests must not be freed in a forked worker, which cannot use CUDA
    loader = DataLoader(graphs(60), batch_size=8, shuffle=True, pin_memory=True, num_workers=workers)
    model = Net().to(gpu)
    step = dfgnn.capture(graph_loss(model), model, torch.optim.Adam(model.parameters()))
    assert all(torch.isfinite(step(batch)) for _ in range(2) for batch in loader)
    assert step.eager_steps == 1


@pytest.mark.gpu
@pytest.mark.parametrize("conv", ["gat", "gatv2", "transformer"])
def test_a_fixed_graph_under_torchs_own_captures(gpu, conv):
    """torch.cuda.make_graphed_callables, and torch.compile(mode="reduce-overhead")."""
    data = full_graph(gpu)
    make = {"gat": fused.GATConv, "gatv2": fused.GATv2Conv, "transformer": fused.TransformerConv}[conv]
    torch.manual_seed(0)
    layer = make(6, 8, heads=2).to(gpu)

    def gradients(call):
        found = []
        for k in range(4):
            layer.zero_grad()
            x = (data.x * (k + 1)).requires_grad_()
            out = call(x)
            out.square().sum().backward()
            found += [out.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]
        return found

    want = gradients(lambda x: layer(x, data.edge_index))
    graphed = torch.cuda.make_graphed_callables(
        _WithEdges(layer, data.edge_index), (data.x.clone().requires_grad_(),)
    )
    torch.testing.assert_close(gradients(graphed), want, rtol=1e-4, atol=1e-3)
    gc.collect()
    torch.compiler.reset()  # what other tests have compiled shares its CUDA graphs' memory
    torch._inductor.cudagraph_trees.reset_cudagraph_trees()
    compiled = torch.compile(_WithEdges(layer, data.edge_index), mode="reduce-overhead")
    torch.testing.assert_close(gradients(compiled), want, rtol=1e-4, atol=1e-3)


class _WithEdges(nn.Module):
    def __init__(self, layer, edge_index):
        super().__init__()
        self.layer = layer
        self.register_buffer("edge_index", edge_index)

    def forward(self, x):
        return self.layer(x, self.edge_index)


@pytest.mark.gpu
def test_a_loss_from_before_lives_on(gpu):
    """Such a loss keeps the nodes alive that add up the parameters' gradients, on another stream."""
    data = batches(2)[0].to(gpu)
    model = Net().to(gpu)
    before = graph_loss(model)(data)
    step = dfgnn.capture(graph_loss(model), model, torch.optim.SGD(model.parameters(), 0.125))
    losses = [step(data) for _ in range(3)]
    assert losses[2] < losses[0]
    del losses
    assert before.grad_fn is not None
