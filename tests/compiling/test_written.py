"""Attention as people write it, rewritten, against itself as it is."""

import functools

import pytest
import torch
from comparing import check, flat, gradients, loss, rewriting
from covering import exhaustive
from torch._dynamo.testing import CompileCounter
from torch_geometric.utils import scatter, segment, softmax
from written import Inputs, cases, inputs

import dfgnn
from dfgnn.compiling.operations import numbers
from dfgnn.compiling.rewrite import rewritten
from dfgnn.runtime import torch_internals as internals

SIZES = (7, 7, 25), (12, 12, 40), (30, 30, 33)  # sources, destinations, edges


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[exhaustive] * case.more) for case in cases()]
)
def test_written(case, device):
    """Static shapes, then symbolic ones, then another size of these, in float64, with derivatives of first
    and second order."""
    torch._dynamo.reset()
    reports: list = []
    compiled = torch.compile(case.fn, backend=rewriting(reports))
    for k, sizes in enumerate(SIZES):
        x = inputs(*sizes, seed=k, device=device)
        check(gradients(compiled, x, k == 1), gradients(case.fn, x, k == 1))
    # The third size is one of the dynamic graph's, except where torch itself adds guards.
    if len(reports) != 2:
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(case.fn, backend=counter)
        for k, sizes in enumerate(SIZES):
            compiled(*inputs(*sizes, seed=k, device=device))
        assert len(reports) == counter.frame_count
    for report in reports:
        assert report.rewritten and not report.refused, str(report)
        assert any(case.form in found.form for found in report.rewritten), str(report)


@pytest.mark.parametrize("name", ["two values", "two layers", "softmax alone", "gat; rows of edges"])
def test_edges_modified_before_backward(name, device):
    """An error, as it is one in the code as it is written."""
    torch._dynamo.reset()
    fn = next(case.fn for case in cases() if case.name == name)
    for call in (fn, torch.compile(fn, backend=rewriting([]))):
        x = inputs(*SIZES[0], device=device)
        outs = [loss(call(*x)) for _ in range(2)]
        outs[0].backward()
        x.edge_index[1, 0] = 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outs[1].backward()


# ---- segments that offsets give ----------------------------------------------------------------------------


def _by_offsets(offsets, src, query, key, value):
    """The edges are sorted by their destinations."""
    rows = query.repeat_interleave(offsets[1:] - offsets[:-1], 0, output_size=len(src))
    weight = softmax((rows * key[src]).sum(-1), ptr=offsets)
    return torch.segment_reduce(weight.unsqueeze(-1) * value[src], "sum", offsets=offsets)


def _by_differences(offsets, src, query, key, value):
    rows = query.repeat_interleave(offsets.diff(), dim=0, output_size=len(src))
    e = (rows * key[src]).sum(-1).exp()
    total = torch.segment_reduce(e, "sum", offsets=offsets, initial=0)
    weight = e / total.repeat_interleave(offsets.diff(), dim=0, output_size=len(src))
    return segment(weight.unsqueeze(-1) * value[src], offsets)


def _sorted(sizes, k, device):
    x = inputs(*sizes, seed=k, device=device)
    order, numbers = x.dst.argsort(), torch.arange(sizes[1] + 1, device=device)
    return torch.searchsorted(x.dst[order], numbers), x.src[order], x.query, x.key, x.value


@pytest.mark.parametrize("fn", [_by_offsets, _by_differences])
def test_segments_by_offsets(fn, device):
    torch._dynamo.reset()
    reports: list = []
    compiled = torch.compile(fn, backend=rewriting(reports))
    for k, sizes in enumerate((*SIZES, (5, 5, 0))):
        offsets, *given = _sorted(sizes, k, device)
        check(*(gradients(functools.partial(call, offsets), given) for call in (compiled, fn)))
    assert all([found.form for found in report.found] == ["dot_attention"] for report in reports)
    with pytest.raises(ValueError, match="segment_reduce: offsets: expected 0 to 25, the rows, got 0 to 24"):
        offsets, *given = _sorted(SIZES[0], 0, device)
        compiled(offsets.clamp(max=24), *given)
    out = compiled(offsets, *given)
    offsets += 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_segments_that_are_left_stay():
    """Segment operations stay as they are in code without attention, and where the attention is small."""
    seen = []

    def backend(module, _):
        made, report = rewritten(module, 10**9)
        seen.append((made is module, [found.left for found in report.found]))
        return module.forward

    for fn in (
        lambda offsets, src, query, *_: torch.segment_reduce(query.exp(), "max", offsets=offsets),
        _by_offsets,
    ):
        torch._dynamo.reset()
        torch.compile(fn, backend=backend)(*_sorted((7, 7, 7), 0, "cpu"))
    assert seen == [(True, []), (True, [True])]


# ---- int(index.max()) + 1 segments -------------------------------------------------------------------------


def _summed(*tensors):
    x = Inputs(*tensors)
    weight = softmax((x.query[x.dst] * x.key[x.src]).sum(-1), x.dst)
    return x.value.new_zeros(x.query.shape).index_add(0, x.dst, weight.unsqueeze(-1) * x.value[x.src])


def _returned(*tensors):
    x = Inputs(*tensors)
    return softmax(x.score_dst[x.dst] + x.bias, x.dst)


def _unnormalized(*tensors):
    x = Inputs(*tensors)
    return scatter(x.bias.exp(), x.dst, reduce="max")[x.dst] * x.score_dst[x.dst]


def _as_many_rows(*tensors):
    x = Inputs(*tensors)
    weight = softmax((x.query[x.dst] * x.key[x.src]).sum(-1), x.dst)
    return scatter(weight.unsqueeze(-1) * x.value[x.src], x.dst)


def _of_nothing_else(*tensors):
    x = Inputs(*tensors)
    return softmax(x.bias, x.dst)


@pytest.mark.parametrize("least", [0, 10**9], ids=["rewritten", "left"])
@pytest.mark.parametrize(
    "fn, needed",
    [(_summed, 0), (_returned, 0), (_unnormalized, 0), (_as_many_rows, 1), (_of_nothing_else, 1)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_number_of_segments(fn, needed, least, device):
    """The number of segments is read only where a result depends on it, also if edges change in place."""
    torch._dynamo.reset()
    asked = []

    def backend(module, _):
        made, _ = rewritten(module, least)
        asked.append(len(numbers(made.graph)))
        return made.forward

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(fn, backend=backend)
        for k, sizes in enumerate((*SIZES, (5, 5, 0))):
            x = inputs(*sizes, seed=k, device=device)
            x.edge_index[1] //= 2  # no edges lead to the last nodes
            check(gradients(compiled, x), gradients(fn, x))
            with torch.no_grad():
                x.edge_index[1] += sizes[1] // 2
            check(gradients(compiled, x), gradients(fn, x))
    assert asked[:2] == [needed] * 2


def test_numbers_are_recorded_within_compile(device, monkeypatch):
    """Numbers are recorded where they turn out not to be needed. Elsewhere the graph breaks as
    torch.compile's does, and other compiled code is as before."""
    monkeypatch.setattr(internals, "compile_fx", lambda made, *_, **__: made.forward)
    counters, x = torch._dynamo.utils.counters, inputs(*SIZES[0], device=device)
    for fn, breaks in ((_summed, False), (_as_many_rows, False), (_returned, False), (_of_a_number, True)):
        torch._dynamo.reset()
        counters.clear()
        check(flat(dfgnn.compile(fn, options={"dfgnn.min_elements": 0})(*x)), flat(fn(*x)))
        assert bool(counters["graph_break"]) == breaks
        assert not torch._dynamo.config.capture_scalar_outputs
        check(flat(dfgnn.compile(fn, fullgraph=True)(*x)), flat(fn(*x)))


def _of_a_number(*tensors):
    x = Inputs(*tensors)
    return scatter(x.bias * 2, x.dst) * int(x.dst.max())
