"""dfgnn.run's CUDA graphs: scripts that do more than compute end as they do alone, replayed or not."""

import collections
import copy
import csv
import io
import pickle
import random

import numpy as np
import pytest
import torch
from captured_models import Model, capturing, installed, problem, replayed
from torch import nn

STATE: dict = {}
NESTED = {"list": [{"factor": 1.0}]}


class Scripted(Model):
    """Its factor comes from ``read(model, hidden)``."""

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.register_buffer("history", torch.zeros(1))
        self.average = None

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index).relu()
        return self.own(h, edge_index) * self.read(self, h)


def run(read, how, device, before=lambda model, k: None, arguments=None, after=lambda model, out: None):
    """Losses, gradients, parameters, what was noted, and where the generators are."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    STATE.clear()
    STATE.update(rng=np.random.default_rng(0), count=0, rows=io.StringIO())
    NESTED["list"][0]["factor"] = 1.0
    model, x, edge_index = problem(device, model=Scripted(read))
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    with installed(how):
        for k in range(12):
            torch.manual_seed(k)
            before(model, k)
            optimizer.zero_grad()
            given = (x + 0.1 * k, edge_index)
            out = model(*given) if arguments is None else model(**arguments(*given))
            after(model, out)
            loss = out.square().mean()
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
    found += [*model.parameters(), *model.buffers(), torch.rand(1), random.random(), np.random.rand()]  # noqa: NPY002
    return found, STATE["count"], STATE["rows"].getvalue(), float(STATE["rng"].random())


def counts(model, h):
    STATE["count"] += 1
    return 1.0


def writes_rows(model, h):
    csv.writer(STATE["rows"]).writerow(["forward"])
    return 1.0


def drops_layers(model, h):
    return 2.0 if random.random() < 0.5 else 1.0


def draws_from_a_generator(model, h):
    return float(STATE["rng"].random())


def averages_from_none(model, h):
    mean = h.detach().mean()
    model.average = mean if model.average is None else 0.9 * model.average + 0.1 * mean
    return 1.0 + model.average


def writes_to_a_parameter(model, h):
    with torch.no_grad():
        model.own.lin.bias.mul_(0.9).add_(0.01)
    return 1.0


def nested(model, h):
    return NESTED["list"][0]["factor"]


def updates_a_buffer(model, h):
    model.history.mul_(0.5).add_(h.detach().mean())
    return 1.0


READS = [counts, writes_rows, drops_layers, draws_from_a_generator, averages_from_none, writes_to_a_parameter,
         nested, updates_a_buffer]  # fmt: skip


def changes_a_nested_value(model, k):
    NESTED["list"][0]["factor"] = 1.0 if k < 6 else 2.0


def transposes_a_weight(model, k):
    if k == 6:
        model.own.lin.weight.data = model.own.lin.weight.data.t()


def clips_weights(model, k):
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.5, 0.5)


def patches_a_method(model, k):
    if k == 6:
        forward = model.conv.forward
        model.conv.forward = lambda *args: forward(*args) * 2


BEFORE = [changes_a_nested_value, transposes_a_weight, clips_weights, patches_a_method]


def check(read, how, device, **options):
    """The script gives the same with calls that are replayed, and without."""
    found, expected = (run(read, way, device, **options) for way in (how, None))
    assert found[1:] == expected[1:]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-8, atol=1e-10)


@pytest.fixture
def how(device, monkeypatch):
    return capturing(device, monkeypatch, with_care=True)


@pytest.mark.parametrize("read", READS, ids=lambda f: f.__name__)
def test_what_a_forward_does(device, how, read):
    check(read, how, device)


@pytest.mark.parametrize("before", BEFORE, ids=lambda f: f.__name__)
def test_what_a_script_does_between_calls(device, how, before):
    check(nested, how, device, before=before)
    assert replayed(how), str(how.rows())


class Attributes(dict):
    __getattr__ = dict.__getitem__


ARGUMENTS = {
    "ordered": lambda x, edge_index: collections.OrderedDict(x=x, edge_index=edge_index),
    "attributes": lambda x, edge_index: Attributes(x=x, edge_index=edge_index),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments(device, how, kind):
    check(nested, how, device, arguments=ARGUMENTS[kind])
    assert replayed(how), str(how.rows())


def test_results_can_be_saved(device, how):
    def after(model, out):
        buffer = io.BytesIO()
        torch.save(out, buffer)
        pickle.dumps(out.detach())

    check(nested, how, device, after=after)


def test_gradients_of_gradients_over_a_buffer(device, how):
    """Of a call that was replayed: with the buffer's value before it, which the call has changed."""

    def read(model, h):
        factor = (h.mean() + model.history).tanh()
        model.history.mul_(0.5).add_(h.detach().mean())
        return factor

    def after(model, out):
        STATE["count"] += 1
        if STATE["count"] > 6:
            parameters = list(model.own.parameters())
            grads = torch.autograd.grad(out.square().mean(), parameters, create_graph=True)
            sum(x.square().sum() for x in grads).backward(retain_graph=True)

    check(read, how, device, after=after)
    assert replayed(how) >= 3, str(how.rows())


def test_a_copied_model_is_another_one(device, how):
    """Whose calls are replayed by themselves."""
    model, x, edge_index = problem(device, model=nn.Sequential(Model()))
    with installed(how):
        for _ in range(6):
            model[0](x, edge_index)["out"].sum().backward()
        other = copy.deepcopy(model)
        with torch.no_grad():
            other[0].own.lin.weight.mul_(2)
        other.zero_grad()
        for _ in range(6):
            other[0](x, edge_index)["out"].sum().backward()
    twin = copy.deepcopy(other)
    twin.zero_grad()
    for _ in range(6):
        twin[0](x, edge_index)["out"].sum().backward()
    grads = ([p.grad for p in one.parameters()] for one in (other, twin))
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-10)
