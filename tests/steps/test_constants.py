"""Steps of a batch that stays the same, in which shapes and numbers depend on values: those that come of
constants are known from the first runs; all others must vary as they do in plain training."""

import copy
import ctypes
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain_training import both_ways, plain_step
from torch import nn
from torch.utils.checkpoint import checkpoint

import dfgnn
import dfgnn.functional as DF
from dfgnn.capturing.constants import Constants
from dfgnn.runtime import torch_internals as internals

N, E = 40, 160


class Step(nn.Module):
    """A model with all that a step can depend on, and the tensors that it reads."""

    def __init__(self, device):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.double().to(device)
        self.x = torch.randn(N, 4, generator=generator).double().to(device)
        self.edges = torch.randint(N - 3, (2, E), generator=generator).to(device)
        self.mask = (torch.arange(N) % 3 == 0).to(device)
        self.batch = torch.arange(N, device=device) // 11
        self.counts = torch.tensor([1, 0, 4, 2], device=device)
        self.kinds = torch.arange(E, device=device) % 4
        self.register_buffer("ids", torch.arange(N, device=device) % 5)
        self.counter = torch.zeros(1, dtype=torch.long, device=device)
        self.scratch = torch.zeros(N, dtype=torch.float64, device=device)
        self.calls = 0

    def forward(self, x=None):
        return self.second(self.norm(self.first(self.x if x is None else x)).relu())

    def messages(self, edges, num_nodes=N):
        h = self()
        out = h.new_zeros(num_nodes, h.shape[1])
        return out.index_add(0, edges[1], h[edges[0]])


# ---- values that are constant ----------------------------------------------------------------------------


def largest(s):
    rows = int(s.edges.max()) + 1, int(s.edges[1].max()) + 1
    return s.messages(s.edges)[: min(rows)]


def computed_masks(s):
    near = s.x.square().sum(1) < 3
    return s()[near & s.mask], s()[~near].sum(0), s()[s.ids > 2]


def masked_writes(s):
    """torchmd-net's normalisation of the edges that are no loops."""
    mask = s.edges[0] != s.edges[1]
    vector = s()[s.edges[0]] - s()[s.edges[1]] + 1
    vector[mask] = vector[mask] / vector[mask].norm(dim=1, keepdim=True)
    return vector


def masks_of_two_dimensions(s):
    pairs = s.batch[:, None] == s.batch
    out = s()
    return (out @ out.t())[pairs], out.masked_select(s.mask[:, None]), (out @ out.t()).masked_select(pairs)


def padded(s):
    dense = pytest.importorskip("torch_geometric.utils").to_dense_batch
    out, mask = dense(s(), s.batch)
    return out[mask], out.sum(1)


def unique(s):
    ends, place, counts = s.edges.flatten().unique(return_inverse=True, return_counts=True)
    return s()[ends] / counts[:, None], s()[s.edges.t().unique(dim=0)[:, 0]], place.reshape(2, -1).sum(0)


def repeated(s):
    rows = torch.repeat_interleave(torch.arange(4, device=s.x.device), s.counts)
    return (
        s()[rows],
        s()[:4].repeat_interleave(s.counts, 0),
        *s()[: int(s.counts.sum())].split(s.counts.tolist()),
    )


def branches(s):
    in_order = bool((s.kinds[1:] >= s.kinds[:-1]).all())
    return s() if in_order or torch.equal(s.kinds, s.edges[0]) else 2 * s() * torch.bincount(s.batch).max()


def from_the_host(s):
    """qagnn's and GraphMVP's tensors, which are made on the host and filled in on the device."""
    device = s.x.device
    one_hot = torch.FloatTensor(N, 5).zero_().to(device).scatter_(1, s.ids.view(-1, 1), 1)
    kinds = torch.zeros(N).to(s.edges)
    kinds[s.mask] = 2
    weights = torch.tensor([0.5, 2, 1], dtype=torch.float64).to(device)
    filled = torch.empty(3, dtype=torch.float64, device=device).copy_(torch.tensor([1.0, 2, 3]))
    return (
        s() * one_hot[:, :3].double() * weights,
        s() * kinds[:, None],
        s() * filled,
        F.one_hot(s.ids) * s().sum(),
    )


def written_by_constants(s):
    degree = torch.zeros(N, dtype=torch.long, device=s.x.device)
    degree.index_add_(0, s.edges[1], torch.ones_like(s.edges[1]))
    used = degree > 0
    degree[used] += 1
    return s()[used] / degree[used][:, None], s()[degree == 0]


def copies_that_are_written_to(s):
    first, second = s.ids.clone(), s.ids.clone()
    first += 1
    first[s.mask] = 0
    second[0] = 3
    third = s.ids + s.batch
    view = third[3:]
    view.mul_(2)
    return s()[first], s()[second], s()[third % N], s()[s.ids.clone()]


def written_before_it_is_read(s):
    s.scratch.zero_()
    s.scratch.index_add_(0, s.edges[1], torch.ones(E, dtype=torch.float64, device=s.x.device))
    return s()[s.scratch > 3]


def edges_that_the_step_makes(s):
    edges = torch.stack([s.edges[0], s.edges[1].roll(3)])
    edges = edges[:, edges[0] != edges[1]]
    weight = torch.ones(edges.shape[1], dtype=torch.float64, device=s.x.device)
    return s.messages(edges), DF.spmm(edges, weight, s()[:, None])


def copied_objects(s):
    """DySAT copies its graphs in each step."""
    kept = copy.deepcopy({"edges": s.edges, "batch": s.batch})
    kept["batch"] += 1
    return s.messages(kept["edges"], int(kept["edges"].max()) + 1), s()[: int(kept["batch"].max())]


def under_checkpoints(s):
    def part(x):
        return s.second(s.first(x)[x[:, 0] > 0])

    return checkpoint(part, s.x, use_reentrant=False), checkpoint(
        part, s.x.clone().requires_grad_(), use_reentrant=True
    )


class Selected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask):
        ctx.save_for_backward(mask)
        return x[mask]

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        out = grad.new_zeros(len(mask), grad.shape[1])
        out[mask] = grad * int(mask.sum())
        return out, None


def of_autograds_own(s):
    out = s()
    out.register_hook(lambda grad: grad * int(s.edges.max()))
    return Selected.apply(out, s.x[:, 1] > 0)


def under_no_grad(s):
    with torch.no_grad():
        far = (s.x[s.edges[0]] - s.x[s.edges[1]]).norm(dim=1) > 1.5
    with torch.inference_mode():
        rows = int(s.edges[0].max()) + 1
    return s.messages(s.edges[:, far]), s()[:rows]


def forces(s):
    x = s.x.clone().requires_grad_()
    near = (x[s.edges[0]] - x[s.edges[1]]).detach().norm(dim=1) < 3
    energy = s(x)[s.edges[0, near]].square().sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


CONSTANT = [
    largest, computed_masks, masked_writes, masks_of_two_dimensions, padded, unique, repeated, branches,
    from_the_host, written_by_constants, copies_that_are_written_to, written_before_it_is_read,
    edges_that_the_step_makes, copied_objects, under_checkpoints, of_autograds_own, under_no_grad, forces,
]  # fmt: skip


def trained(part, device, captured, steps=8, before=lambda k, model: None):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = Step(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.125, momentum=0.875)

    def loss_fn():
        model.calls += 1
        parts = part(model)
        parts = parts if isinstance(parts, tuple) else (parts,)
        return sum(x.double().square().sum() for x in parts).log1p()

    step = (
        dfgnn.capture(loss_fn, model, optimizer, debug=device == "cpu")
        if captured
        else plain_step(loss_fn, optimizer)
    )
    losses = []
    for k in range(steps):
        before(k, model)
        losses.append(step())
    waited = next(iter(step._same.values()))[1]._constants.waited if captured else ""
    return torch.stack(losses), waited, step


def compared(part, device, tolerance=1e-9, **options):
    """The losses of captured steps, which are those of plain ones, what waited, and the step."""
    want, _, _ = trained(part, device, captured=False, **options)
    got, waited, step = trained(part, device, captured=True, **options)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    return got, waited, step


@pytest.mark.parametrize("part", CONSTANT)
def test_what_is_constant_is_known(device, part):
    _, waited, step = compared(part, device)
    assert not waited and (step.eager_steps, step.replays) == (1, 7)


# ---- values that vary ------------------------------------------------------------------------------------


def by_a_parameter(s):
    return s()[s.first(s.x)[:, 0] > 0]


def by_a_parameter_in_place(s):
    mask = s.mask.clone()
    mask.logical_or_(s.first(s.x)[:, 1] > 0)
    return s()[mask], s()


def by_a_view_of_it(s):
    score = torch.zeros(N, 2, dtype=torch.float64, device=s.x.device)
    score[:, 1] = s().detach()[:, 0]
    return s()[score[:, 1] > 0], s()


def by_dropout(s):
    return s()[F.dropout(s.x[:, 0], 0.5) != 0]


def by_random_numbers(s):
    return s()[torch.rand(N, device=s.x.device) > 0.5]


def by_running_statistics(s):
    out = s()
    return out[s.norm.running_mean.repeat(7)[:N] > 0.02]


def by_a_counter_that_is_written_later(s):
    rows = int(s.counter) + 1
    out = s()[:rows]
    s.counter.add_(1)
    return out


def by_a_view_of_a_counter(s):
    mask = torch.arange(N, device=s.x.device) < s.counter
    out = s()[mask | s.mask]
    s.counter.view(-1)[0].add_(1)
    return out


def by_out(s):
    rows = int(s.counter.sum()) + 1
    torch.add(s.counter, 1, out=s.counter)
    return s()[:rows]


def by_another_memory(s):
    rows = int(s.counter.sum()) + 1
    new = s.counter + 1
    s.counter.set_(new)
    return s()[:rows]


def by_more_memory(s):
    rows = torch.zeros(2, dtype=torch.long, device=s.x.device)
    rows.resize_(4)
    rows[2:] = (s().detach()[:2, 0] * 10).long().abs()
    return s()[: int(rows.sum()) % N + 1]


def by_the_loss(s):
    loss = s().square().mean()
    return loss * int(loss * 1000)


def by_pythons_random_numbers(s):
    return s()[torch.tensor([random.randrange(2) for _ in range(N)], device=s.x.device) > 0]


def by_numpys_random_numbers(s):
    return s()[torch.from_numpy(np.random.rand(N)).to(s.x.device) > 0.5]  # noqa: NPY002


def by_calls(s):
    return s()[torch.tensor([s.calls] * N, device=s.x.device) % 7 > s.ids]


VARIABLE = {
    by_a_parameter: "a parameter", by_a_parameter_in_place: "a parameter", by_a_view_of_it: "a parameter",
    by_dropout: "random", by_random_numbers: "random", by_running_statistics: "a parameter, a buffer",
    by_a_counter_that_is_written_later: "writes to", by_a_view_of_a_counter: "writes to",
    by_out: "writes to", by_another_memory: "writes to|not see|new in", by_more_memory: "resize_",
    by_the_loss: "a parameter", by_pythons_random_numbers: "", by_numpys_random_numbers: "", by_calls: "",
}  # fmt: skip


@pytest.mark.parametrize("part", VARIABLE)
def test_what_varies_is_not_known(part):
    """On the CPU a captured step computes what a plain one does, and says what would wait for a GPU."""
    got, waited, _ = compared(part, "cpu", tolerance=0)
    assert len(set(got.tolist())) == len(got)
    assert __file__ in waited, waited
    assert re.search(VARIABLE[part], waited), waited


@pytest.mark.gpu
@pytest.mark.parametrize("part", VARIABLE)
def test_what_varies_is_an_error_on_a_gpu(part):
    with pytest.raises(RuntimeError, match="the step waits for the device") as error:
        trained(part, "cuda", captured=True)
    assert re.search(VARIABLE[part], str(error.value)) and __file__ in str(error.value)


# ---- what is modified from outside -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["edges", "mask", "ids", "x"])
def test_a_tensor_that_is_modified_between_steps_is_read_again(device, name):
    """A leaf that is no part of the batch, a buffer among them."""

    def part(s):
        return s()[s.mask & (s.ids < int(s.edges.max()) - 32)][: int((s.x[:, 0] > 0).sum())]

    def before(k, model):
        if k in (1, 4, 6):
            tensor = getattr(model, name)
            tensor.copy_(
                tensor.flip(0) if tensor.dim() == 1 else (tensor * (1 + k) / 2).to(tensor.dtype) % 36
            )

    got, waited, _ = compared(part, device, before=before)
    assert not waited and len(set(got.tolist())) == len(got)


def test_a_teacher_that_is_updated_between_steps_is_captured_twice(device):
    """Labels of its own are integers that come of tensors that exist before the step."""

    def part(s):
        labels = (s.x @ s.teacher).argmax(1)
        return F.cross_entropy(s(), labels), s()[s.mask]

    def before(k, model):
        model.teacher = getattr(model, "teacher", torch.eye(4, 3, dtype=torch.float64, device=device))
        model.teacher.add_(model.first.weight.detach()[:4].t()[:, :3], alpha=0.2)

    _, _, step = compared(part, device, steps=12, before=before)
    assert step.captures == (2 if device == "cuda" else 0)


def test_batches_have_their_own_constants(device):
    """Other tensors in the same object."""

    def replace(batch, seed):
        generator = torch.Generator().manual_seed(seed)
        batch["x"] = torch.randn(20, 4, generator=generator).to(device)
        batch["edge_index"] = torch.randint(20, (2, 90), generator=generator).to(device)

    def make_loss(model):
        def loss(b):
            edges = b["edge_index"][:, b["edge_index"][0] != b["edge_index"][1]]
            return model(b["x"])[edges.flatten().unique()].square().sum().log1p()

        return loss

    def run(step, model):
        batch, losses = {}, []
        for k in range(12):
            if k % 4 == 0:
                replace(batch, k)
            losses.append(step(batch))
        return torch.stack(losses)

    torch.testing.assert_close(*both_ways(device, lambda: nn.Linear(4, 3), make_loss, run))


def test_writes_that_pytorch_does_not_see():
    """NumPy writes to memory of tensors that the step makes, and that exist before."""
    kept = torch.zeros(N, dtype=torch.long)

    def part(s):
        made, empty = torch.zeros(N, dtype=torch.long), torch.empty(N, dtype=torch.long)
        values = (s().detach()[:, 0] > 0).long()
        for x in (made, empty, kept):
            np.copyto(_as_numpy(x), _as_numpy(values))
        return s()[made > 0], s()[empty > 0], s()[kept.bool()], s()

    _, waited, _ = compared(part, "cpu", tolerance=0)
    assert "PyTorch does not see|not the same|new" and waited


def test_a_host_tensor_that_is_written_after_use(monkeypatch):
    """Such a tensor is a stored result, also where it is identified by its numbers."""

    def part(s):
        first, second = s.ids.clone(), s.ids.clone()
        both = first + second
        first[3:].zero_()
        return s()[first], s()[second], s()[both % N]

    _on_host(monkeypatch)
    compared(part, "cpu", tolerance=0)


def _on_host(monkeypatch):
    """Runs as if the step were on a GPU and its tensors on the host."""
    started = Constants.__init__
    monkeypatch.setattr(
        Constants, "__init__", lambda self, device, *args: started(self, torch.device("cuda"), *args)
    )


def written_by_compiled_code(s):
    """Which no mode sees, behind the last use that it sees."""
    kinds = s.ids + 1
    with internals.disable_current_modes():
        kinds.add_(1)
    return s()[kinds]


def test_results_that_are_written_to_unseen_are_not_kept(device):
    compared(written_by_compiled_code, device)


def test_tensors_on_the_host(monkeypatch):
    """As on a GPU, tensors on the host are identified by their numbers, also where NumPy writes to them
    between steps."""
    _on_host(monkeypatch)
    kept = torch.arange(N)

    def part(s):
        return s()[kept.to(torch.int32) > 5][: int(torch.tensor([3, 9]).max())], s()[torch.tensor([1, 5])]

    def before(k, model):
        if k in (0, 5, 8):
            np.copyto(_as_numpy(kept), np.roll(np.arange(N), k))

    _, waited, _ = compared(part, "cpu", tolerance=0, steps=12, before=before)
    assert not waited


def _as_numpy(x):
    array = (ctypes.c_long * x.numel()).from_address(x.data_ptr())
    return np.ctypeslib.as_array(array)
