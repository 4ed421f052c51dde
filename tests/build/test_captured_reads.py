"""dfgnn.run's CUDA graphs: what a model reads outside of itself, and what it does there."""

import argparse
import collections
import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from captured_models import Model, capturing, installed, problem, replayed

from dfgnn.run import captured

FACTOR, OPTIONS, LISTED = 1.0, {"factor": 1.0}, [1.0]
NAMESPACE = argparse.Namespace(factor=1.0, unused=0.0)
WEIGHT = torch.ones(1)


class Config:
    factor = 1.0

    def __init__(self):
        self.inner = SimpleNamespace(deeper=[SimpleNamespace(factor=1.0)])

    @property
    def doubled(self):
        return 2 * OBJECT.inner.deeper[0].factor


class Changed(Config):
    pass


OBJECT, CLASS = Config(), Changed


def enclosing():
    factor = 1.0

    def read(model):
        return factor

    def write(value):
        nonlocal factor
        factor = value

    return read, write


READ, WRITE = enclosing()


def _global(value):
    global FACTOR
    FACTOR = value


def _default(model, default=LISTED):
    return default[0]


# What a forward reads, and what sets it.
READS = {
    "global": (lambda model: FACTOR, _global),
    "dict": (lambda model: OPTIONS["factor"], lambda value: OPTIONS.update(factor=value)),
    "list": (lambda model: LISTED[0], lambda value: LISTED.__setitem__(0, value)),
    "namespace": (lambda model: NAMESPACE.factor, lambda value: setattr(NAMESPACE, "factor", value)),
    "class": (lambda model: CLASS.factor, lambda value: setattr(Config, "factor", value)),
    "nested": (
        lambda model: OBJECT.inner.deeper[0].factor,
        lambda value: setattr(OBJECT.inner.deeper[0], "factor", value),
    ),
    "property": (
        lambda model: OBJECT.doubled,
        lambda value: setattr(OBJECT.inner.deeper[0], "factor", value),
    ),
    "by_name": (
        lambda model: getattr(NAMESPACE, "factor"),  # noqa: B009
        lambda value: setattr(NAMESPACE, "factor", value),
    ),
    "attribute": (
        lambda model: model.config.inner.deeper[0].factor,
        lambda value: setattr(OBJECT.inner.deeper[0], "factor", value),
    ),
    "enclosing": (lambda model: READ(model), WRITE),
    "module": (
        lambda model: sys.modules[__name__].FACTOR if False else HERE.FACTOR,
        _global,
    ),
    "tensor": (lambda model: WEIGHT, lambda value: WEIGHT.fill_(value)),
    "setting": (
        lambda model: 1.0 if torch.get_default_dtype() == torch.float32 else 3.0,
        lambda value: torch.set_default_dtype(torch.float32 if value == 1.0 else torch.float64),
    ),
}
HERE = sys.modules[__name__]
NESTED, COMPUTED, COUNTS = {"model": [{"factor": 1.0}]}, "".join(["fac", "tor"]), collections.Counter()


class Slotted:
    __slots__ = ("factor",)


SLOTTED = Slotted()
SLOTTED.factor = 1.0


def _of_default(model, *, config=Config()):  # noqa: B008
    return config.factor


READS |= {
    "containers": (
        lambda model: NESTED["model"][0]["factor"],
        lambda value: NESTED["model"][0].update(factor=value),
    ),
    "any_name": (
        lambda model: getattr(NAMESPACE, COMPUTED),
        lambda value: setattr(NAMESPACE, "factor", value),
    ),
    "counter": (lambda model: COUNTS["factor"], lambda value: COUNTS.update(factor=value - COUNTS["factor"])),
    "slots": (lambda model: SLOTTED.factor, lambda value: setattr(SLOTTED, "factor", value)),
    "default": (_of_default, lambda value: setattr(_of_default.__kwdefaults__["config"], "factor", value)),
}


class Reading(Model):
    def __init__(self, read):
        super().__init__()
        self.read, self.config = read, OBJECT

    def forward(self, x, edge_index):
        factor = self.read(self)
        factor = factor.to(x) if isinstance(factor, torch.Tensor) else factor
        return super().forward(x, edge_index, factor)["out"]


def losses(model, x, edge_index, change=lambda k: None, steps=12):
    found = []
    for k in range(steps):
        change(k)
        model.zero_grad()
        loss = model(x, edge_index).square().sum()
        loss.backward()
        found += [loss.detach(), model.own.lin.weight.grad.clone()]
    return found


@pytest.mark.parametrize("read", READS)
def test_what_is_read_elsewhere(device, monkeypatch, read):
    """A change is seen by the next call, and so is its undoing."""
    read, write = READS[read]
    how = capturing(device, monkeypatch)
    model, x, edge_index = problem(device, model=Reading(read))

    def change(k):
        if k in (0, 5, 7, 10):
            write(2.0 if k in (5, 10) else 1.0)

    try:
        with installed(how):
            found = losses(model, x, edge_index, change)
        wanted = losses(model, x, edge_index, change)
    finally:
        write(1.0)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    waits = read == "tensor" and device != "cpu"  # for a number that lies on the host
    assert waits or replayed(how) >= 2, str(how.rows())


def test_what_is_not_read_may_change(device, monkeypatch):
    how = capturing(device, monkeypatch)
    model, x, edge_index = problem(device, model=Reading(READS["namespace"][0]))
    with installed(how):
        losses(model, x, edge_index, lambda k: setattr(NAMESPACE, "unused", k))
    assert replayed(how) == 9, str(how.rows())


def test_a_method_that_is_replaced(device, monkeypatch):
    """In its class, which PyTorch's compiler does not see: the model is left as written."""

    class Doubling(Reading):
        def factor(self):
            return 1.0

    how = capturing(device, monkeypatch)
    model, x, edge_index = problem(device, model=Doubling(lambda model: model.factor()))
    found = []
    for way in (how, None):
        Doubling.factor = lambda self: 1.0
        with installed(way):
            found.append(
                losses(
                    model, x, edge_index, lambda k: k == 6 and setattr(Doubling, "factor", lambda self: 2.0)
                )
            )
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)
    assert replayed(how) == 3, str(how.rows())


class Meter:
    """Counts, as scripts' meters do."""

    def __init__(self):
        self.count = 0

    def update(self):
        self.count += 1
        return 1.0


METER, WRITTEN = Meter(), []


def _prints(model):
    print("forward")
    return 1.0


def _logs(model):
    import logging

    logging.getLogger("dfgnn.tests").debug("forward")
    return 1.0


def _writes(model):
    sys.stdout.write("")
    return 1.0


DOES = {
    "meter": lambda model: METER.update(),
    "list": lambda model: WRITTEN.append(1) or 1.0,
    "prints": _prints,
    "logs": _logs,
    "writes": _writes,
}


@pytest.mark.parametrize("does", DOES)
def test_nothing_is_lost(device, monkeypatch, capsys, does):
    """What a forward does elsewhere it does in each call, and once."""
    how = capturing(device, monkeypatch, with_care=True)
    model, x, edge_index = problem(device, model=Reading(DOES[does]))
    METER.count = 0
    WRITTEN.clear()
    with installed(how):
        losses(model, x, edge_index)
    done = capsys.readouterr().out.count("forward") + METER.count + len(WRITTEN)
    assert done == (0 if does in ("logs", "writes") else 12)


def test_a_sample_repeats_nothing_that_comes_later(device, monkeypatch, capsys):
    """A forward that begins to print when a variable changes."""
    how = capturing(device, monkeypatch, with_care=True)

    def later(model):
        if FACTOR == 2.0:
            print("forward")
        return 1.0

    model, x, edge_index = problem(device, model=Reading(later))
    try:
        with installed(how):
            losses(model, x, edge_index, lambda k: _global(2.0 if k == 5 else FACTOR))
    finally:
        _global(1.0)
    assert replayed(how) >= 2, str(how.rows())
    assert capsys.readouterr().out.count("forward") == 7


def test_what_is_done_at_first_is_no_reason(device, monkeypatch, capsys):
    """Such as printing shapes once."""

    def once(model):
        if not model.__dict__.get("_printed"):
            model._printed = True
            print("forward")
        return 1.0

    how = capturing(device, monkeypatch, with_care=True)
    model, x, edge_index = problem(device, model=Reading(once))
    with installed(how):
        losses(model, x, edge_index)
    assert replayed(how) >= 6, str(how.rows())
    assert capsys.readouterr().out.count("forward") == 1


def test_calls_that_take_long_are_left_with_care(device, monkeypatch):
    how = capturing(device, monkeypatch, with_care=True)
    monkeypatch.setattr(captured, "_LONGEST", 0.0)
    model, x, edge_index = problem(device, model=Reading(lambda model: 1.0))
    with installed(how):
        losses(model, x, edge_index)
    assert replayed(how) == 0
    assert "--capture-all replays it all the same" in how.rows()[0]["reason"]
    assert how.rows()[0]["calls"] == 12


def asks_by_retain_grad(out):
    out["hidden"].retain_grad()
    out["hidden"].square().sum().backward(retain_graph=True)
    out["out"].sum().backward()
    return out["hidden"].grad


def asks_by_hook(out):
    found = []
    out["hidden"].register_hook(found.append)
    (out["out"].sum() + out["hidden"].square().sum()).backward()
    return found[0]


def asks_by_grad(out):
    loss = out["out"].sum() + out["hidden"].square().sum()
    (found,) = torch.autograd.grad(loss, out["hidden"], retain_graph=True)
    loss.backward()
    return found


ASKS = {
    "retain_grad": asks_by_retain_grad,
    "register_hook": asks_by_hook,
    "torch.autograd.grad": asks_by_grad,
}


@pytest.mark.parametrize("first", [0, 2, 6])
@pytest.mark.parametrize("asks", ASKS)
def test_gradients_of_results_of_which_others_are_computed(device, monkeypatch, asks, first):
    """A script that asks for them at first is left as written. One that begins later gets them, or is
    told."""
    how = capturing(device, monkeypatch, with_care=True)
    model, x, edge_index = problem(device)
    found = []
    for one, way in ((copy.deepcopy(model), how), (model, None)):
        found.append([])
        with installed(way):
            for k in range(10):
                one.zero_grad()
                out = one(x, edge_index)
                if k < first:
                    (out["out"].sum() + out["hidden"].square().sum()).backward()
                    continue
                if first == 6 and way and asks != "retain_grad":
                    with pytest.raises(RuntimeError, match="run the script without --capture"):
                        ASKS[asks](out)
                    return
                found[-1] += [ASKS[asks](out), *(p.grad for p in one.parameters())]
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)
    if first < 6:
        assert replayed(how) == 0
        assert f"{asks} asks for the gradient of a result" in how.rows()[0]["reason"]
    else:
        assert replayed(how) >= 3


def test_a_profiler(device, monkeypatch):
    """While one runs, which sees Python's calls, nothing is replayed."""
    how = capturing(device, monkeypatch)
    model, x, edge_index = problem(device, model=Reading(READS["global"][0]))
    calls = []
    with installed(how):
        sys.setprofile(lambda frame, event, what: calls.append(event))
        try:
            losses(model, x, edge_index, steps=6)
        finally:
            sys.setprofile(None)
        assert replayed(how) == 0
        losses(model, x, edge_index, steps=6)
    assert replayed(how) >= 2, str(how.rows())
    assert len(calls) > 100
