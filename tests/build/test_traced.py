"""dfgnn.run's tracing of message passing of a script's own: numbers, what is left as written, and why."""

import contextlib
import copy
import functools
import pickle
import random

import numpy
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

import dfgnn
from dfgnn.run import compiled, indexing
from dfgnn.runtime import cuda_graphs

N, E, D = 300, 3000, 16


class Own(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.qkv, self.edge = nn.Linear(D, 3 * D), nn.Linear(4, D)
        self.seen = 0

    def forward(self, x, edge_index, attr):
        self.seen += 1
        q, k, v = self.qkv(x).view(-1, 3, 2, D // 2).unbind(1)
        e = self.edge(attr).view(-1, 2, D // 2)
        return self.propagate(edge_index, q=q, k=k, v=v, e=e).flatten(1)

    def message(self, q_i, k_j, v_j, e, index, size_i):
        score = (q_i * (k_j + e)).sum(-1)
        return self.weighted(softmax(score, index, num_nodes=size_i)).unsqueeze(-1) * (v_j + e)

    def weighted(self, weights):
        return weights


class Noisy(Own):
    def weighted(self, weights):
        return nn.functional.dropout(weights, 0.5, self.training)


class Noisier(Own):
    def weighted(self, weights):
        return nn.functional.dropout(weights, 0.5)


class NoisyCheating(Noisy):
    def weighted(self, weights):
        return super().weighted(weights) * (2 if torch.compiler.is_compiling() else 1)


class Cheating(Own):
    """Gives other numbers where it is recorded."""

    def weighted(self, weights):
        return weights * 2 if torch.compiler.is_compiling() else weights


class Failing(Own):
    def __deepcopy__(self, memo):
        raise TypeError("not to be copied")


class Sum(nn.Module):
    def forward(self, x, edge_index, attr):
        return scatter(x[edge_index[0]] * attr.sum(1, keepdim=True), edge_index[1], dim_size=len(x))


class Bare(nn.Module):
    """A softmax that is not one."""

    def forward(self, x, edge_index, attr):
        score = (attr.sum(1) * x[edge_index[0], 0]).exp()
        total = scatter(score, edge_index[1], dim_size=len(x), reduce="max") + 1
        return x * total.unsqueeze(1)


class Seeing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dense(nn.Module):
    def forward(self, x, edge_index, attr):
        return torch.softmax(x @ x.T, 1) @ x


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Own()

    def forward(self, x, edge_index, attr):
        return torch.softmax(self.inner(x, edge_index, attr), 1)


def inputs(n=N, e=E, seed=0):
    g = torch.Generator().manual_seed(seed)
    edges = torch.randint(n, (2, e), generator=g)
    return torch.randn(n, D, generator=g), edges, torch.randn(e, 4, generator=g)


@pytest.fixture
def traces(monkeypatch):
    """Modules made within are traced, as if that took half the time."""
    torch._dynamo.reset()  # which records code eight times at most
    monkeypatch.setattr(compiled, "milliseconds", lambda steps, on_gpu: [2.0, 1.0])
    monkeypatch.setattr(compiled, "milliseconds_of_gpu", lambda steps, of_host: [2.0, 1.0])
    made = compiled.Compiled("/", False).install()
    yield made
    made.remove()


def train(model, steps=4, given=inputs):
    """Results and gradients of some steps."""
    found = []
    for k in range(steps):
        x, edges, attr = given(seed=k)
        x.requires_grad_()
        model.zero_grad()
        out = model(x, edges, attr)
        out.sin().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])
    return found


def as_written(model):
    """A copy that is not traced, though its class is."""
    made = copy.deepcopy(model)
    vars(made)["_call_impl"] = functools.partial(compiled._call, made)
    return made


def outcome(traces, cls):
    (row,) = [row for row in traces.traced() if row["class"].endswith(f".{cls.__name__}")]
    return row


def test_attention_is_traced(traces):
    torch.manual_seed(0)
    model = Own()
    expected = train(as_written(model))
    torch.testing.assert_close(train(model), expected, rtol=1e-4, atol=1e-5)
    row = outcome(traces, Own)
    assert row["traced"] and row["milliseconds"] == [2.0, 1.0]
    assert [x["form"] for x in row["attention"]] == ["dot_attention, with terms of edges"]
    assert row["attention"][0]["file"] == __file__
    assert model.seen == 4  # the sample was taken of copies


@pytest.mark.gpu
def test_on_a_gpu(traces):
    model = Own().to("cuda")
    given = [x.to("cuda") for x in inputs()]
    expected = train(as_written(model), given=lambda seed: [given[0].clone(), *given[1:]])
    found = train(model, given=lambda seed: [given[0].clone(), *given[1:]])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert outcome(traces, Own)["traced"]


def test_captured_steps_are_traced(traces, monkeypatch, device):
    """Steps whose batch stays the same are traced in every run of the capture."""
    runs, rewritten = [], compiled._Trial._rewritten

    def counted(trial, graph_module, example_inputs):
        run = rewritten(trial, graph_module, example_inputs)
        return lambda *args: runs.append(1) or run(*args)

    monkeypatch.setattr(compiled._Trial, "_rewritten", counted)
    model, given = Own().to(device), [x.to(device) for x in inputs()]
    plain = as_written(model)
    optimizers = [torch.optim.SGD(x.parameters(), lr=1e-2) for x in (model, plain)]
    step = dfgnn.capture(lambda: model(*given).square().mean(), model, optimizers[0], debug=device == "cpu")
    for k in range(5):
        before = len(runs)
        optimizers[1].zero_grad()
        loss = plain(*given).square().mean()
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(), loss.detach(), rtol=1e-3, atol=1e-5)
        assert (len(runs) > before) == (device == "cpu" or k < 2)


def test_traced_in_captured_steps_alone(traces, monkeypatch):
    """A class is traced in captured steps alone if that costs the host time but saves time on the GPU."""
    monkeypatch.setattr(compiled, "milliseconds", lambda steps, on_gpu: [1.0, 2.0])
    sample = compiled._Trial._sample

    def faster_on_a_gpu(trial, *args):
        reason, trial.kept_in_graphs = sample(trial, *args), True
        return reason

    monkeypatch.setattr(compiled._Trial, "_sample", faster_on_a_gpu)
    runs, traced = [], compiled._Trial._traced
    monkeypatch.setattr(compiled._Trial, "_traced", lambda *args: runs.append(1) or traced(*args))
    model = Own()
    expected = train(as_written(model))
    for captured in (False, True, False):
        before = len(runs)
        with cuda_graphs.captured_step() if captured else contextlib.nullcontext():
            torch.testing.assert_close(train(model), expected, rtol=1e-4, atol=1e-5)
        assert len(runs) - before == (4 if captured else 0)
    row = outcome(traces, Own)
    assert not row["traced"] and row["traced_in_graphs"]


def test_sizes_that_change(traces):
    model = Own()
    sizes = [(N, E), (N, E), (N + 7, E + 50), (40, 0), (N, 5 * E), (1, 9)]
    for k, (n, e) in enumerate(sizes):
        given = inputs(n, e, k)
        want = as_written(model)(*given)
        torch.testing.assert_close(model(*given), want, rtol=1e-4, atol=1e-5)
    assert outcome(traces, Own)["traced"]


class Wide(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads, self.width, self.qkv = heads, width, nn.Linear(D, 3 * heads * width)

    def forward(self, x, edge_index, attr):
        q, k, v = self.qkv(x).view(-1, 3, self.heads, self.width).unbind(1)
        src, dst = edge_index
        weight = softmax((q[dst] * k[src]).sum(-1), dst, num_nodes=len(x))
        return torch.zeros_like(v).index_add(0, dst, weight.unsqueeze(-1) * v[src])


@pytest.mark.slow
def test_many_instances_and_sizes(traces, monkeypatch, caplog):
    *models, late = [Wide(1 + k % 3, 4 + k) for k in range(11)]
    sizes = [(N, 6000), (N + 9, 6009), (N - 7, 6500)]

    def compare(k, n, e):
        given = inputs(n, e, k)
        for model in models:
            torch.testing.assert_close(model(*given), as_written(model)(*given), rtol=1e-4, atol=1e-5)

    compare(0, *sizes[0])
    compare(1, *sizes[1])
    assert outcome(traces, Wide)["traced"]
    recorded = len(traces.trials[Wide][0].reports)
    compare(2, *sizes[2])
    assert len(traces.trials[Wide][0].reports) == recorded <= 20  # sizes are symbols from the second on
    monkeypatch.setattr(compiled, "_RECORDS", recorded - 1)
    models[:] = [late]
    compare(2, *sizes[0])
    assert outcome(traces, Wide)["reason"] == "calls of other sizes or settings are recorded anew"
    assert not any("recompile_limit" in record.getMessage() for record in caplog.records)


def test_outside_of_training_it_is_as_written(traces):
    model = Own()
    train(model)
    with torch.no_grad():
        assert torch.equal(model(*inputs()), as_written(model)(*inputs()))
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again(*inputs()), as_written(model)(*inputs()), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        outer = torch.compile(nn.Sequential(nn.Identity()).append(model)[1], backend="eager")
        torch.testing.assert_close(outer(*inputs()), model(*inputs()))


def test_recordings_and_transforms_see_modules_as_written(traces):
    model, given = Sum(), inputs()
    torch.jit.trace(model, given)
    torch.compile(model, backend="eager")(*given)
    torch.func.vjp(lambda x: model(x, *given[1:]), given[0])
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), Seeing():
        model(*given)
    assert traces.traced() == []
    model(*given)
    assert outcome(traces, Sum)["reason"] == "it computes no softmax"


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Cheating, "traced it gives other numbers"),
        (NoisyCheating, "traced it gives other numbers"),
        (Noisier, "it draws random numbers in eval mode, too: results cannot be compared"),
        (Failing, "TypeError: not to be copied"),
        (Sum, "it computes no softmax"),
        (Outer, "it holds other modules that pass messages"),
    ],
)
def test_what_is_left_as_written(traces, cls, reason):
    model = cls()
    plain = model if cls is Failing else as_written(model)
    for k in range(4):
        torch.manual_seed(k)
        out = model(*inputs(seed=k))
        torch.manual_seed(k)
        torch.testing.assert_close(out, plain(*inputs(seed=k)), rtol=1e-4, atol=1e-5)
    row = outcome(traces, cls)
    assert not row["traced"] and row["reason"] == reason and row["attention"] == []
    assert "_call_impl" not in vars(cls)  # nothing is left in its way


def test_what_is_not_recognised_or_small_or_slower(traces, monkeypatch):
    model = Bare()
    train_of = [model(*inputs()).detach() for _ in range(3)]
    assert torch.equal(train_of[0], train_of[2])
    monkeypatch.setattr(compiled, "milliseconds", lambda steps, on_gpu: [1.0, 0.99])
    slower = Own()
    train(slower)
    assert outcome(traces, Own)["reason"] == "traced it is not faster"
    monkeypatch.setattr(compiled, "_SECONDS", 0)
    long = Noisy()
    train(long)
    assert outcome(traces, Noisy)["reason"] == "TimeoutError: samples take more than 0 s"
    small = Own()  # made after the sample: another one is taken
    train(small, given=lambda seed: inputs(9, 20, seed))
    assert [x["reason"] for x in traces.traced() if x["class"].endswith(".Own")] == [
        "traced it is not faster",
        "its arguments are small",
    ]


def test_dense_attention_is_not_looked_at(traces, monkeypatch):
    model = Dense()
    model(inputs()[0], None, 3)
    assert outcome(traces, Dense)["reason"] == "there is no index among its arguments"
    monkeypatch.setattr(compiled, "_MOST", 100)
    large = Own()
    train(large)
    assert outcome(traces, Own)["reason"] == "copies of it would be large"


def test_where_pytorch_cannot_record(traces, monkeypatch):
    def refuses(*args, **kwargs):
        raise RuntimeError("Dynamo is not supported on Python 9.9")

    monkeypatch.setattr(torch, "compile", refuses)
    model = Own()
    torch.testing.assert_close(train(model), train(as_written(model)), rtol=0, atol=0)
    assert outcome(traces, Own)["reason"] == "RuntimeError: Dynamo is not supported on Python 9.9"


def test_random_numbers_stay(traces, monkeypatch):
    """The script draws the same random numbers whether a sample is taken or not."""
    monkeypatch.setattr(compiled, "milliseconds", lambda steps, on_gpu: [1.0, 1.0])
    model = Noisy()
    plain = as_written(model)
    found = []
    for one in (model, plain):
        torch.manual_seed(3)
        random.seed(3)
        found.append([*train(one), torch.rand(3), random.random()])
    assert outcome(traces, Noisy)["reason"] == "traced it is not faster"
    torch.testing.assert_close(*found, rtol=0, atol=0)


class Drawing(Own):
    def weighted(self, weights):
        return weights * torch.rand(weights.shape, generator=GENERATOR)


GENERATOR = torch.Generator()


def test_generators_of_the_script_are_not_advanced(traces):
    train(Drawing(), steps=1)
    drawn = GENERATOR.get_state()
    GENERATOR.manual_seed(GENERATOR.initial_seed())
    train(as_written(Drawing()), steps=1)
    assert torch.equal(drawn, GENERATOR.get_state())
    assert outcome(traces, Drawing)["reason"].startswith("it draws from a random generator of its own")


class OfNumpy(Own):
    def forward(self, x, edge_index, attr):
        if self.training:
            x = x * torch.from_numpy(numpy.random.rand(len(x), 1)).float()  # noqa: NPY002
        return super().forward(x, edge_index, attr)


def test_numbers_of_numpy_are_its_own(traces, monkeypatch):
    monkeypatch.setattr(compiled, "agree", lambda a, b: True)  # the sample draws others
    model = OfNumpy()
    plain, found = as_written(model), []
    for one in (model, plain):
        numpy.random.seed(0)  # noqa: NPY002
        found.append([*train(one), torch.tensor(numpy.random.rand())])  # noqa: NPY002
    assert outcome(traces, OfNumpy)["traced"]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_run_as_written(traces, reentrant):
    """Both forward passes of a checkpoint draw the same numbers, and save the same tensors."""
    model, given = Noisy(), inputs()
    for k in range(3):
        if k == 2:
            train(model, steps=1)  # it is traced from here on
        x = given[0].requires_grad_()
        found = []
        for one in (model, as_written(model)):
            torch.manual_seed(k)
            one.zero_grad()
            checkpoint(one, x, *given[1:], use_reentrant=reentrant).sin().sum().backward()
            found.append([p.grad for p in one.parameters()])
        torch.testing.assert_close(*found, rtol=0, atol=0)
    assert outcome(traces, Noisy)["traced"]


def test_hooks_of_parts_are_called_when_they_come_later(traces):
    model, seen = Own(), []
    train(model, steps=2)
    handles = [
        model.qkv.register_forward_hook(lambda *_: seen.append("forward")),
        model.qkv.register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    train(model, steps=1)
    assert seen == ["forward", "backward"]
    for handle in handles:
        handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda part, *_: seen.append(type(part)))
    try:
        train(model, steps=1)
    finally:
        handle.remove()
    assert nn.Linear in seen and Own in seen
    assert outcome(traces, Own)["traced"]


def test_what_fails_when_traced_runs_as_written(traces):
    model = Wide(2, 4)
    x, edges, attr = inputs(N, 6000)
    model(x, edges, attr)
    assert outcome(traces, Wide)["traced"]
    padded = edges.clone()
    padded[0, -100:] = -1  # the last node's row
    torch.testing.assert_close(model(x, padded, attr), as_written(model)(x, padded, attr), rtol=0, atol=0)
    assert outcome(traces, Wide)["reason"].startswith("ValueError: Graph.from_pyg: edge_index[0]")
    other = Wide(2, 4)
    other(x, edges, attr)
    with pytest.raises(IndexError):
        other(x[:100], edges, attr)


def test_settings_of_the_compiler_are_put_back(traces):
    config = torch._dynamo.config
    before = config.recompile_limit, config.capture_scalar_outputs, config.trace_numpy
    train(Own(), steps=1)
    assert before == (config.recompile_limit, config.capture_scalar_outputs, config.trace_numpy)


# ---- rows by an index -------------------------------------------------------------------------------------


def compare(x, index):
    """Rows, and gradients in float64, by the function and by PyTorch's operation."""
    rows = indexing.rows(x, index)
    assert torch.equal(rows, x[index])
    for grad in (torch.randn_like(rows), torch.randn_like(rows[:1]).expand_as(rows)):
        (got,) = torch.autograd.grad(rows, x, grad, retain_graph=True)
        exact = torch.zeros_like(x, dtype=torch.float64)
        exact.index_put_((index,), grad.double(), accumulate=True)
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("shape", [(50, 33), (7, 3, 11), (900, 300), (1, 64)])
def test_rows(dtype, shape):
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    if dtype != torch.float16:
        compare(x, torch.randint(shape[0], (4000,)))
        compare(x, torch.randint(-shape[0], shape[0], (8000,))[::2])
    with pytest.raises(IndexError, match=f"index {shape[0]} is out of bounds for dimension 0"):
        indexing.rows(x, torch.full((4000,), shape[0]))
