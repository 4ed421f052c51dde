"""Scores that are not finite: -inf masks an edge, +inf and NaN make their row NaN, and no other row."""

import math

import pytest
import torch

from dfgnn import Graph, functional, ops, reference

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ROWS = 6
# Rows: plain; masked edges; all masked; +inf; two of +inf and others of -inf; NaN. Column 1 is finite
# everywhere.
SCORES = [
    *((0, 1.0), (0, -2.0), (1, 3.0), (1, -math.inf), (2, -math.inf), (2, -math.inf)),
    *((3, 0.5), (3, math.inf), (3, -1.0), (4, math.inf), (4, -math.inf), (4, math.inf), (4, 2.0)),
    *((5, math.nan), (5, 1.0)),
]
IS_NAN = [3, 4, 5]


def edges(device, sort, repeats):
    """Destinations and scores [E, 2]. repeats: how many times the rows are there, so that they are many."""
    dst, score = (torch.tensor(x) for x in zip(*SCORES))
    dst = torch.cat([dst + ROWS * k for k in range(repeats)])
    score = torch.stack([score, torch.linspace(-1, 1, len(score))], 1).repeat(repeats, 1)
    order = (
        dst.argsort(stable=True)
        if sort
        else torch.randperm(len(dst), generator=torch.Generator().manual_seed(0))
    )
    return dst[order].to(device), score[order].to(device)


def expected(dst, score, num_rows):
    """Row by row, in Python."""
    score, found = score.double().cpu(), torch.zeros(score.shape, dtype=torch.float64)
    for row in range(num_rows):
        of = (dst.cpu() == row).nonzero().flatten()
        for column in range(score.shape[1]):
            s = score[of, column]
            if len(s) and s.max() > -math.inf or s.isnan().any():
                found[of, column] = s.softmax(0)
    return found


def check(got, right, dtype):
    torch.testing.assert_close(
        got.double().cpu(), right, equal_nan=True, rtol=1e-2, atol=1e-2 if dtype.itemsize == 2 else 1e-5
    )


@pytest.mark.parametrize("repeats", [1, 700])
@pytest.mark.parametrize("sort", [False, True], ids=["shuffled", "sorted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax(device, dtype, sort, repeats, threads):
    dst, score = edges(device, sort, repeats)
    num, score = ROWS * repeats, score.to(dtype)
    src = torch.arange(len(dst), device=device) % num
    right = expected(dst[: len(SCORES)], score[: len(SCORES)], ROWS) if repeats == 1 else None
    graph = Graph.from_coo(src, dst, num_src=num, num_dst=num)
    for count in (1, 2):
        threads(count)
        forms = {
            "graph": functional.edge_softmax(graph, score),
            "edge_index": functional.edge_softmax(torch.stack([src, dst]), score),
            "dgl.ops": ops.edge_softmax(graph, score),
            "schedule": functional.edge_softmax(graph, score, kernel_options={"schedule": "natural"}),
            "reference": reference.edge_softmax(graph, score.double()),
        }
        for name, got in forms.items():
            if right is not None:
                check(got, right, dtype)
            nan = got[:, 0].isnan()
            assert torch.equal(nan.cpu(), torch.isin(dst.cpu() % ROWS, torch.tensor(IS_NAN))), name
            assert not got[:, 1].isnan().any(), name


def test_softmax_of_torch_geometric(device):
    """Our softmax by an index gives what torch_geometric's gives, which is NaN, too, for a row of -inf
    alone."""
    utils = pytest.importorskip("torch_geometric.utils")
    from dfgnn.engine import by_index

    dst, score = edges(device, False, 1)
    right = utils.softmax(score, dst, num_nodes=ROWS)
    if by_index.takes(score, dst):
        torch.testing.assert_close(by_index.softmax(score, dst, ROWS), right, equal_nan=True)


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(device, dtype, sink):
    """The other functions that take scores: out and attention are NaN in these rows, and nowhere else."""
    dst, score = edges(device, False, 1)
    graph = Graph.from_coo(dst, dst, num_src=ROWS, num_dst=ROWS)
    score, value = score.to(dtype), torch.ones(ROWS, 2, 8, device=device, dtype=dtype)
    more = dict(sink=value.new_zeros(2)) if sink else {}
    zero = torch.zeros(ROWS, 2, device=device, dtype=dtype)
    for out, attention in (
        functional.score_attention(graph, score, value, return_attention=True, **more),
        functional.gat_attention(graph, value, zero, zero, bias=score, return_attention=True, **more),
        functional.dot_attention(graph, value, value * 0, value, bias=score, return_attention=True, **more),
    ):
        rows = torch.zeros(ROWS, dtype=torch.bool)
        rows[IS_NAN] = True
        assert torch.equal(out[:, 0].isnan().all(-1).cpu(), rows)
        assert torch.equal(attention[:, 0].isnan().cpu(), rows[dst.cpu()])
        assert not out[:, 1].isnan().any() and not attention[:, 1].isnan().any()
        assert not out[2, 0].any()  # a row of masked edges alone
