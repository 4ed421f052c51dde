"""Heads with the padding that CUDA's kernels need, in as few launches as possible.

The kernels load 16 bytes at a time, so that a head of another size gets zero columns at its end: in the
weights that project the features, or in the projected rows. On the CPU nothing is padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import ops as _ops

#: Bytes that a CUDA kernel loads at a time.
LOAD = 16


def padding_of(x: Tensor, size: int) -> int:
    """How many columns are added to a head of this size, for x's dtype and device."""
    return -size % (LOAD // x.element_size()) if x.is_cuda else 0


_constants: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}


def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A cached tensor without dimensions."""
    found = _constants.get((value, dtype, device))
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # While a CUDA graph is captured the tensor is not cached: it has no value before the first
            # replay.
            return torch.full((), value, dtype=dtype, device=device)
        # Made on the CPU and copied: the copy waits until it is done, so that any stream may read the tensor.
        with torch.inference_mode(False):
            found = _constants[value, dtype, device] = torch.full((), value, dtype=dtype).to(device)
    return found


def extended(x: Tensor, dim: int, more: int) -> Tensor:
    """x with ``more`` zeros appended in this dimension: one launch, where ``F.pad`` takes two."""
    shape = list(x.shape)
    shape[dim] = more
    return torch.cat([x, constant(0, x.dtype, x.device).expand(shape)], dim)


def cut_columns(
    x: Tensor,
    heads: int,
    size: int,
    padding: int,
    more: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Padded rows x without their padding, in this dtype, plus ``more``: rows, padded or not, or one row that
    is added to each. Without padding and ``more`` it only changes the dtype.

    The result is no view: autograd does not let a user modify in place a view that an autograd function made.
    """
    if not padding:
        return x.to(dtype) if more is None else torch.add(x, more, out=x.new_empty(x.shape, dtype=dtype))
    if heads == 1:
        rows = x[:, :size]
        rows = rows.clone() if more is None else torch.add(rows, more[..., :size])
        return _ops.as_type(rows, x.dtype if dtype is None else dtype)
    result = x.new_empty(len(x), heads * size, dtype=dtype)
    to, rows = result.view(-1, heads, size), x.view(-1, heads, size + padding)[..., :size]
    if more is None:
        to.copy_(rows)
    else:
        width = size if more.shape[-1] == heads * size else size + padding
        torch.add(rows, more.view(-1, heads, width)[..., :size], out=to)
    return result


# The next functions treat a single head apart, without the views that several heads need: on a small graph
# the time of each view counts.


def pad_columns(x: Tensor, heads: int, size: int, padding: int) -> Tensor:
    """Rows ``[n, heads * size]`` with padding after each head."""
    if heads == 1:
        return extended(x, x.dim() - 1, padding)
    return extended(x.reshape(-1, heads, size), 2, padding).flatten(1)


def pad_rows(x: Tensor, size: int, padding: int) -> Tensor:
    """A weight ``[heads * size, F]`` or bias ``[heads * size]`` with rows of zeros, so that its projection is
    padded."""
    if x.shape[0] == size:
        return extended(x, 0, padding)
    return extended(x.view(-1, size, *x.shape[1:]), 1, padding).flatten(0, 1)


def cut_rows(x: Tensor, size: int, padding: int) -> Tensor:
    """The gradient of the argument of `pad_rows`; x itself without padding."""
    if not padding:
        return x
    if x.shape[0] == size + padding:
        return x[:size]
    return x.unflatten(0, (-1, size + padding))[:, :size].flatten(0, 1)
