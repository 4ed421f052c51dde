"""Sums of 5,000 terms in 16 bits: a graph that has them in both directions, and how their error is judged.

A sum that is kept in bfloat16 stops at 256 ones, in float16 at 2,048; 4,992 and 5,000 are right. torch 2.13
adds so in many operations along an index, and in more under torch.compile (docs/where_libraries_differ.md).
"""

import torch

DEGREE = 5000
HALF = torch.bfloat16, torch.float16


def edges(loops=True):
    """edge_index of a node 0 with 5,000 edges in either direction. Every other node has an edge from itself
    or, without loops, from a neighbour, too, so that the weights of its softmax are no constants."""
    others, hub = torch.arange(1, DEGREE + 1), torch.zeros(DEGREE, dtype=torch.long)
    second = others if loops else others.roll(1)
    return torch.stack([torch.cat([others, hub, second]), torch.cat([hub, others, others])])


def positive(shape, dtype=torch.float64, seed=0):
    """Numbers between 1/2 and 1 that bfloat16 and float16 have exactly: no sum of them cancels."""
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((drawn + 1) / 2).bfloat16().to(dtype)


def weighted(results):
    """A sum of the results with positive weights, in float64."""
    return sum((x.double() * positive(x.shape, seed=1).to(x.device)).sum() for x in results)


def assert_no_sum_lost(found, exact, allowed=0.25, least=1e-7):
    """Every tensor deviates from the exact one by a fraction of its norm. A sum that stopped at 256 or 2,048
    lacks 95 or 59 % of 5,000. Left out is what is smaller than ``least``
    times the largest: differences of large terms, of which rounding the terms leaves little."""
    most = max(x.norm() for x in exact.values())
    for name, x in exact.items():
        if x.norm() > least * most:
            error = ((found[name].double() - x).norm() / x.norm()).item()
            assert error < allowed, f"{name}: {error:.3f} of its norm, {x.norm():.3g}"
