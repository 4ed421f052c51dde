"""Measures the baseline, or *floor*: the fastest plain neighbour sum, by the vendor's kernels or by ours.

A layer that gathers p neighbour rows per edge cannot be much faster than p x floor unless rows share
neighbours on chip. Both sums are tried over all columns together and over blocks of columns in turn.
"""

import warnings
from functools import partial
from typing import Any

import torch

from ..plan import ROW_SCHEDULES
from ..runtime import ops as _ops
from . import accuracy, measure
from .measure import timings


def sparse_sum(graph, dtype: torch.dtype):
    """The vendor's sum: ``torch.sparse_csr @ dense`` (cuSPARSE; on the CPU MKL) with all values 1."""
    csr = graph.csr()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        matrix = torch.sparse_csr_tensor(
            csr.indptr.int(),
            csr.indices,
            torch.ones(graph.num_edges, dtype=dtype, device=graph.device),
            size=(graph.num_dst, graph.num_src),
            check_invariants=False,  # else torch warns that it is not set
        )
    return lambda dense: matrix @ dense


def gather_sum(graph, width: int, dtype: torch.dtype, schedule: str):
    """Our sum, for dense [N, width]. Raises ValueError if the schedule is not available."""
    plan, indices = graph.plan(1, width, dtype, schedule=schedule, layer=None), graph.csr().indices
    return lambda dense: _ops.gather_sum(dense, indices, plan.items, plan.splits, plan.launch, graph.num_dst)


def column_blocks(width: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Numbers of equal blocks into which the columns are divided: one, then twice as many each time, while a
    block has at least 64 columns and rows of whole 16 bytes."""
    step = max(64, 16 // dtype.itemsize)
    numbers = [1]
    while width % (2 * numbers[-1] * step) == 0:
        numbers.append(2 * numbers[-1])
    return tuple(numbers)


def by_blocks(call, dense: torch.Tensor, blocks: int):
    """``call`` for each block of columns of ``dense`` in turn; every block is a contiguous array.

    Where wide rows exceed the cache, a sum over all columns is no lower bound: sources that many rows share
    stay in the cache block by block. An attention kernel may do the same with its heads.
    """
    columns = [block.contiguous() for block in dense.chunk(blocks, 1)]
    return lambda: [call(block) for block in columns]


def measure_floor(graph, width: int, dtype: torch.dtype, budget: float) -> dict:
    """All baselines for features [N, width], and the floor in ms of either kind of timing.

    ``sparse`` and ``gather_sum`` hold the fastest candidate's timings, with the number of ``column_blocks``
    that it takes one after the other, or ``unavailable`` with the reason. ``floor`` holds the least of all
    candidates' ``eager`` and, on CUDA, ``kernels``; a kind that no baseline has is missing.
    """
    generator = torch.Generator(graph.device).manual_seed(0)
    # Rows of our kernels are multiples of 16 bytes; the vendor gets the features as they are.
    step = 16 // dtype.itemsize
    padded = -(-width // step) * step if graph.device.type == "cuda" else width
    dense = torch.randn(graph.num_src, padded, generator=generator, device=graph.device).to(dtype)
    exact = dense[:, :width].contiguous()

    result: dict[str, Any] = {"width": width, "dtype": str(dtype).removeprefix("torch.")}
    with torch.no_grad():
        vendor = sparse_sum(graph, dtype)
        try:
            expected = vendor(exact)
        except RuntimeError:
            expected = None  # `_Candidates.measure` fails, too, and records the reason
        sparse = _Candidates(graph, exact, width, budget, expected)
        for blocks in column_blocks(width, dtype):
            sparse.measure("torch.sparse", lambda: vendor, blocks)
        ours = _Candidates(graph, dense, width, budget, expected)
        if graph.device.type == "cuda":
            for blocks in column_blocks(width, dtype):
                for schedule in ROW_SCHEDULES:
                    make = partial(gather_sum, graph, padded // blocks, dtype, schedule)
                    ours.measure(schedule, make, blocks)
        else:
            ours.problems.append("CUDA only")
    result["sparse"], result["gather_sum"] = sparse.fastest(), ours.fastest()
    result["gather_sum"] |= {"schedule": name} if (name := result["gather_sum"].pop("name", None)) else {}
    result["sparse"].pop("name", None)
    times = [*sparse.times, *ours.times]
    result["floor"] = {
        kind: min(found)
        for kind in ("eager", "kernels")
        if (found := [t[kind]["median"] for t in times if "median" in t.get(kind, {})])
    }
    if graph.device.type == "cuda":
        cache = torch.cuda.get_device_properties(graph.device).L2_cache_size
        working_set = (graph.num_src + graph.num_dst) * width * dtype.itemsize
        result |= {"working_set_mb": working_set / 1e6, "l2_mb": cache / 1e6, "fits_l2": working_set <= cache}
    return result


def copy_bandwidth(device: torch.device, budget: float) -> float:
    """GB/s (bytes read and written) of copying a tensor that is larger than all caches."""
    source = torch.ones(2**26, device=device)  # 256 MiB
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure.eager(lambda: target.copy_(source), device, budget).median / 1e6


class _Candidates:
    """Timings of several implementations of the same sum, and the reasons why others failed.

    expected: the vendor's sum over all columns, with which each result is compared, or None.
    """

    def __init__(self, graph, dense, width: int, budget: float, expected) -> None:
        self.graph, self.dense, self.width, self.budget, self.expected = graph, dense, width, budget, expected
        self.times: list[dict[str, Any]] = []
        self.problems: list[str] = []

    def measure(self, name: str, make, blocks: int) -> None:
        """make() returns the sum over one block of columns; it may raise ValueError or RuntimeError."""
        try:
            call = by_blocks(make(), self.dense, blocks)
            if self.expected is not None:
                found = torch.cat(call(), 1)[:, : self.width]
                difference = accuracy.error(found, self.expected.double())
                if not difference < 1e-2:
                    raise RuntimeError(f"differs from torch.sparse by {difference:.1e}")
            timing = timings(call, self.graph.device, self.budget)
        except (ValueError, RuntimeError) as error:
            where = f" in {blocks} blocks of columns" if blocks > 1 else ""
            self.problems.append(f"{name}{where}: {measure.reason(error)}")
            return
        self.times.append({"name": name, "column_blocks": blocks, **timing})

    def fastest(self) -> dict[str, Any]:
        if not self.times:
            return {"unavailable": "; ".join(self.problems)}
        return min(self.times, key=_time) | {"not_measured": self.problems}


def _time(timing: dict) -> float:
    """The median of the kernels' times where there are any, else of eager calls."""
    return timing.get("kernels", {}).get("median", timing["eager"]["median"])
