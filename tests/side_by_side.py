"""Compares a layer with that of another library with the same parameters, inputs and gradients of the
outputs."""

import copy

import torch
from torch import Tensor


def pair(their_class, our_class, *args, dtype=torch.float64, **kwargs):
    """The other library's layer and ours with its state_dict; biases, which start at zero, get a value."""
    theirs = their_class(*args, **kwargs).to(dtype)
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    ours = our_class(*copy.deepcopy(args), **copy.deepcopy(kwargs)).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(layer, *args, **kwargs):
    """Forward and backward: outputs, and the gradients of parameters and floating-point inputs, by name.

    Nested tuples, lists and dictionaries of tensors are taken and given. Equal seeds give equal output
    gradients.
    """
    layer.zero_grad()
    leaves = {}

    def leaf(value, path):
        if isinstance(value, (tuple, list)):
            return type(value)(leaf(item, f"{path}[{k}]") for k, item in enumerate(value))
        if isinstance(value, dict):
            return {key: leaf(item, f"{path}[{key}]") for key, item in value.items()}
        if isinstance(value, Tensor) and value.layout == torch.strided and value.is_floating_point():
            value = leaves[path] = value.detach().clone().requires_grad_()
        return value

    result = layer(*leaf(args, "args"), **leaf(kwargs, "kwargs"))
    outputs = {}
    _collect(result, "out", outputs)
    generator = torch.Generator().manual_seed(3)
    wanted = [
        (x, torch.randn(x.shape, generator=generator).to(x)) for x in outputs.values() if x.requires_grad
    ]
    torch.autograd.backward(*zip(*wanted))
    found = {name: x.detach() for name, x in outputs.items()}
    leaves |= dict(layer.named_parameters())
    return found | {f"grad {name}": None if x.grad is None else x.grad.clone() for name, x in leaves.items()}


def _collect(value, path, found):
    if isinstance(value, (tuple, list)):
        for k, item in enumerate(value):
            _collect(item, f"{path}[{k}]", found)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(item, f"{path}[{key}]", found)
    elif hasattr(value, "sparse_sizes") and not isinstance(value, Tensor):  # SparseTensor
        for name, item in zip(("row", "col", "value"), value.coo()):
            found[f"{path}.{name}"] = item
    elif isinstance(value, Tensor) and value.layout != torch.strided:
        assert value.layout != torch.sparse_csc
        is_coo = value.layout == torch.sparse_coo
        found[f"{path}.values"] = value.values()
        for k, item in enumerate(value.indices() if is_coo else (value.crow_indices(), value.col_indices())):
            found[f"{path}.index{k}"] = item
    elif value is not None:
        assert isinstance(value, Tensor), (path, value)
        found[path] = value.as_tensor() if hasattr(value, "as_tensor") else value


def assert_same(actual, expected, tolerance):
    """Both as ``run`` gives them. Numbers agree within tolerance * max(1, largest element)."""
    for name, got, want in matched(actual, expected):
        error = (got - want).abs().max().item()
        assert error <= tolerance * max(1.0, want.abs().max().item()), (name, error)


def matched(actual, expected):
    """Checks that names, shapes, dtypes and integers agree; yields (name, actual, expected) of the other
    tensors."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got = actual[name]
        if want is None or got is None:  # a gradient that does not exist is zero
            assert all(x is None or not x.any() for x in (want, got)), name
            continue
        assert got.shape == want.shape and got.dtype == want.dtype, (name, got.shape, want.shape, got.dtype)
        if not want.is_floating_point():
            assert torch.equal(got, want), name
        elif want.numel():
            yield name, got, want


def assert_same_distribution(theirs, ours, draw, copies=500, draws=3000):
    """Mean and deviation of many draws agree. draw: gives the outputs of a layer for ``copies`` of a graph,
    drawn at once."""
    with torch.no_grad():
        samples = [torch.cat([draw(layer) for _ in range(draws // copies)]) for layer in (theirs, ours)]
    one, other = (x.view(draws, -1) for x in samples)
    deviation = one.std(0)
    assert ((one.mean(0) - other.mean(0)).abs() / deviation).max().item() < 5 * (2 / draws) ** 0.5
    assert (other.std(0) / deviation - 1).abs().max().item() < 0.1
