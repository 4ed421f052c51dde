"""Functions, modules and modes that a program puts in the place of torch's and torch_geometric's."""

import contextlib
import functools
import sys
import warnings
from collections import Counter

import pytest
import torch
from every_layer import LAYERS, PyG, assert_equal, both, results, with_gradients
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn.dense.linear import HeteroLinear

from dfgnn.nn import FallbackWarning


@contextlib.contextmanager
def replaced(*places):
    """Replaces functions by ones whose results are 1.5 times as large. places: (owner, name) of each."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in places:
            patch.setattr(owner, name, scaled(getattr(owner, name)))
        yield


def scaled(function):
    @functools.wraps(function)  # as tools do
    def call(*args, **kwargs):
        out = function(*args, **kwargs)
        return tuple(scale(x) for x in out) if isinstance(out, tuple) else scale(out)

    return call


def scale(x):
    return 1.5 * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def softmax_of(name):
    cls = type(LAYERS[name][0]())
    home = sys.modules[cls.__module__]
    return [(home, "softmax")] if hasattr(home, "softmax") else []


@contextlib.contextmanager
def calls_of_linears():
    """Replaces nn.Module._call_impl, which calls every module, as profilers and quantisation tools do."""
    original = nn.Module._call_impl

    def call(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        return 1.5 * out if isinstance(self, (nn.Linear, PyG.Linear)) else out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "_call_impl", call)
        yield


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return 1.5 * out if getattr(function, "__name__", "") in ("linear", "leaky_relu") else out


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return 1.5 * out if function._schema.name in ("aten::mm", "aten::addmm", "aten::leaky_relu") else out


REPLACED = {
    "nn.Linear.forward": lambda name: replaced((nn.Linear, "forward")),
    "Linear.forward": lambda name: replaced((PyG.Linear, "forward"), (HeteroLinear, "forward")),
    "F.linear": lambda name: replaced((F, "linear")),
    "F.leaky_relu": lambda name: replaced((F, "leaky_relu")),
    "F.dropout": lambda name: replaced((F, "dropout")),
    "F.normalize": lambda name: replaced((F, "normalize")),
    "attention": lambda name: replaced((F, "multi_head_attention_forward")),
    "softmax": lambda name: replaced(*softmax_of(name)),
    "Sigmoid": lambda name: replaced((nn.Sigmoid, "forward")),
    "SumAggregation": lambda name: replaced((PyG.SumAggregation, "forward")),
    "Embedding": lambda name: replaced((nn.Embedding, "forward")),
    "calls": lambda name: calls_of_linears(),
    "functions mode": lambda name: Functions(),
    "operators mode": lambda name: Operators(),
}


@pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")
@pytest.mark.parametrize("what", REPLACED)
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_program_replaces(name, what):
    theirs, ours = both(name)
    expected = with_gradients(theirs, name)
    with REPLACED[what](name):
        changed = with_gradients(theirs, name)
        actual = with_gradients(ours, name)
    assert_equal(actual, changed)
    # The layer also notices that the replacement is undone.
    assert_equal(with_gradients(ours, name), expected)


def test_a_replaced_linear_layer_is_called_without_a_fallback():
    theirs, ours = both("GATConv")
    with replaced((PyG.Linear, "forward")), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert_equal(with_gradients(ours, "GATConv"), with_gradients(theirs, "GATConv"))


def test_torchs_own_modes_are_no_reason():
    _, ours = both("GATConv")
    with torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        results(ours, "GATConv")
        assert ours.why_not(ours) is None


# The functions that DeepSpeed's profiler replaces to count operations, as far as these layers call them.
COUNTED = (
    *((F, name) for name in ("linear", "relu", "elu", "leaky_relu", "silu", "gelu", "softmax", "embedding")),
    *((F, name) for name in ("batch_norm", "layer_norm")),
    *((torch, name) for name in ("matmul", "addmm", "mul", "add", "einsum", "baddbmm")),
    *((torch.Tensor, name) for name in ("matmul", "addmm", "mul", "add")),
)


@contextlib.contextmanager
def counting():
    """Calls of each function, with the shapes of their tensors."""
    calls = Counter()

    def counted(place, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            calls[place, tuple(x.shape for x in args if isinstance(x, torch.Tensor))] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in COUNTED:
            patch.setattr(owner, name, counted(f"{owner.__name__}.{name}", getattr(owner, name)))
        yield calls


@pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_the_same_calls_are_counted(name):
    counts, results = [], []
    for layer in both(name):
        with counting() as calls:
            results.append(with_gradients(layer, name))
        counts.append(calls)
    assert counts[1] == counts[0]
    assert counts[0] or name in ("AGNNConv", "SoftmaxAggregation")
    assert_equal(results[1], results[0])


@pytest.mark.parametrize(("name", "part"), [("RGATConv", "lin_edge"), ("HANConv", "proj.b")])
def test_hooks_that_return_more_rows(name, part):
    """Forward hooks that return more rows than the module did, as captum's integrated gradients of a layer
    use."""
    theirs, ours = both(name)
    for layer in (theirs, ours):
        layer.get_submodule(part).register_forward_hook(lambda m, args, out: torch.cat([out, 2 * out]))
    assert_equal(with_gradients(ours, name), with_gradients(theirs, name))
