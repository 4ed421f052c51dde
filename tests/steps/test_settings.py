"""Captured steps while what is around them changes: settings and Python values are noticed, rates and
replaced buffers go to where replays read them."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from plain_training import both_ways, is_captured, plain_step
from torch import nn

import dfgnn
from dfgnn.capturing import CaptureWarning
from dfgnn.capturing.state import forget_streams

pyg = pytest.importorskip("torch_geometric.nn")
from captured_training import graph_loss  # noqa: E402
from torch_geometric.data import Batch, Data  # noqa: E402

import dfgnn.nn.pyg as fused  # noqa: E402


class Net(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.first, self.out = fused.GATConv(6, 8, heads=2), nn.Linear(16, 3)
        self.norm = nn.BatchNorm1d(16) if norm is None else norm

    def forward(self, batch):
        h = self.first(batch.x, batch.edge_index)
        h = self.norm(h, batch.batch) if isinstance(self.norm, pyg.InstanceNorm) else self.norm(h)
        return self.out(pyg.global_mean_pool(h.relu(), batch.batch))


def batch_of(count, seed):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n in torch.randint(5, 20, (count,), generator=generator).tolist():
        x, edges = torch.randn(n, 6, generator=generator), torch.randint(n, (2, 2 * n), generator=generator)
        found.append(Data(x=x, edge_index=edges, y=torch.randint(3, (1,), generator=generator)))
    return Batch.from_data_list(found)


def batches(count):
    return [batch_of(8, seed) for seed in range(count)]


def rate(model, optimizer):
    """Assigns a number to the learning rate, as a hand-written warm-up does; a scheduler would write into the
    tensor that the capture reads."""
    optimizer.param_groups[0]["lr"] = 0.1


def betas(model, optimizer):
    optimizer.param_groups[0]["betas"] = 0.5, 0.7


def decay(model, optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.3


def frozen(model, optimizer):
    model.first.requires_grad_(False)


def norm_in_eval(model, optimizer):
    model.norm.eval()


def replaced_parameters(model, optimizer):
    for x in model.parameters():
        x.data = 0.5 * x.data


def loaded(model, optimizer):
    """Loads an optimizer state as another run without `capturable` has saved it."""
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        group["capturable"], group["lr"] = False, 0.03
    for values in state["state"].values():
        values["exp_avg"] = values["exp_avg"] * 3
    optimizer.load_state_dict(state)


def one_more_group(model, optimizer):
    frozen_so_far = nn.Parameter(torch.ones(3, device=model.out.bias.device))
    model.out.bias = frozen_so_far
    optimizer.add_param_group({"params": [frozen_so_far], "lr": 0.2})


CHANGES = [rate, betas, decay, frozen, norm_in_eval, replaced_parameters, loaded, one_more_group]


def losses(device, change, data, captured, whole, often=False, **options):
    """whole: always the same batch, as of one graph. often: changes before each step."""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2, capturable=device == "cuda")
    loss = graph_loss(model)
    if captured:
        step = dfgnn.capture(loss, model, optimizer, debug=device == "cpu", **options)
    else:
        step = plain_step(loss, optimizer, device)
    found = []
    for k in range(12):
        if k == 6 or often:
            change(model, optimizer)
            if not captured and device == "cuda":
                for group in optimizer.param_groups:
                    group["capturable"] = True
                for values in optimizer.state.values():
                    values["step"] = values["step"].to(device)
        found.append(step(data[0 if whole else k % len(data)]))
    return torch.stack(found).cpu(), step


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps(device, change, whole):
    data = batches(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        got, step = losses(device, change, data, True, whole)
    want, _ = losses(device, change, data, False, whole)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert step.eager_steps == (1 if change is rate else 2)
    made = len(step._same) if whole else len({now for _, now in step._captured})
    assert made == (1 if change is rate else 2)


def test_changes_at_every_step_run_eagerly(device):
    """Values that a captured step cannot read anew and that change at each step, as betas do by
    OneCycleLR."""

    def change(model, optimizer):
        group = optimizer.param_groups[0]
        group["betas"] = 0.99 * group["betas"][0], 0.99

    data = batches(3)
    for whole in (False, True):
        with pytest.warns(CaptureWarning, match="change more often than max_graphs"):
            got, step = losses(device, change, data, True, whole, often=True, max_graphs=2)
        assert step.eager_steps == 12
        want, _ = losses(device, change, data, False, whole, often=True)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_settings_in_turns(device):
    def change(model, optimizer):
        model.norm.train(not model.norm.training)

    data = batches(3)
    got, step = losses(device, change, data, True, False, often=True)
    want, _ = losses(device, change, data, False, False, often=True)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert step.eager_steps == 2 and step.replays == 10


def test_lazy_parameters(device):
    def make_net():
        model = Net()
        model.out = nn.LazyLinear(3)
        return model

    def run(step, model):
        losses = torch.stack([step(batch) for batch in batches(4)])
        assert not is_captured(step) or step.replays == 3
        return losses

    torch.testing.assert_close(*both_ways(device, make_net, graph_loss, run), rtol=1e-3, atol=1e-4)


def test_buffers_that_a_module_replaces(device):
    """torch_geometric's InstanceNorm replaces its buffers in training. The check of padding leaves them
    unchanged."""

    def run(step, model):
        for batch in batches(6):
            step(batch)
        return model.norm.running_mean, model.norm.running_var

    def make_net():
        return Net(pyg.InstanceNorm(16, track_running_stats=True))

    found = both_ways(device, make_net, graph_loss, run)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", [dict, Batch])
def test_numbers_of_a_batch_that_change(device, form):
    """Python numbers of a batch that change: a CUDA graph has them as constants, unlike tensors."""
    data = batches(4)
    for k, batch in enumerate(data):
        batch.sharpness = 0.5 * (k + 1)
    if form is dict:
        names = "x", "edge_index", "batch", "y", "sharpness"
        data = [{name: batch[name] for name in names} for batch in data]

    def make_loss(model):
        def loss(batch):
            batch = Batch(**batch) if form is dict else batch
            return F.cross_entropy(model(batch.to(device)) * batch.sharpness, batch.y)

        return loss

    def run(step, model):
        losses = torch.stack([step(batch) for batch in data])
        assert not is_captured(step) or (step.eager_steps, step.replays) == (4, 0)
        return losses

    with pytest.warns(CaptureWarning, match=r"sharpness: expected the first batch's values"):
        found = list(both_ways(device, Net, make_loss, run))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_rows_of_parameters_are_no_rows_of_a_batch(device):
    """The capacity for 15 graphs would be 16, which is also the width of the hidden layers: rows of
    parameters must not be taken for graphs."""
    data = [batch_of(k, seed) for seed, k in enumerate((15, 15, 15, 4))]

    def make_loss(model):
        def loss(batch):
            decay = sum(x.square().sum() for x in model.parameters())
            return F.cross_entropy(model(batch), batch.y) + 0.02 * decay

        return loss

    def run(step, model):
        return torch.stack([step(batch) for batch in data]).cpu()

    torch.testing.assert_close(*both_ways(device, Net, make_loss, run), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", [dict, Batch])
def test_a_graph_that_gets_other_tensors(device, form):
    """The step is called with one and the same object, whose tensors are replaced."""

    def make_loss(model):
        return lambda batch: graph_loss(model)(Batch(**batch) if form is dict else batch)

    def run(step, model):
        batch, losses = batch_of(8, 0).to(device), []
        if form is dict:
            batch = {name: batch[name] for name in ("x", "edge_index", "batch", "y")}
        for k in range(9):
            if k == 3:
                batch["x"] = 2 * batch["x"]
            if k == 5:
                batch["y"] = (batch["y"] + 1) % 3
            if k == 7:
                batch["edge_index"].copy_(batch["edge_index"].flip(0))
            losses.append(step(batch))
        assert not is_captured(step) or step.replays == 8
        return torch.stack(losses)

    torch.testing.assert_close(*both_ways(device, Net, make_loss, run), rtol=1e-3, atol=1e-4)


def test_forgotten_streams():
    """Autograd adds up gradients of a parameter anew; its gradient, hooks and version stay."""

    def adds_up(x):
        return x.view_as(x).grad_fn.next_functions[0][0]

    x, seen = nn.Parameter(torch.arange(3.0)), []
    x.register_post_accumulate_grad_hook(seen.append)
    loss = (2 * x).sum()
    loss.backward(retain_graph=True)
    node, version, place = adds_up(x), x._version, x.data_ptr()
    forget_streams([x, torch.ones(2)])
    assert adds_up(x) is not node
    assert (x._version, x.data_ptr(), x.tolist()) == (version, place, [0, 1, 2])
    loss.backward()  # by the node from before
    (3 * x).sum().backward()
    assert x.grad.tolist() == [7, 7, 7]
    assert len(seen) == 3
