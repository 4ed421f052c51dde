"""Attention among all pairs within blocks of rows."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.argument_checks import DTYPES, wrong_shape
from ..runtime import library
from ..runtime import ops as _ops
from . import block_operators

_NAME = "block_attention"


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    key_offsets: Tensor | None = None,
    *,
    key_bias: Tensor | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    r"""Dot-product attention among all pairs within ragged blocks: the graphs of a batch, the neighbours of
    an atom, the cells of a window.

    .. math::
        \mathrm{out}_i = \sum_{j \in \mathrm{block}(i)}
        \mathrm{softmax}_j(\mathrm{scale} \; q_i \cdot k_j + b_j) \, v_j

    No pair is stored, and no index of one: memory is O(N + M), forward, backward and in second derivatives,
    whatever the lengths of the blocks. Nothing is padded to the longest one.

    Args:
        query: [N, H, D]; float32, float64, float16 or bfloat16. Sums run in float32 (float64 for float64).
        key: [M, H, D], same dtype.
        value: [M, H, Dv], same dtype.
        offsets: int32 or int64 [B + 1], on the same device: the queries of block b are the rows
            ``offsets[b]`` to ``offsets[b + 1] - 1``. Rows before the first block or behind the last one get
            0. Blocks may be empty.
        key_offsets: likewise, of key and value; None: the same offsets.
        key_bias: b [M], or [M, H] for a bias per head, in the dtype of the features or of the sums: the
            logarithm of a cut-off, or -inf for a key that is not to be seen.
        scale: factor of the dot product; None for 1 / sqrt(D).
        sink: [H], a score per head in every softmax that brings no value, in one of these dtypes.

    Returns:
        out [N, H, Dv]. A query without keys, or whose keys all have the bias -inf, gets 0.

    Differentiable twice in query, key, value, key_bias and sink, and deterministic. On CUDA, float32 is
    multiplied on tensor cores as sums of two numbers (3xTF32), with errors of a few roundings of float32, and
    the host does not read the values of offsets, so that a captured CUDA graph may be replayed with others:
    ones that decrease or exceed the rows are not reported, but nothing is read or written out of bounds.

    Raises:
        TypeError, ValueError: an argument is not as described.
        RuntimeError: on the CPU, offsets decrease or exceed the rows.
        NotImplementedError: third derivatives, and on CUDA heads of more than 128 columns (64 in float64).

    Example::

        offsets = torch.tensor([0, 3, 3, 10])  # blocks of 3, 0 and 7 rows
        q, k, v = (torch.randn(10, 4, 16) for _ in range(3))
        out = dfgnn.functional.block_attention(q, k, v, offsets)
    """
    _check_features(query, key, value)
    _check_offsets("offsets", offsets, query.device, None)
    if key_offsets is None:
        if key.shape[0] != query.shape[0]:
            raise _error(
                ValueError,
                "key_offsets",
                f"a tensor, as there are {query.shape[0]} queries and {key.shape[0]} keys",
                None,
            )
        key_offsets = offsets
    else:
        _check_offsets("key_offsets", key_offsets, query.device, offsets.shape[0])
    keys, heads, dim = key.shape
    bias = None
    if key_bias is not None:
        _check_numbers("key_bias", key_bias, query, [(keys,), (keys, heads)])
        bias = _ops.as_type(key_bias, _ops.acc_type(query.dtype))
        bias = bias.unsqueeze(1).expand(keys, heads) if bias.dim() == 1 else bias
    if sink is not None:
        _check_numbers("sink", sink, query, [(heads,)])
    if isinstance(scale, (str, bytes)):
        raise _error(TypeError, "scale", "a number", type(scale).__name__)
    scale = 1 / math.sqrt(dim) if scale is None else float(scale)
    size = value.shape[2]
    if query.is_cuda:
        query, key, value = _for_cuda(query, key, value)
    inputs = block_operators.Inputs(query, key, value, offsets, key_offsets, bias)
    out, stats = block_operators.attention(inputs, scale)
    out = out[..., :size] if out.shape[2] > size else out
    if sink is None:
        return out
    top, log_sum = stats.unbind(-1)
    return (out * torch.sigmoid(top - sink + log_sum).unsqueeze(-1)).to(out.dtype)


def _for_cuda(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with heads of the next size for which there are kernels, padded with zeros."""
    library.require_cuda_library()
    dtype, largest = tensors[0].dtype, max(x.shape[2] for x in tensors)
    size = block_operators.cuda_size(dtype, largest)
    if size is None:
        most = block_operators.CUDA_SIZES[-2 if dtype == torch.float64 else -1]
        raise NotImplementedError(
            f"{_NAME}: query, value: on CUDA heads have at most {most} columns in {dtype}, got {largest}; "
            "dfgnn.functional.dot_attention over a Graph of the pairs takes others"
        )
    return tuple(x if x.shape[2] == size else F.pad(x, (0, size - x.shape[2])) for x in tensors)


def _error(kind: Any, argument: str, expected: str, got: Any) -> Exception:
    error: Exception = kind(f"{_NAME}: {argument}: expected {expected}, got {got}")
    return error


def _check_features(query: Any, key: Any, value: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise _error(TypeError, name, "a tensor", type(x).__name__)
        if x.layout != torch.strided:
            raise _error(TypeError, name, "a dense tensor", f"layout {x.layout}")
    if query.dtype not in DTYPES:
        raise _error(TypeError, "query", "float32, float64, float16 or bfloat16", query.dtype)
    _check_shape("query", query, [(None, None, None)])
    heads, dim = query.shape[1:]
    _check_shape("key", key, [(None, heads, dim)])
    _check_shape("value", value, [(key.shape[0], heads, None)])
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise _error(TypeError, name, f"{query.dtype} (the query's)", x.dtype)
        if x.device != query.device:
            raise _error(ValueError, name, f"device {query.device} (the query's)", x.device)
    if query.device.type not in ("cpu", "cuda"):
        raise _error(ValueError, "query", "device cpu or cuda", query.device)


def _check_shape(name: str, x: Tensor, shapes: list[tuple[int | None, ...]]) -> None:
    for shape in shapes:
        if x.dim() == len(shape) and all(
            n == wanted if wanted is not None else n > 0 or not k
            for k, (n, wanted) in enumerate(zip(x.shape, shape))
        ):
            return
    raise ValueError(f"{_NAME}: {name}: {wrong_shape(name, x, shapes)}")


def _check_numbers(name: str, x: Any, query: Tensor, shapes: list[tuple[int | None, ...]]) -> None:
    if not isinstance(x, Tensor):
        raise _error(TypeError, name, "a tensor", type(x).__name__)
    dtypes = dict.fromkeys((query.dtype, _ops.acc_type(query.dtype)))
    if x.dtype not in dtypes:
        raise _error(TypeError, name, " or ".join(map(str, dtypes)), x.dtype)
    if x.device != query.device:
        raise _error(ValueError, name, f"device {query.device} (the query's)", x.device)
    _check_shape(name, x, shapes)


def _check_offsets(name: str, x: Any, device: torch.device, count: int | None) -> None:
    if not isinstance(x, Tensor):
        raise _error(TypeError, name, "a tensor", type(x).__name__)
    if x.dtype not in (torch.int32, torch.int64):
        raise _error(TypeError, name, "int32 or int64", x.dtype)
    if x.device != device:
        raise _error(ValueError, name, f"device {device} (the query's)", x.device)
    if x.dim() != 1 or x.shape[0] == 0 or (count is not None and x.shape[0] != count):
        raise _error(ValueError, name, f"shape [{'blocks + 1' if count is None else count}]", list(x.shape))
