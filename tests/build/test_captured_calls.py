"""dfgnn.run's CUDA graphs: replayed calls give what the script gives, and what changes runs as written."""

import copy
import gc
import io
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from captured_models import D, Model, N, capturing, installed, problem, replayed, trained
from covering import exhaustive
from torch import nn
from torch_geometric.data import Data, HeteroData

from dfgnn.run import captured, gains


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.fixture
def how(device, monkeypatch):
    return capturing(device, monkeypatch)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}, {"norm": True}], ids=str)
def test_replayed(device, how, options):
    """Steps are those of the script, dropout and running statistics included, also with other features."""
    model, x, edge_index = problem(device, **options)
    features = [x, x, x, x, x, x + 1, x - 1, x]

    def calls(step, model):
        return features[step], edge_index

    same(trained(model, 8, calls, how), trained(model, 8, calls))
    assert replayed(how) == 5, str(how.rows())


class OfObject(Model):
    """Takes an object that holds tensors, assigns to it, and returns it and one of them."""

    def forward(self, data, scale=1.0):
        found = super().forward(data.x, data.edge_index, scale)
        data.hidden = found["hidden"]
        if hasattr(data, "stores"):
            data.x = found["out"] + data.weight
        return data, data.weight, found["out"].mean()


def of_data(x, edge_index, weight):
    return Data(x=x, edge_index=edge_index, weight=weight)


def of_namespace(x, edge_index, weight):
    return SimpleNamespace(x=x, edge_index=edge_index, weight=weight)


def of_types(x, edge_index, weight):
    data = HeteroData()
    data["node"].x, data["node"].weight = x, weight
    data["node", "to", "node"].edge_index = edge_index
    return data


class OfTypes(Model):
    def forward(self, data):
        found = super().forward(data["node"].x, data["node", "to", "node"].edge_index)
        data["node"].hidden = found["hidden"]
        return data, data["node"].weight, found["out"].mean()


@pytest.mark.parametrize("make", [of_data, of_namespace, of_types], ids=lambda f: f.__name__)
def test_objects_that_hold_tensors(device, how, make):
    """Made anew for each call, with other numbers and equal edges; what the call assigns to them is there."""
    model, x, edge_index = problem(device, model=(OfTypes if make is of_types else OfObject)())
    found = []
    for one, way in ((copy.deepcopy(model), how), (model, None)):
        with installed(way):
            for k in range(9):
                edges = edge_index.clone() if k != 6 else edge_index.flip(0)
                weight = torch.full_like(x, float(k), requires_grad=True)
                given = make(x + k, edges, weight)
                data, returned, loss = one(given)
                assert data is given
                assert returned is weight
                hidden = data["node"].hidden if make is of_types else data.hidden
                (loss + hidden.square().mean() + (returned * getattr(data, "x", x)).mean()).backward()
                found.append([loss.detach(), hidden.detach(), weight.grad])
        found[-1] += [p.grad for p in one.parameters()]
    same(found[:9], found[9:])
    assert replayed(how) >= 5, str(how.rows())


def test_a_held_argument_that_is_modified(device, how):
    """What the CUDA graph has made of its edges is not taken for those that they have become."""
    model, x, edge_index = problem(device)

    def run(way=None):
        edges = edge_index.clone()
        others = edge_index.flip(0).contiguous()

        def calls(step, model):
            if step == 5:
                edges.copy_(others)
            return x, edges if step < 5 else others.clone()

        return trained(model, 7, calls, way)

    same(run(how), run())
    assert replayed(how) == 3, str(how.rows())


class Filling(Model):
    """Fills a dict among its arguments."""

    def forward(self, x, edges):
        found = super().forward(x, edges["edge_index"])
        edges["hidden"] = found["hidden"]
        return found


def test_containers_that_a_call_changes(device, how):
    model, x, edge_index = problem(device, model=Filling())
    with installed(how):
        for _ in range(6):
            edges = {"edge_index": edge_index}
            model(x, edges)["out"].sum().backward()
            assert "hidden" in edges
    assert replayed(how) == 3, str(how.rows())


def doubled(module, args, out):
    return out * 2


def with_other_data(parameter):
    parameter.data = parameter.data.clone() * 2


def with_doubled_results(model):
    forward = model.forward
    model.forward = lambda *args: {name: y * 2 for name, y in forward(*args).items()}


# What a script does before its sixth step.
CHANGES = {
    "modified edges": lambda model, edges: edges.copy_(edges.flip(1).roll(1, 0)),
    "frozen": lambda model, edges: model.own.lin.weight.requires_grad_(False),
    "other parameter": lambda model, edges: with_other_data(model.own.lin.weight),
    "in eval mode": lambda model, edges: model.eval(),
    "hook": lambda model, edges: model.own.register_forward_hook(doubled),
    "message hook": lambda model, edges: model.own.register_message_forward_hook(doubled),
    "other forward": lambda model, edges: with_doubled_results(model),
    "other share": lambda model, edges: setattr(model.dropout, "p", 0.1),
}
# The arguments that it gives from then on.
ARGUMENTS = {
    "other edges": lambda x, edges: (x, edges.roll(3, 0)),
    "other number": lambda x, edges: (x, edges, 2.0),
    "other shape": lambda x, edges: (x[: N // 2], edges % (N // 2)),
}


@pytest.mark.parametrize("change", [*CHANGES, *ARGUMENTS, "attribute"])
def test_what_changes_runs_as_written(device, how, change):
    model, x, edge_index = problem(device, dropout=0.5)

    def run(way=None):
        edges = edge_index.clone()

        def calls(step, model):
            if step == 5 and change in CHANGES:
                CHANGES[change](model, edges)
            if step >= 5 and change == "attribute":  # another number at each step
                model.own.scale = float(step)
            if change in ARGUMENTS and step >= 5:
                return ARGUMENTS[change](x, edges)
            return (x, edges, 1.0) if change == "other number" else (x, edges)

        return trained(model, 7, calls, way)

    same(run(how), run())
    assert replayed(how) >= 1, str(how.rows())


def counting(module):
    module.count = getattr(module, "count", 0) + 1
    return 1.0


def drawing(module):
    return random.random()


def of_values(module):
    return 2.0 if bool(module.own.lin.weight.sum() > 1e9) else 1.0


def of_another_tensor(module):
    return module.others[0]


# How many of seven calls are replayed, and why not all.
ODD = {
    counting: (0, ""),  # each call differs
    drawing: (0, "random numbers on the host"),
    of_values: (4, ""),  # the graph behind them
    of_another_tensor: (4, ""),
}


@pytest.mark.parametrize("change", ODD, ids=lambda f: f.__name__)
def test_odd_forwards(device, how, change):
    """What they do besides happens as often, and what a sample did is undone."""

    class Changing(Model):
        def forward(self, x, edge_index):
            return super().forward(x, edge_index, change(self))

    torch.manual_seed(0)
    model, x, edge_index = problem(device, model=Changing())
    other = torch.ones((), dtype=torch.float64, device=device, requires_grad=True)

    def calls(step, model):
        model.__dict__["others"] = [other]  # unseen by torch and by the key
        return x, edge_index

    counts = []
    for way in (how, None):
        random.seed(1)
        other.grad = None
        counts.append((trained(model, 7, calls, way), other.grad, random.random()))
    same(counts[0][0], counts[1][0])
    torch.testing.assert_close(counts[0][1], counts[1][1])  # sums of a GPU differ in the last bits
    assert counts[0][2] == counts[1][2]
    times, reason = ODD[change]
    assert replayed(how) == times, str(how.rows())
    assert reason in how.rows()[0]["reason"]


def test_calls_whose_gradients_wait(device, how):
    """A second call before the first one's backward runs as written; a result that is dropped does not stop
    replays; results are the script's own."""
    model, x, edge_index = problem(device)
    twin = copy.deepcopy(model)
    with installed(how):
        for _ in range(5):
            sum(y.sum() for y in model(x, edge_index).values()).backward()
        model.zero_grad()
        first = model(x, edge_index)["out"]
        kept = first.detach().clone()
        second = model(x + 1, edge_index)["out"]
        (first.square().sum() + second.sum()).backward()
        before = replayed(how)
        out = model(x, edge_index)["out"]
        torch.testing.assert_close(first, kept)
        out.detach().add_(1)
        del out
        gc.collect()
        model(x, edge_index)
        assert replayed(how) == before + 2
    (twin(x, edge_index)["out"].square().sum() + twin(x + 1, edge_index)["out"].sum()).backward()
    same(*([p.grad for p in one.parameters()] for one in (model, twin)))


def test_gradients_add_up(device, how):
    """Gradients that are kept over steps, and those of arguments."""
    model, x, edge_index = problem(device)
    twin, grads = copy.deepcopy(model), []
    for one, way in ((model, how), (twin, None)):
        first = nn.Linear(D, D, dtype=torch.float64).to(device)
        with torch.no_grad():
            first.weight.copy_(torch.eye(D))
            first.bias.zero_()
        with installed(way):
            for _ in range(7):
                sum(y.square().sum() for y in one(first(x), edge_index).values()).backward()
        grads.append([p.grad for p in (*one.parameters(), *first.parameters())])
    same(*grads)
    assert replayed(how) == 4, str(how.rows())


def test_results_without_a_gradient(device, how):
    """A parameter to which no loss leads has no gradient, instead of one of zeros."""
    model, x, edge_index = problem(device)
    with installed(how):
        for name in ["out", "out", "out", "out", "hidden", "out"]:
            model.zero_grad()
            model(x, edge_index)[name].sum().backward()
            assert (model.own.lin.weight.grad is None) == (name == "hidden")
            assert model.conv.lin.weight.grad is not None
    assert replayed(how) == 2, str(how.rows())
    assert "from other results than before" in how.rows()[0]["reason"]


def test_results_that_get_no_gradient_at_first(device, how):
    """Backward does not run through them; when one has a gradient all the same, it does."""
    model, x, edge_index = problem(device)
    twin, found = copy.deepcopy(model), []
    for one, way in ((model, how), (twin, None)):
        with installed(way):
            for k in range(8):
                one.zero_grad()
                out = one(x, edge_index)
                (out["hidden"].sum() + (0.0 if k < 6 else out["out"].square().sum())).backward()
                if way:
                    assert (one.own.lin.weight.grad is None) == (k < 6)
                found.append([p.grad for p in one.parameters()])
    same(found[:8], found[8:])
    assert replayed(how) == 4, str(how.rows())
    assert "from other results than before" in how.rows()[0]["reason"]


def penalty(out, x):
    """A gradient penalty."""
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (grad.square().sum() + out.sum()).backward()


def twice(out, x):
    """Two results, each with a backward pass of its own."""
    out.square().sum().backward(retain_graph=True)
    out.sum().backward()


@pytest.mark.parametrize("how_often", [penalty, twice])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_more_than_one_backward(device, how, how_often, dropout):
    """Is computed by the call as written, with the random numbers that the replay has drawn; no call is
    replayed afterwards."""
    model, x, edge_index = problem(device, dropout=dropout, norm=True)
    x.requires_grad_()
    found = []
    for one, way in ((copy.deepcopy(model), how), (model, None)):
        x.grad = None
        with installed(way):
            for k in range(9):
                torch.manual_seed(k)
                out = one(x, edge_index)["out"]
                out.sum().backward() if k < 5 else how_often(out, x)
                torch.rand(1, device=device)
        found.append([p.grad for p in (x, *one.parameters())] + list(one.buffers()))
    same(*found)
    assert replayed(how) == 3, str(how.rows())


@pytest.mark.parametrize("holder", ["nothing", "bound_method", "attribute", "closure"])
def test_a_model_that_is_dropped(device, how, holder):
    """Nothing holds its parameters, also where it holds itself."""
    model, x, edge_index = problem(device)
    if holder == "bound_method":
        model.read = model.train
    elif holder == "attribute":
        model.__dict__["trainer"] = SimpleNamespace(model=model)
    elif holder == "closure":
        forward = model.forward
        model.forward = lambda *args: forward(*args)
    weight = weakref.ref(model.own.lin.weight)
    with installed(how):
        for _ in range(6):
            model(x, edge_index)["out"].sum().backward()
    assert replayed(how) == 3, str(how.rows())
    del model
    forward = None
    gc.unfreeze()
    gc.collect()
    assert weight() is None
    assert replayed(how) == 3


def test_a_saved_model_has_nothing_of_it(device, how):
    model, x, edge_index = problem(device)
    with installed(how):
        for _ in range(6):
            model(x, edge_index)["out"].sum().backward()
        buffer = io.BytesIO()
        torch.save(model, buffer)
        twin = copy.deepcopy(model)
        twin(x, edge_index)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    torch.testing.assert_close(loaded(x, edge_index), model(x, edge_index))
    assert not any(isinstance(x, captured.Calls) for m in (loaded, twin, model) for x in vars(m).values())


def test_a_part_that_comes_later(device, how):
    """Changes of attributes are seen also in a submodule that was added later than the first calls."""
    model, x, edge_index = problem(device)
    twin, grads = copy.deepcopy(model), []
    for one, way in ((model, how), (twin, None)):
        with installed(way):
            for k in range(12):
                if k == 5:
                    one.own.lin = nn.Sequential(one.own.lin, nn.LeakyReLU(0.1))
                if k == 10:
                    one.own.lin[1].negative_slope = 0.7
                sum(y.square().sum() for y in one(x, edge_index).values()).backward()
        grads.append([p.grad for p in one.parameters()])
    same(*grads)
    assert replayed(how) == 7, str(how.rows())


def test_the_report():
    row = {"class": "a.Model", "calls": 9, "replayed": 5, "milliseconds": [3.0, 1.0], "reason": ""}
    told = captured.lines([row, {**row, "replayed": 0, "reason": "it is compiled"}])
    assert told[0] == (
        "  a.Model: 5 of 9 calls replayed as CUDA graphs; forward and backward: 3.0 ms as written, "
        "1.0 ms replayed"
    )
    assert "0 of 9 calls replayed as CUDA graphs: it is compiled" in told[1]
    assert captured.lines([]) == ["  --capture: no model with message passing was trained"]


@exhaustive
def test_what_it_would_gain(device, how, monkeypatch):
    """--gain measures it on a copy; without, the report says whether the GPU waits for the host."""
    model, x, edge_index = problem(device)
    twin, found = copy.deepcopy(model), gains.Gains()
    monkeypatch.setattr(gains, "COMPILE", "")  # which other tests measure
    waits = gains.Waits()
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for one, part in ((model, found), (model, waits), (twin, None)):
        with installed(part):
            for _ in range(4):
                sum(y.square().sum() for y in one(x, edge_index).values()).backward()
    (row,) = found.rows()
    assert 0 < row["lines"][gains.FLAG] < float("inf"), row
    assert waits.calls == 4
    assert waits.found["host"] > 0
    same([p.grad for p in model.parameters()], [2 * p.grad for p in twin.parameters()])


def test_the_report_of_waiting():
    told = gains.of_waits({"class": "a.Model", "host": 5.0, "more": 0.5})
    assert "a forward of a.Model took the host 5.00 ms, and the GPU 0.50 ms more" in told[0]
    assert gains.FLAG in told[1]
    assert gains.of_waits({"class": "a.Model", "host": 5.0, "more": 2.0}) == gains.of_waits({}) == []
