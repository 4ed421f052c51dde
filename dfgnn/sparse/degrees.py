"""Statistics of the degrees of a graph's rows, for the scheduler's estimates; they wait for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime import ops as _ops

# The GPU's operators `structure` and `degrees` find quantiles of degrees below _DEGREE_BINS, and how many
# work items there are with at most _LEAST_CUT edges each, twice that, ...: kDegreeBins in csrc/core/params.h
# and kLeastCut in csrc/cuda/graph/structure.h.
_DEGREE_BINS, _LEAST_CUT = 2048, 32


@dataclass(frozen=True)
class DegreeStats:
    """The degrees of one direction of a graph, in python numbers.

    num_rows, num_edges, num_empty: rows, edges, and rows without edges.  max, mean: of the degree.  p50, p99:
    the smallest degree that half (99 %) of the rows do not exceed.  cv: standard deviation / mean (0 without
    edges).
    """

    num_rows: int
    num_edges: int
    max: int
    mean: float
    p50: int
    p99: int
    num_empty: int
    cv: float


class Degrees(NamedTuple):
    """What a GPU computes from the degrees of a CSR's rows, read by the host in one transfer."""

    stats: DegreeStats | None  # None where a degree exceeds the GPU's histogram
    # maximum edges per work item -> (work items beyond one per row, split rows), for some such maxima
    cuts: dict[int, tuple[int, int]]


def degree_stats(degrees: Tensor, num_edges: int) -> DegreeStats:
    n = degrees.numel()
    if n == 0:
        return DegreeStats(0, 0, 0, 0.0, 0, 0, 0, 0.0)
    ordered = degrees.sort().values
    # Ranks and moments in integers, so that all devices agree; the sum of squares is at most E * max < 2**62.
    p50, p99, largest, num_empty, squares = torch.stack(
        [
            ordered[-(-n * 50 // 100) - 1],
            ordered[-(-n * 99 // 100) - 1],
            ordered[-1],
            (ordered == 0).sum(),
            (ordered * ordered).sum(),
        ]
    ).tolist()
    return _stats(n, num_edges, largest, p50, p99, num_empty, squares)


def _stats(
    n: int, num_edges: int, largest: int, p50: int, p99: int, num_empty: int, squares: int
) -> DegreeStats:
    cv = math.sqrt(n * squares - num_edges**2) / num_edges if num_edges else 0.0
    return DegreeStats(n, num_edges, largest, num_edges / n, p50, p99, num_empty, cv)


def degrees_from(n: int, num_edges: int, numbers: list[int]) -> Degrees:
    """numbers: what the operators `structure` and `degrees` return about n rows."""
    p50, p99, num_empty, largest, squares, *counts = numbers
    cuts = {_LEAST_CUT << k: (counts[2 * k], counts[2 * k + 1]) for k in range(len(counts) // 2)}
    if n == 0 or p99 >= _DEGREE_BINS:
        return Degrees(DegreeStats(0, 0, 0, 0.0, 0, 0, 0, 0.0) if n == 0 else None, cuts)
    return Degrees(_stats(n, num_edges, largest, p50, p99, num_empty, squares), cuts)


def degrees_of(indptr: Tensor, num_edges: int) -> tuple[DegreeStats, dict[int, tuple[int, int]]]:
    """The fields of `Degrees`, waiting for the device once. Without a GPU there are no cuts."""
    cuts: dict[int, tuple[int, int]] = {}
    n = indptr.numel() - 1
    if n and _ops.on_device(indptr):
        stats, cuts = degrees_from(n, num_edges, _ops.degrees(indptr).tolist())
        if stats is not None:
            return stats, cuts
    return degree_stats(indptr.diff(), num_edges), cuts
