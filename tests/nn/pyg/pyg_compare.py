"""Layers of dfgnn.nn.pyg beside torch_geometric's: the same parameters, inputs, output gradients for both.

A test that imports this module is skipped where torch_geometric is missing.
"""

import copy
import sys
import types

import pytest
import torch
from graphs import make_graph
from side_by_side import assert_same, assert_same_distribution, matched, run
from side_by_side import pair as pair
from torch import Tensor

import dfgnn
from dfgnn import reference

torch_geometric = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


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


def assert_same_dropout_distribution(theirs, ours, x, edge_index, copies=500):
    """Mean and deviation of many draws agree."""
    offsets = (torch.arange(copies) * len(x)).repeat_interleave(edge_index.shape[1])
    batch = edge_index.repeat(1, copies) + offsets
    assert_same_distribution(theirs, ours, lambda layer: layer(x.repeat(copies, 1), batch), copies)


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
    for name, got, other in matched(actual, expected):
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
    for name, got, other in matched(actual, expected):
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
