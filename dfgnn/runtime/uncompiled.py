"""The operators of an installation without compiled libraries: the wheel ``py3-none-any``.

It has their schemas, and of the operators themselves those that make a graph, in PyTorch's operations. All
attention and all products along edges are computed as `engine.plain` does.
"""

from __future__ import annotations

import platform
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, library

_library = library.Library("dfgnn", "DEF")
# The numbers with which `sparse.packed` begins: ranges of ids, by_src, and two directions without arrays.
_NO_SIDES = (0, -1) * 5 + (0,)


def define(schemas: Path) -> None:
    """Defines the operators of this file, which has a schema per line, and says that none is compiled."""
    kernels = {"coo_to_csr": _coo_to_csr, "transpose_csr": _transpose_csr}
    for schema in schemas.read_text().splitlines():
        name = schema.partition("(")[0]
        _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
        _library.impl(name, kernels.get(name) or _missing(name), "CompositeExplicitAutograd")
    warnings.warn(
        f"dfgnn has no compiled kernels in this installation, for Python {platform.python_version()} on "
        f"{sys.platform} {platform.machine()}: attention is computed by PyTorch's operations, many times "
        "slower and with memory for every edge. `python -m dfgnn.env` says what to do.",
        stacklevel=2,
    )


def _missing(name: str) -> Any:
    def refuse(*args: Any) -> Any:
        raise NotImplementedError(
            f"dfgnn::{name} needs a compiled library, and this installation of dfgnn has none: install the "
            "wheel for Linux on x86-64 or aarch64, or build from source"
        )

    return refuse


def _coo_to_csr(src, dst, num_src, num_dst, with_loops, max_edges, backward):
    """Does what the operator of csrc/torch/cpu_structure.cpp does, but never makes a plan."""
    src, dst = src if dst is None else (src, dst)
    src, dst = src.long(), dst.long()
    given = torch.arange(src.numel())
    if with_loops:
        given = (src != dst).nonzero().flatten()
        ends = src, dst
        src, dst = src[given], dst[given]
    else:
        ends = src, dst
    ranges = [
        int(f(x)) if x.numel() else none for x in ends for f, none in ((torch.amin, 0), (torch.amax, -1))
    ]
    high = ranges[1] + 1, ranges[3] + 1
    if num_src < 0 and num_dst < 0:
        num_src = num_dst = max(high)
    num_src, num_dst = high[0] if num_src < 0 else num_src, high[1] if num_dst < 0 else num_dst
    packed = _header(ranges, by_src=False)
    if (
        min(ranges[0], ranges[2]) < 0
        or high[0] > num_src
        or high[1] > num_dst
        or max(num_src, num_dst) >= 2**31
    ):
        return 0, -1, packed, None, None, None, None
    edge_map = None
    if with_loops:
        loops = torch.arange(min(num_src, num_dst))
        edge_map = torch.cat([given, torch.full_like(loops, -1)])
        src, dst = torch.cat([src, loops]), torch.cat([dst, loops])
    by_src = _rises(src) and not _rises(dst)
    rows, cols, num_rows = (src, dst, num_src) if by_src else (dst, src, num_dst)
    packed, eids = _header(ranges, by_src), None
    if not _rises(rows):
        rows, order = rows.sort(stable=True)
        cols, eids = cols[order], order.int()
    return 0, src.numel(), packed, edge_map, _indptr(rows, num_rows), cols.int(), eids


def _header(ranges: list[int], by_src: bool) -> Tensor:
    numbers = *ranges, int(by_src), *_NO_SIDES, *_NO_SIDES
    return torch.frombuffer(bytearray(struct.pack(f"{len(numbers)}q", *numbers)), dtype=torch.int32)


def _rises(x: Tensor) -> bool:
    return bool((x[1:] >= x[:-1]).all())


def _indptr(rows: Tensor, num_rows: int) -> Tensor:
    return torch.cat([rows.new_zeros(1), rows.bincount(minlength=num_rows).cumsum(0)])


def _transpose_csr(indptr, indices, eids, num_cols, need_eids):
    rows = torch.repeat_interleave(torch.arange(indptr.numel() - 1), indptr.diff())
    cols, order = indices.long().sort(stable=True)
    found = order.int() if eids is None else eids[order]
    return _indptr(cols, num_cols), rows[order].int(), found if need_eids else found[:0]
