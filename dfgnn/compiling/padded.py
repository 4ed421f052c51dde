"""Recognises attention within padded batches: torch's own attention with a mask of keys, as it follows
torch_geometric's ``to_dense_batch``.

All rows of a sequence attend to its keys that are not masked. That is attention within blocks: the blocks of
the queries are the sequences, those of the keys reach to the last one that is not masked, and the mask is a
bias of the keys. Rows that are there to pad get what they got before.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from ..functional import block_attention, block_operators
from ..runtime import ops as _ops
from ..runtime.eager import in_autocast
from .operations import same, shape, value

FORM = "block_attention"


def call_for(node: Node) -> tuple[Any, tuple] | str | None:
    """(The function, its arguments) that take the place of a node; the reason if they cannot; None if the
    node is no attention with a mask of keys."""
    if node.op != "call_function":
        return None
    if node.target is F.multi_head_attention_forward:
        return _of_module(node)
    if node.target is F.scaled_dot_product_attention:
        return _of_heads(node)
    return None


def _of_module(node: Node) -> tuple[Any, tuple] | str | None:
    given = _bound(_MODULES, node)
    if not isinstance(given["key_padding_mask"], Node):
        return None
    query, key, val = (given[name] for name in ("query", "key", "value"))
    if len(shape(query)) != 3 or len(shape(key)) != 3:
        return "it has no dimension of batches"
    if given["need_weights"] and any(user.args[1:] != (0,) and user.users for user in node.users):
        return "its weights are asked for"
    if given["attn_mask"] is not None or given["is_causal"]:
        return "it has a mask of pairs"
    if given["dropout_p"] and given["training"]:
        return "its weights have dropout"
    for name in ("bias_k", "bias_v", "add_zero_attn", "use_separate_proj_weight", "static_k", "static_v"):
        if given[name] not in (None, False):
            return f"it has {name}"
    width, heads = given["embed_dim_to_check"], given["num_heads"]
    if not _takes(value(query), width // heads):
        return f"there are no kernels for heads of {width // heads} columns"
    names = "in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias", "key_padding_mask"
    return multi_head, (query, key, val, heads, *(given[name] for name in names))


def _of_heads(node: Node) -> tuple[Any, tuple] | str | None:
    given = _bound(_HEADS, node)
    query, key, val, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    if not isinstance(mask, Node) or given["is_causal"] or len(shape(mask)) != 4 or len(shape(query)) != 4:
        return None
    batch, *ones, keys = shape(mask)
    if not (all(same(n, 1) for n in ones) and same(batch, shape(query)[0]) and same(keys, shape(key)[2])):
        return None  # a mask of pairs or heads
    if given["dropout_p"]:
        return "its weights have dropout"
    if not all(map(same, shape(query)[:2], shape(key)[:2])):
        return "its keys have other heads"
    if not _takes(value(query), shape(query)[3], shape(val)[3]):
        return f"there are no kernels for heads of {shape(query)[3]} columns"
    return of_heads, (query, key, val, mask, given["scale"])


# torch states no signature of the second one, which is a builtin.
_MODULES = inspect.signature(F.multi_head_attention_forward)
_HEADS = inspect.signature(
    lambda query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False: 0
)


def _bound(signature: inspect.Signature, node: Node) -> dict[str, Any]:
    found = signature.bind(*node.args, **node.kwargs)
    found.apply_defaults()
    return found.arguments


def _takes(x: Any, *columns: Any) -> bool:
    """Whether there are kernels for heads of so many columns, which may be symbols."""
    if x.device.type == "cuda" and not all(isinstance(n, int) for n in columns):
        return False
    return x.device.type == "cpu" or block_operators.takes(x.device, x.dtype, max(columns))


# ---- what runs ---------------------------------------------------------------------------------------------


def multi_head(
    query: Tensor,
    key: Tensor,
    val: Tensor,
    heads: int,
    weight: Tensor,
    bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    mask: Tensor,
) -> tuple[Tensor, None]:
    """``torch.nn.functional.multi_head_attention_forward`` of query [L, B, E], key and value [S, B, E]. mask:
    [B, S], bool, True for keys that are not to be seen, or numbers that are added to their scores."""
    rows = [x.transpose(0, 1) for x in (query, key, val)]
    if query is key and key is val:
        projected = F.linear(rows[0], weight, bias).chunk(3, -1)
    else:
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        projected = tuple(map(F.linear, rows, weight.chunk(3), biases))
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in projected)
    out = within_batches(q, k, v, mask, None)
    return F.linear(out.flatten(2), out_weight, out_bias).transpose(0, 1), None


def of_heads(query: Tensor, key: Tensor, val: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` of [B, H, L, D] with a mask [B, 1, 1, S], bool,
    True for keys that are to be seen, or numbers that are added to their scores."""
    mask = mask.flatten(1)
    query, key, val = (x.transpose(1, 2) for x in (query, key, val))
    hidden = ~mask if mask.dtype == torch.bool else mask
    return within_batches(query, key, val, hidden, scale).transpose(1, 2)


def within_batches(query: Tensor, key: Tensor, val: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Attention of query [B, L, H, D] to key and value [B, S, H, D] with a mask [B, S] as `multi_head`'s."""
    batch, rows, keys = query.shape[0], query.shape[1], key.shape[1]
    if in_autocast(query):  # which casts what torch's attention takes
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, val = (x.to(lower) for x in (query, key, val))
    acc = _ops.acc_type(query.dtype)
    bias = mask.to(acc)
    if mask.dtype == torch.bool:
        bias = bias.new_zeros(mask.shape).masked_fill(mask, -math.inf)
    place = torch.arange(1, keys + 1, device=query.device)
    most = ((bias > -math.inf) * place).amax(1)
    # Two blocks of each sequence: all queries and the keys up to the last that is seen; then the other keys.
    begin = torch.arange(batch + 1, device=query.device)
    offsets = torch.stack([begin * rows, (begin + 1) * rows], 1).flatten()[:-1]
    key_offsets = torch.stack([begin * keys, begin * keys + F.pad(most, (0, 1))], 1).flatten()[:-1]
    query, key, val = (x.flatten(0, 1) for x in (query, key, val))
    bias = bias.flatten()
    out = block_attention(query, key, val, offsets, key_offsets, key_bias=bias, scale=scale)
    return out.unflatten(0, (batch, rows))
