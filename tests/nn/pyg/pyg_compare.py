"""Layers of dfgnn.nn.pyg beside torch_geometric's: the same parameters, inputs, output gradients for both.

A test that imports this module is skipped where torch_geometric is missing.
"""

import copy
import sys
import types

import pytest
import torch
from graphs import make_graph
from torch import Tensor

import dfgnn
from dfgnn import reference

torch_geometric = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def pair(theirs_class, ours_class, *args, dtype=torch.float64, **kwargs):
    """torch_geometric's layer and ours with its state_dict; biases, which start at zero, get a value."""
    theirs = theirs_class(*args, **kwargs).to(dtype)
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    ours = ours_class(*copy.deepcopy(args), **copy.deepcopy(kwargs)).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def features(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def accelerated(theirs):
    ours = copy.deepcopy(theirs)
    report = dfgnn.accelerate(ours)
    assert report.replaced and not report.kept, report
    return ours


def edges(name="random", dtype=torch.int64):
    """edge_index of one of ``graphs.GRAPHS``."""
    return make_graph(name).edge_index.to(dtype).clone()


def sparse_forms(edge_index, num_src, num_dst, values=None):
    """The transposed adjacency matrix of distinct edges in the layouts that torch_geometric takes."""
    dst_src = edge_index.flip(0)
    values = torch.ones(edge_index.shape[1]) if values is None else values
    shape = num_dst, num_src, *values.shape[1:]
    coo = torch.sparse_coo_tensor(dst_src, values, shape).coalesce()
    return {
        "coo": coo,
        "csr": torch_geometric.utils.to_torch_csr_tensor(coo.indices(), coo.values(), (num_dst, num_src)),
    }


def inject_dropout(monkeypatch, ours, num_edges, heads, seed=21):
    """Makes both layers drop the same attention weights: those that dfgnn's kernels drop for this seed."""
    mask = reference.dropout_mask(seed, num_edges, heads, ours.dropout)
    attention = type(ours).attention

    def drop(alpha, p, training):
        return alpha * mask.to(alpha.dtype) if training else alpha

    def seeded(*args, **kwargs):
        return attention(*args, **kwargs, generator=torch.tensor([seed]))

    replace_their_dropout(monkeypatch, ours, drop)
    ours.attention = seeded


def replace_their_dropout(monkeypatch, ours, drop):
    """Replaces F.dropout in the module of torch_geometric's layer only: were it replaced in torch itself,
    dfgnn's layer would notice and run torch_geometric's forward."""
    theirs = next(c for c in type(ours).__mro__ if c.__module__.startswith("torch_geometric."))
    functions = types.SimpleNamespace(**{**vars(torch.nn.functional), "dropout": drop})
    monkeypatch.setattr(sys.modules[theirs.__module__], "F", functions)


def assert_same_dropout_distribution(theirs, ours, x, edge_index, copies=500, draws=3000):
    """Mean and deviation of many draws agree; ``copies`` of the graph are drawn at once."""
    num_nodes = len(x)
    offsets = (torch.arange(copies) * num_nodes).repeat_interleave(edge_index.shape[1])
    batch = edge_index.repeat(1, copies) + offsets
    samples = {}
    with torch.no_grad():
        for layer in (theirs, ours):
            outs = [layer(x.repeat(copies, 1), batch) for _ in range(draws // copies)]
            samples[layer] = torch.cat(outs).view(draws, num_nodes, -1)
    deviation = samples[theirs].std(0)
    error = (samples[theirs].mean(0) - samples[ours].mean(0)).abs() / deviation
    assert error.max().item() < 5 * (2 / draws) ** 0.5
    assert (samples[ours].std(0) / deviation - 1).abs().max().item() < 0.1


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
    elif torch_geometric.utils.is_torch_sparse_tensor(value):
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
    for name, got, want in _matched(actual, expected):
        error = (got - want).abs().max().item()
        assert error <= tolerance * max(1.0, want.abs().max().item()), (name, error)


def _matched(actual, expected):
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


def compare(theirs, ours, *args, our_args=None, tolerance=None, **kwargs):
    """Both layers forward and backward on the same inputs; ours must take its own, fused path.

    In float64 they agree to 1e-10; in float32 ours is as close to float64 as theirs, or to 1e-5. Or both
    agree to a given tolerance. Relative to max(1, largest element).

    our_args: other positional arguments for ours, of the same meaning.
    """
    assert ours.why_not(ours) is None
    expected = run(theirs, *args, **kwargs)
    actual = run(ours, *(args if our_args is None else our_args), **kwargs)
    dtype = _dtype(theirs)
    if dtype == torch.float64 or tolerance is not None:
        assert_same(actual, expected, TOLERANCE[dtype] if tolerance is None else tolerance)
        return
    exact = _run_exact(theirs, *args, **kwargs)
    for name, got, other in _matched(actual, expected):
        error, allowed = ((x - exact[name]).abs().max().item() for x in (got, other))
        assert error <= max(2 * allowed, TOLERANCE[dtype] * max(1.0, other.abs().max().item())), (
            name,
            error,
            allowed,
        )


def compare_low_precision(theirs, ours, *args, autocast=False, dtype=torch.bfloat16, **kwargs):
    """Both layers in ``dtype`` or under autocast to it: results of the same types, and nearly as exact.

    Errors are norm-wise against torch_geometric's layer in float64. Outputs may have twice the error of
    torch_geometric's in low precision, gradients three times (dfgnn's backward reads the rounded output,
    where torch_geometric may save float32), plus rounding.
    """
    exact = _run_exact(theirs, *args, **kwargs)
    if not autocast:
        theirs, ours, args = theirs.to(dtype), ours.to(dtype), _cast(args, dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        expected, actual = run(theirs, *args, **kwargs), run(ours, *args, **kwargs)
    eps = torch.finfo(dtype).eps
    for name, got, other in _matched(actual, expected):
        want = exact[name]
        size = max(want.norm().item(), want.numel() ** 0.5)
        error, theirs_error = ((x.double() - want).norm().item() / size for x in (got, other))
        factor, rounding = (3, 8 * eps) if name.startswith("grad") else (2, eps)
        assert error <= factor * theirs_error + rounding, (name, error, theirs_error)


def _run_exact(layer, *args, **kwargs):
    dtype = _dtype(layer)
    found = run(layer.double(), *_cast(args, torch.float64), **_cast(kwargs, torch.float64))
    layer.to(dtype)
    return found


def _dtype(layer):
    return next(x.dtype for x in (*layer.parameters(), *layer.buffers()) if x.is_floating_point())


def _cast(value, dtype):
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(x, dtype) for x in value)
    if isinstance(value, dict):
        return {key: _cast(x, dtype) for key, x in value.items()}
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided
    return value.to(dtype) if is_dense and value.is_floating_point() else value
