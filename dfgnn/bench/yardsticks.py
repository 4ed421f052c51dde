"""The floor: the fastest plain neighbour sum, of the vendor or of ours, measured beside the layers.

A layer that gathers p neighbour rows per edge cannot run much under p x floor unless rows share neighbours on
chip.
"""

import warnings
from functools import partial
from typing import Any

import torch

from ..plan import ROW_SCHEDULES
from ..runtime.arguments import ops
from . import accuracy, measure
from .measure import timings


def sparse_sum(graph, dtype: torch.dtype):
    """The vendor's: ``torch.sparse_csr @ dense`` (cuSPARSE, on the CPU MKL), all values 1."""
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
    """Ours, for dense [N, width]. Raises ValueError where the schedule is not available."""
    plan, indices = graph.plan(1, width, dtype, schedule=schedule, layer=None), graph.csr().indices
    return lambda dense: ops.gather_sum(dense, indices, plan.items, plan.splits, plan.launch, graph.num_dst)


def measure_floor(graph, width: int, dtype: torch.dtype, budget: float) -> dict:
    """All yardsticks for features [N, width], and the floor in ms of either kind of timing.

    ``sparse`` and ``gather_sum`` hold timings, or ``unavailable`` with the reason. ``floor`` holds ``eager``
    and, on CUDA, ``kernels``; a kind that no yardstick has is missing.
    """
    generator = torch.Generator(graph.device).manual_seed(0)
    # Rows of our kernels are multiples of 16 bytes; the vendor gets the features as they are.
    step = 16 // dtype.itemsize
    padded = -(-width // step) * step if graph.device.type == "cuda" else width
    dense = torch.randn(graph.num_src, padded, generator=generator, device=graph.device).to(dtype)
    exact = dense[:, :width].contiguous()

    result: dict[str, Any] = {"width": width, "dtype": str(dtype).removeprefix("torch.")}
    with torch.no_grad():
        call = sparse_sum(graph, dtype)
        try:
            expected = call(exact)
            result["sparse"] = timings(partial(call, exact), graph.device, budget)
        except RuntimeError as error:
            expected, result["sparse"] = None, {"unavailable": measure.reason(error)}
        result["gather_sum"] = _fastest_gather_sum(graph, dense, width, budget, expected)

    found = [result[name] for name in ("sparse", "gather_sum")]
    result["floor"] = {
        kind: min(times)
        for kind in ("eager", "kernels")
        if (times := [y[kind]["median"] for y in found if "median" in y.get(kind, {})])
    }
    if graph.device.type == "cuda":
        cache = torch.cuda.get_device_properties(graph.device).L2_cache_size
        working_set = (graph.num_src + graph.num_dst) * width * dtype.itemsize
        result |= {"working_set_mb": working_set / 1e6, "l2_mb": cache / 1e6, "fits_l2": working_set <= cache}
    return result


def copy_bandwidth(device: torch.device, budget: float) -> float:
    """GB/s, read and written, of copying a tensor that no cache holds."""
    source = torch.ones(2**26, device=device)  # 256 MiB
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure.eager(lambda: target.copy_(source), device, budget).median / 1e6


def _fastest_gather_sum(graph, dense, width, budget, expected) -> dict:
    if graph.device.type != "cuda":
        return {"unavailable": "CUDA only"}
    best, problems = None, []
    for schedule in ROW_SCHEDULES:
        try:
            call = gather_sum(graph, dense.shape[1], dense.dtype, schedule)
            if expected is not None:
                difference = accuracy.error(call(dense)[:, :width], expected.double())
                if not difference < 1e-2:
                    raise RuntimeError(f"differs from torch.sparse by {difference:.1e}")
            timing = timings(partial(call, dense), graph.device, budget)
        except (ValueError, RuntimeError) as error:
            problems.append(f"{schedule}: {measure.reason(error)}")
            continue
        if best is None or _time(timing) < _time(best):
            best = {"schedule": schedule, **timing}
    return best | {"not_measured": problems} if best else {"unavailable": "; ".join(problems)}


def _time(timing: dict) -> float:
    return timing["kernels"].get("median", timing["eager"]["median"])
