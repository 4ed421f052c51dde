"""dfgnn.capture: steps on padded batches, compared with plain ones; as CUDA graphs where there is a GPU.

``debug=True`` is what a replay computes, eagerly, so that most of it is tested on the CPU, too.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from plain_training import both_ways, is_captured, plain_step
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import dfgnn
from dfgnn.capturing import CaptureWarning

pyg = pytest.importorskip("torch_geometric.nn")
from captured_training import (  # noqa: E402
    Net,
    assert_same_training,
    batches,
    full_graph,
    graph_loss,
    graphs,
    trained,
)
from torch_geometric.data import Batch  # noqa: E402

import dfgnn.nn.pyg as fused  # noqa: E402


@pytest.mark.parametrize("conv", ["gat", "gatv2", "transformer", "gen", "gated", "gated_mean"])
def test_the_loss_curve_is_that_of_plain_training(device, conv):
    _, step = assert_same_training(batches(6), device, lambda: Net(conv))
    assert step.captures == (len(step.capacities) if device == "cuda" else 0)
    assert "replays" in repr(step)


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm1d(16, affine=False),
        lambda: nn.BatchNorm1d(16, track_running_stats=False),
        lambda: nn.LayerNorm(16),
        lambda: pyg.BatchNorm(16),
        lambda: pyg.GraphNorm(16),
        lambda: pyg.InstanceNorm(16),
        lambda: pyg.LayerNorm(16, mode="graph"),
        lambda: pyg.MeanSubtractionNorm(),
    ],
    ids=["batch_plain", "batch_untracked", "layer", "pyg_batch", "graph", "instance", "pyg_layer", "mean"],
)
def test_norms(device, norm):
    assert_same_training(batches(4), device, lambda: Net(norm=norm()))


@pytest.mark.parametrize("pool", [pyg.global_add_pool, pyg.global_max_pool, pyg.SumAggregation()])
def test_pooling(device, pool):
    assert_same_training(batches(4), device, lambda: Net(pool=pool))


def node_losses():
    return {
        "cross_entropy": lambda out, y: F.cross_entropy(out, y),
        "module": lambda out, y: nn.CrossEntropyLoss(weight=1 / (1 + torch.arange(3, device=out.device)))(
            out, y
        ),
        "nll": lambda out, y: F.nll_loss(out.log_softmax(-1), y, reduction="sum"),
        "soft": lambda out, y: F.cross_entropy(out, F.one_hot(y, 3).to(out.dtype)),
        "bce": lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 3).to(out.dtype)),
        "mse": lambda out, y: F.mse_loss(out, F.one_hot(y, 3).to(out.dtype)),
        "kl": lambda out, y: F.kl_div(
            out.log_softmax(-1), out.detach().softmax(-1) + 0.1, reduction="batchmean"
        ),
        "written": lambda out, y: (out - F.one_hot(y, 3)).abs().mean() + (out**2).sum(0).mean(),
        "masked": None,
    }


@pytest.mark.parametrize("name", list(node_losses()))
def test_losses_over_nodes(device, name):
    def make_loss(model):
        if name == "masked":

            def loss(b):
                mask = b.node_mask if "node_mask" in b else torch.ones_like(b.batch, dtype=torch.bool)
                return (model(b).logsumexp(-1) * mask).max()

            return loss
        return lambda b: node_losses()[name](model(b), b.node_y)

    # Losses that are sums have large gradients; Adam's steps do not depend on the gradients' scale.
    assert_same_training(batches(3), device, lambda: Net(pool=None), make_loss, epochs=1)


def test_other_forms_of_a_batch(device):
    """Tensors, and a dict, with int32 edges, on the device."""
    data = [b.to(device) for b in batches(4)]
    model = fused.GATConv(6, 3).to(device)

    def loss(x, edge_index, y, batch):
        return F.cross_entropy(pyg.global_mean_pool(model(x, edge_index), batch), y)

    def by_name(d):
        return loss(d["x"], d["edge_index"], d["y"], d["batch"])

    start, found = copy.deepcopy(model.state_dict()), []
    for form in ("tensors", "dict", "plain"):
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if form == "plain":
            step = plain_step(loss, optimizer)
        else:
            of_form = loss if form == "tensors" else by_name
            step = dfgnn.capture(of_form, model, optimizer, debug=device == "cpu")
        losses = []
        for b in data:
            given = dict(x=b.x, edge_index=b.edge_index.int(), y=b.y, batch=b.batch, name="kept")
            losses.append(step(given) if form == "dict" else step(b.x, b.edge_index, b.y, b.batch))
        assert form == "plain" or step.replays == 3
        found.append(torch.stack(losses))
    for losses in found[:2]:
        torch.testing.assert_close(losses, found[2], rtol=1e-4, atol=1e-5)


def test_evaluation_gives_the_rows_in_use(device):
    model = Net().to(device).eval()
    step = dfgnn.capture(lambda b: (model(b), b.x + 1), model, debug=device == "cpu")
    for batch in batches(3):
        out, x = step(batch)
        with torch.no_grad():
            torch.testing.assert_close(out, model(batch.to(device)), rtol=1e-4, atol=1e-5)
        assert x.shape == (batch.num_nodes, 6) and not out.requires_grad
    assert step.replays == 2


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_graph_that_stays_the_same(device, dropout):
    """A full-graph step with selections by the graph's masks; on a GPU its dropout masks are those of eager
    training."""
    data = full_graph(device)

    def make_loss(model):
        return lambda b: F.cross_entropy(model(b)[b.train_mask], b.node_y[b.train_mask])

    def make_net():
        return Net(pool=None, dropout=dropout)

    got, _, step = trained([data] * 6, device, make_net, make_loss)
    want, _, _ = trained([data] * 6, device, make_net, make_loss, captured=False)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert step.replays == 11 and not step.capacities
    data.x.mul_(2)  # written in place: the batch no longer counts as the same one, and is captured anew
    captures = step.captures
    before = step(data)
    assert step.captures == captures + (device == "cuda")
    assert torch.isfinite(before)


def test_a_step_without_arguments(device):
    data = full_graph(device)

    def make_loss(model):
        def loss():
            rows = int(data.edge_index[1].max()) + 1  # on a GPU an error, where it is not known
            out = model(data)
            loss = F.cross_entropy(out[data.train_mask], data.node_y[data.train_mask])
            return loss + out[:rows].square().mean()

        return loss

    def run(step, model):
        losses = torch.stack([step() for _ in range(6)])
        assert not is_captured(step) or (step.eager_steps, step.replays) == (1, 5)
        return losses

    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=0.01, capturable=device == "cuda")

    found = both_ways(device, lambda: Net(pool=None), make_loss, run, adam)
    torch.testing.assert_close(*found, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("in_place", [True, False])
def test_of_a_compiled_model(device, in_place):
    """The model is compiled once: what is captured is the code that the first, eager step compiled."""
    torch._dynamo.reset()
    data, losses, counter = full_graph(device), [], CompileCounterWithBackend("aot_eager")
    for compiled in (True, False):
        torch.manual_seed(0)
        # Where loops are replaced and edges have features, compiled code waits for the number of loops.
        model = Net("transformer", pool=None).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if compiled and in_place:
            model.compile(backend=counter)
        elif compiled:
            model = torch.compile(model, backend=counter)

        def loss_fn(b, model=model):
            return F.cross_entropy(model(b)[b.train_mask], b.node_y[b.train_mask])

        step = dfgnn.capture(loss_fn, model, optimizer, debug=device == "cpu")
        first, count = step(data), counter.frame_count
        losses.append(torch.stack([first, *(step(data) for _ in range(3))]))
        assert (step.eager_steps, step.replays) == (1, 3) and counter.frame_count == count > 0
        if compiled:
            with pytest.raises(ValueError, match="batch: expected the same object in every step"):
                step(full_graph(device))
    torch.testing.assert_close(*losses, rtol=2e-4, atol=2e-5)


def test_too_large_a_batch_runs_eagerly_with_one_warning(device):
    data = batches(4)
    most = max(b.num_nodes for b in data), max(b.num_edges for b in data)
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    step = dfgnn.capture(
        graph_loss(model), model, optimizer, capacities=[(most[0], most[1])], debug=device == "cpu"
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for batch in [*data, *data]:
            assert torch.isfinite(step(batch))
    # Padding needs one spare node, so that batches with exactly the capacity's nodes do not fit.
    too_large = 2 * sum(b.num_nodes == most[0] for b in data)
    mine = [w for w in seen if w.category is CaptureWarning]
    assert len(mine) == 1 and "does not fit" in str(mine[0].message)
    assert too_large > 0 and step.eager_steps in (too_large, too_large + 1)
    assert step.replays == 8 - step.eager_steps > 0
    assert [c[:2] for c in step.capacities] == [most]


def test_capacities_grow(device):
    sizes = [4, 4, 8, 16, 4, 8, 16]
    data = [Batch.from_data_list(graphs(k, seed=k)) for k in sizes]
    model = Net().to(device)
    step = dfgnn.capture(
        graph_loss(model), model, torch.optim.Adam(model.parameters()), debug=device == "cpu"
    )
    for batch in data:
        step(batch)
    assert step.replays == 6 and 2 <= len(step.capacities) <= 3
    few = dfgnn.capture(
        graph_loss(model), model, torch.optim.Adam(model.parameters()), max_graphs=1, debug=device == "cpu"
    )
    with pytest.warns(CaptureWarning, match="does not fit"):
        for batch in data:
            few(batch)
    assert len(few.capacities) == 1 and few.eager_steps > 1


def test_what_padding_would_change_is_refused(device):
    """A step whose loss would depend on padding raises, and model and optimizer stay as they were."""
    data = batches(3)
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    step = dfgnn.capture(
        lambda b: F.cross_entropy(model(b), b.y) + torch.logsumexp(b.x + 3, 0).sum(),
        model,
        optimizer,
        debug=device == "cpu",
    )
    step(data[0])
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match="the loss differs with padding .*node_mask"):
        step(data[1])
    assert all(x.equal(before[name]) for name, x in model.state_dict().items())


def test_before_step_and_a_scheduler(device):
    data, found = batches(4), []
    for captured in (True, False):
        torch.manual_seed(0)
        model = Net().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, capturable=device == "cuda")
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def clip(model=model):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        losses = []
        step = plain_step(graph_loss(model), optimizer, device, clip)
        if captured:
            step = dfgnn.capture(graph_loss(model), model, optimizer, before_step=clip, debug=device == "cpu")
        for batch in [*data, *data]:
            losses.append(step(batch))
            scheduler.step()
        found.append(torch.stack(losses))
    torch.testing.assert_close(*found, rtol=2e-4, atol=2e-5)


def test_on_a_cpu_steps_run_eagerly_after_one_warning():
    model = Net()
    step = dfgnn.capture(graph_loss(model), model, torch.optim.Adam(model.parameters()))
    with pytest.warns(CaptureWarning, match="CPU") as seen:
        for batch in batches(3):
            step(batch)
    assert len([w for w in seen if w.category is CaptureWarning]) == 1
    assert step.eager_steps == 3 and step.replays == 0


def test_bad_input():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    for args, options, message in [
        ((3, model), {}, "loss_fn: expected a function, got int"),
        ((len, 3), {}, "model: expected a torch.nn.Module, got int"),
        ((len, model, 3), {}, "optimizer: expected one of torch.optim, got int"),
        ((len, model), {"before_step": 3}, "before_step: expected a function"),
    ]:
        with pytest.raises(TypeError, match=message):
            dfgnn.capture(*args, **options)
    for options, message in [
        ({"max_graphs": 0}, "max_graphs: expected a number >= 1, got 0"),
        ({"capacities": [(3,)]}, r"capacities: expected \(nodes, edges\)"),
        ({"capacities": []}, "capacities: expected at least one, got none"),
    ]:
        with pytest.raises(ValueError, match=message):
            dfgnn.capture(len, model, **options)
    step = dfgnn.capture(lambda b: b.x, model, optimizer, debug=True)
    with pytest.raises(TypeError, match=r"step: expected a torch_geometric Data .* got \(int\)"):
        step(3)
    with pytest.raises(TypeError, match="loss_fn: expected it to return a loss of one element"):
        step(batches(1)[0])
    with pytest.raises(TypeError, match="tensors x and edge_index"):
        step({"x": torch.ones(1)})


def test_a_batch_of_another_kind_runs_eagerly():
    model, data = Net(), batches(3)
    sizes = [(max(b.num_nodes for b in data) + 1, max(b.num_edges for b in data))]
    step = dfgnn.capture(
        graph_loss(model), model, torch.optim.Adam(model.parameters()), capacities=sizes, debug=True
    )
    step(data[0])
    data[1].more = torch.ones(3)
    with pytest.warns(CaptureWarning, match="not like the first one"):
        step(data[1])
    step(data[2])
    assert (step.eager_steps, step.replays) == (2, 1)
    with pytest.warns(CaptureWarning, match="does not fit"):  # another reason has a warning of its own
        step(Batch.from_data_list(graphs(40)))
