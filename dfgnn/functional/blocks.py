"""Attention among all pairs within blocks of rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..engine.argument_checks import FeatureChecker
from ..runtime import eager, library
from ..runtime import ops as _ops
from ..runtime import torch_internals as internals
from ..runtime.attention_options import AttentionResult, BlockOptions, public
from . import block_operators, block_pairs

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NAME = "block_attention"


# fmt: off
@overload
def block_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, key_offsets: Tensor | None = ..., *,
    scale: float | Tensor | None = ..., return_attention: Literal[False] = ...,
    **options: Unpack[BlockOptions],
) -> Tensor: ...
@overload
def block_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, key_offsets: Tensor | None = ..., *,
    scale: float | Tensor | None = ..., return_attention: Literal[True],
    **options: Unpack[BlockOptions],
) -> AttentionResult: ...
@overload
def block_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, key_offsets: Tensor | None = ..., *,
    scale: float | Tensor | None = ..., return_attention: bool, **options: Unpack[BlockOptions],
) -> Tensor | AttentionResult: ...
# fmt: on
@public(BlockOptions)
def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    key_offsets: Tensor | None = None,
    *,
    scale: float | Tensor | None = None,
    key_bias: Tensor | None = None,
    pair_bias: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    **options: Any,
) -> Any:
    r"""Dot-product attention among all pairs within ragged blocks: the graphs of a batch, the neighbours of
    an atom, the cells of a window.

    .. math::
        s_{ij} = \mathrm{scale} \; q_i \cdot k_j + b_j + B_{ij}, \quad
        \mathrm{out}_i = \sum_{j \in \mathrm{block}(i)} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, v_j

    with the dropout mask m_ij in {0, 1 / (1 - p)}. Nothing is padded to the longest block.

    Args:
        query: q [N, H, D]; float32, float64, float16 or bfloat16. Sums run in float32 (float64 for float64).
        key: k [M, H, D], same dtype.
        value: v [M, H, Dv], same dtype.
        offsets: int32 or int64 [B + 1], on the same device: the queries of block b are the rows
            ``offsets[b]`` to ``offsets[b + 1] - 1``. Rows before the first block or behind the last one get
            0. Blocks may be empty. As many offsets as rows, that rise by at most 1 and end before the last
            row, are taken for a batch vector; those that begin above 0 and add up to the rows for sizes.
        key_offsets: likewise, of key and value; None: the same offsets.
        scale: factor of the dot product, a number or a tensor [], of which there is a gradient; None for
            1 / sqrt(D).
        {options}

    **Memory** is O(N + M), forward, backward and in second derivatives: no pair is stored, nor an index of
    one. But ``pair_bias``, ``softcap``, ``dropout_p`` and ``return_attention`` need numbers of pairs, and
    forward mode a formula: the P pairs are then the edges of a graph (:func:`dot_attention`) of up to 16
    bytes each, cached as long as the offsets live. A number [P, H] is stored for each of these that is passed
    in or asked for, for a key_bias and, with softcap, for scores. On CUDA heads of more than 128 columns (64
    in float64) go this way, too.

    Returns:
        out [N, H, Dv], or an AttentionResult, with the attention [P, H] in the order of pair_bias. A query
        without keys, or whose scores are all -inf, gets 0.

    Differentiable twice in all tensors, and deterministic. On CUDA, float32 is multiplied on tensor cores as
    sums of two numbers (3xTF32), with errors of a few roundings of float32, and the host does not read the
    values of offsets, so that a captured CUDA graph may be replayed with others: ones that decrease or exceed
    the rows, a batch vector and sizes are not reported, but nothing is read or written out of bounds. Where
    pairs are stored, the host reads offsets once, and a captured graph keeps the pairs of those that it was
    captured with.

    Raises:
        TypeError, ValueError: an argument is not as described.
        RuntimeError: on the CPU, or where pairs are stored, offsets decrease, exceed the rows, or are a batch
            vector or sizes.
        NotImplementedError: third derivatives where pairs are not stored.

    Example::

        offsets = torch.tensor([0, 3, 3, 10])  # blocks of 3, 0 and 7 rows
        q, k, v = (torch.randn(10, 4, 16) for _ in range(3))
        out = dfgnn.functional.block_attention(q, k, v, offsets)
    """
    check = FeatureChecker(_NAME, "query", query)
    check.tensor("query", query, [(None, None, None)])
    heads, dim = query.shape[1:]
    check.tensor("key", key, [(None, heads, dim)])
    keys, of_numbers = key.shape[0], (check.dtype, check.acc)
    check.tensor("value", value, [(keys, heads, None)])
    if query.device.type not in ("cpu", "cuda", "meta"):
        raise check.error(ValueError, "query", "device cpu or cuda", query.device)
    _check_offsets(check, "offsets", offsets, None)
    if key_offsets is None:
        if keys != query.shape[0]:
            what = f"a tensor, as there are {query.shape[0]} queries and {keys} keys"
            raise check.error(ValueError, "key_offsets", what, f"None; {block_pairs.MEANING}")
        key_offsets = offsets
    else:
        _check_offsets(check, "key_offsets", key_offsets, offsets.shape[0])
    bias = None
    if key_bias is not None:
        check.tensor("key_bias", key_bias, [(keys,), (keys, heads)], of_numbers)
        bias = _ops.as_type(key_bias, check.acc)
        bias = bias.unsqueeze(1).expand(keys, heads) if bias.dim() == 1 else bias
    if sink is not None:
        check.tensor("sink", sink, [(heads,)], of_numbers)
    if isinstance(scale, Tensor):
        check.tensor("scale", scale, [()], of_numbers)
        query, scale = (query * scale).to(query.dtype), 1.0
    scale = 1 / math.sqrt(dim) if scale is None else _number(check, "scale", scale)
    size = value.shape[2]
    if softcap is not None:
        softcap = _number(check, "softcap", softcap)
        if not 0 < softcap < math.inf:
            raise check.error(ValueError, "softcap", "a finite number above 0 or None", softcap)
    num_pairs = None
    if pair_bias is not None:
        check.tensor("pair_bias", pair_bias, [(None, heads)], of_numbers)
        num_pairs = pair_bias.shape[0]
    of_pairs = num_pairs is not None or softcap is not None or _of_pairs(**options) or eager.in_forward_mode()
    if of_pairs or not block_operators.takes(query.device, query.dtype, max(dim, size)):
        graph = block_pairs.graph_of_pairs(offsets, key_offsets, query.shape[0], keys, num_pairs)
        if pair_bias is not None:
            check.tensor("pair_bias", pair_bias, [(graph.num_edges, heads)], of_numbers)
        elif query.is_meta and options.get("return_attention"):
            raise check.error(
                ValueError, "return_attention", "False on the device meta, or a pair_bias", True
            )
        given = query, key, value, scale, bias, pair_bias, softcap
        return block_pairs.attention(graph, *given, sink=sink, function=_NAME, **options)
    if not library.compiled:
        return _by_reference(query, key, value, offsets, key_offsets, scale=scale, key_bias=bias, sink=sink)
    if query.is_cuda:
        query, key, value = _for_cuda(query, key, value)
    inputs = block_operators.Inputs(query, key, value, offsets, key_offsets, bias)
    out, stats = _attention(inputs, scale)
    out = out[..., :size] if out.shape[2] > size else out
    if sink is None:
        return out
    top, log_sum = stats.unbind(-1)
    return (out * torch.sigmoid(top - sink + log_sum).unsqueeze(-1)).to(out.dtype)


def _attention(inputs: block_operators.Inputs, scale: float) -> tuple[Tensor, Tensor]:
    if internals.is_dynamo_recording():
        return block_operators.attention(inputs, scale)
    try:
        return block_operators.attention(inputs, scale)
    except RuntimeError as error:
        ends = inputs.offsets, inputs.key_offsets, inputs.query.shape[0], inputs.key.shape[0]
        wrong = block_pairs.wrong_offsets(*ends) if "offsets: expected" in str(error) else None
        raise (wrong or error) from None


def _by_reference(query: Tensor, key: Tensor, value: Tensor, *offsets: Tensor, **options: Any) -> Tensor:
    """The result without kernels, with sums in the accumulation type."""
    of_queries, of_keys = offsets
    block_pairs.check_offsets(of_queries, of_keys, len(query), len(key))
    wide: Any = [_ops.as_type(x, _ops.acc_type(query.dtype)) for x in (query, key, value)]
    out: Tensor = reference.block_attention(*wide, *offsets, **options)
    return _ops.as_type(out, query.dtype)


def _of_pairs(
    dropout_p: float = 0.0, return_attention: bool = False, generator: torch.Generator | Tensor | None = None
) -> bool:
    """Whether these options need a number per pair."""
    return dropout_p != 0 or return_attention


def _number(check: FeatureChecker, name: str, x: Any) -> float:
    if isinstance(x, Tensor):
        raise check.error(TypeError, name, "a number", "Tensor")
    check.number(name, x)
    return float(x)


def _for_cuda(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with heads of the next size for which there are kernels, padded with zeros."""
    library.require_cuda_library()
    size = block_operators.cuda_size(tensors[0].dtype, max(x.shape[2] for x in tensors))
    assert size is not None
    return tuple(x if x.shape[2] == size else F.pad(x, (0, size - x.shape[2])) for x in tensors)


def _check_offsets(check: FeatureChecker, name: str, x: Any, count: int | None) -> None:
    check.tensor(name, x, [getattr(x, "shape", ())], (torch.int32, torch.int64))
    if x.dim() != 1 or x.shape[0] == 0 or (count is not None and x.shape[0] != count):
        size = "blocks + 1" if count is None else f"{count}] like offsets, [blocks + 1"
        raise check.error(ValueError, name, f"shape [{size}]", f"{list(x.shape)}; {block_pairs.MEANING}")
