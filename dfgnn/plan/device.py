"""The device properties that the scheduler's estimates use: multiprocessors, resident warps, L2 cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch

# How many warps of the kernels on rows, and blocks of those on tiles, fit a multiprocessor's registers.
_WARPS, _BLOCKS = 20, 4
# Shared memory of a block of tiles with heads of 64 elements, rounded up (TileLayout in
# csrc/cuda/attention/tiles.cuh).
_BLOCK_BYTES = 48 * 1024


@dataclass(frozen=True)
class Device:
    """A GPU's properties, as `torch.cuda.get_device_properties` gives them; a CPU has none of them."""

    kind: str  # "cuda", "cpu"
    name: str = ""
    num_sms: int = 0
    warps_per_sm: int = 0  # the hardware's limit, whatever registers the warps use
    shared_per_sm: int = 0  # bytes
    l2_bytes: int = 0

    @cached_property
    def resident_warps(self) -> int:
        """How many warps of the kernels on rows run at a time."""
        return self.num_sms * min(_WARPS, self.warps_per_sm)

    @cached_property
    def resident_blocks(self) -> int:
        """How many blocks of the kernels on tiles run at a time."""
        return self.num_sms * max(min(_BLOCKS, self.shared_per_sm // _BLOCK_BYTES), 1)


_CPU = Device("cpu")


def of(device: torch.device) -> Device:
    if device.type != "cuda":
        return _CPU if device.type == "cpu" else Device(device.type)
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _of_gpu(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        "cuda",
        properties.name,
        properties.multi_processor_count,
        properties.max_threads_per_multi_processor // properties.warp_size,
        properties.shared_memory_per_multiprocessor,
        properties.L2_cache_size,
    )
