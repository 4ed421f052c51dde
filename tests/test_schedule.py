"""What the scheduler decides from statistics alone, where no GPU is needed to ask it."""

from types import SimpleNamespace

import pytest
import torch

from dfgnn import schedule
from dfgnn._csr import DegreeStats

FLOAT, BF16 = torch.float32, torch.bfloat16


def stats(num_rows, mean, cv, largest) -> DegreeStats:
    return DegreeStats(num_rows, int(num_rows * mean), largest, mean, int(mean), largest, 0, cv)


# Published sizes; cv as the benchmark's graphs have it.
ARXIV = stats(169_343, 14.7, 4.7, 13_162)
REDDIT = stats(232_965, 492, 2.3, 20_380)
PRODUCTS = stats(2_449_029, 51.5, 1.9, 16_972)
PATTERN = stats(121_168, 46.3, 0.2, 72)


def chosen(which: DegreeStats, packable: int) -> str:
    return min(schedule._candidates(which, packable), key=lambda c: c.cost).schedule


@pytest.mark.parametrize(
    ("which", "packable", "expected"),
    [
        (ARXIV, 1, "longest_first"),
        (ARXIV, 2, "packed"),
        (REDDIT, 1, "longest_first"),
        (REDDIT, 2, "longest_first"),  # rows are long enough for a whole warp
        (PRODUCTS, 2, "packed"),
        (PATTERN, 1, "natural"),  # rows are alike: another order would lose cache
        (PATTERN, 2, "packed"),
    ],
)
def test_order(which, packable, expected):
    assert chosen(which, packable) == expected


def split(which: DegreeStats, layer, dtype, heads=4, dim=32, reverse=False, rises=True, device="cuda"):
    graph = SimpleNamespace(
        device=torch.device(device),
        num_src=which.num_rows,
        num_dst=which.num_rows,
        _plans={("rises", reverse): rises},
    )
    return schedule._cache_split(graph, layer, reverse, heads, dim, dtype, which)


@pytest.mark.parametrize(
    ("layer", "dtype", "reverse", "parts", "heads"),
    [
        ("gat", FLOAT, False, 2, 2),
        ("gat", FLOAT, True, 2, 2),
        ("dot", FLOAT, False, 4, 1),
        ("gatv2", FLOAT, False, 2, 2),
        ("gatv2", FLOAT, True, 4, 1),  # x and g
        ("dot", BF16, False, 2, 2),
        ("gat", BF16, False, 1, 0),  # fits
        ("gatv2", BF16, True, 1, 0),  # bound by instructions
        (None, FLOAT, False, 2, 2),
    ],
)
def test_less_at_a_time_where_a_large_graph_exceeds_the_cache(layer, dtype, reverse, parts, heads):
    """Parts of the sources where rows rise, else heads."""
    assert split(REDDIT, layer, dtype, reverse=reverse) == (0, parts)
    assert split(REDDIT, layer, dtype, reverse=reverse, rises=False) == (heads, 1)


def test_all_at_once_where_less_would_not_pay():
    assert split(ARXIV, "dot", FLOAT) == (0, 1)  # short rows
    assert split(PRODUCTS, "dot", FLOAT) == (0, 1)  # no part fits
    assert split(REDDIT, "dot", FLOAT, device="cpu") == (0, 1)
    assert split(REDDIT, "dot", FLOAT, heads=1, dim=128, rises=False) == (0, 1)  # one head, in no order
    assert split(REDDIT, "gat", BF16, heads=4, dim=16) == (0, 1)


@pytest.mark.parametrize("longest_first", [False, True])
def test_items_come_part_by_part(longest_first):
    generator = torch.Generator().manual_seed(0)
    degree = torch.randint(0, 90, (2, 50), generator=generator)
    degree[:, ::7] = 0
    flat = torch.cat([torch.zeros(1, dtype=torch.int64), degree.T.flatten().cumsum(0)])
    begin, end = flat[:-1].view(50, 2).T, flat[1:].view(50, 2).T
    items, splits, num_slots = schedule._items(begin, end, 32, longest_first)
    row, first, last, slot = items.long().T
    assert items.is_contiguous() and (last - first).max() <= 32
    part = (first >= begin[1, row]).long() * (last > first)
    assert part.tolist() == sorted(part.tolist())
    if longest_first:
        for p in (0, 1):
            length = (last - first)[part == p]
            assert (length[1:] <= length[:-1]).all()
    covered = torch.cat([torch.arange(a, b) for a, b in zip(first.tolist(), last.tolist())])
    assert sorted(covered.tolist()) == list(range(int(flat[-1])))
    assert sorted(row.unique().tolist()) == list(range(50))
    assert sorted(slot[slot >= 0].tolist()) == list(range(num_slots))
    for r, a, b, stride in splits.tolist():
        assert stride == 1 and sorted(slot[row == r].tolist()) == list(range(a, b)) and b - a > 1
