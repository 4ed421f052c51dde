"""What tensors hold, and where: for `Constants`."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..runtime import torch_internals as internals
from ..runtime.ops import aten


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in a list, and in lists within it."""
    found: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (tuple, list)):
            found += tensors_in(x)
    return found


def each_tensor(change: Callable[[Tensor], Tensor], out: Any) -> Any:
    """The results of an operation with all tensors changed."""
    if isinstance(out, (tuple, list)):
        return type(out)([each_tensor(change, x) for x in out])
    return change(out) if isinstance(out, Tensor) else out


def kept(x: Tensor) -> Tensor:
    """A tensor to store or return: of numbers that may get gradients not the tensor that gets them."""
    return x.detach() if x.is_floating_point() or x.is_complex() else x


def is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided and not x.is_meta


def place_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def reference_to(x: Tensor) -> Any:
    """Keeps the address of x's memory, not its numbers, from being used again."""
    return internals.StorageWeakRef(x.untyped_storage())


def region_of(x: Tensor) -> tuple:
    return x.dtype, x.device, x.shape, x.stride(), x.storage_offset()


def at_region(x: Tensor, region: tuple) -> Tensor:
    """The tensor of another region of x's memory."""
    dtype, device, shape, strides, offset = region
    return torch.empty(0, dtype=dtype, device=device).set_(x.untyped_storage(), offset, shape, strides)


def is_all(x: Tensor) -> bool:
    """Whether x is all of its memory."""
    return x.is_contiguous() and x.nbytes == x.untyped_storage().nbytes()


def bytes_of(x: Tensor) -> Tensor:
    data = x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return data.reshape(-1).view(torch.uint8)


def digest(x: Tensor) -> bytes:
    return hashlib.blake2b(bytes_of(x).numpy().tobytes()).digest()


def crosses(func: Any, given: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an operation copies to another device."""
    if func is aten.copy_.default:
        return given[0].device != given[1].device
    device = kwargs.get("device")
    return device is not None and bool(given) and torch.device(device).type != given[0].device.type


# Multipliers that spread each word over all bits (2^64 over the golden ratio, and another odd number).
_GOLDEN, _ODD = -7046029254386353131, -4658895280553007687


def fingerprint(x: Tensor) -> tuple:
    """Numbers that differ for tensors of other contents, in all likelihood."""
    data = bytes_of(x)
    size = len(data) // 8 * 8
    found = [tuple(x.shape), *data[size:].tolist()]
    for part in data[:size].view(torch.int64).split(2**24) if size else ():
        mixed = part + torch.arange(len(part), device=x.device) * _GOLDEN
        mixed = (mixed ^ (mixed >> 32)) * _ODD
        found.append(int((mixed ^ (mixed >> 29)).sum()))
    return tuple(found)


def fill(tensors: list[Tensor]) -> None:
    """Writes numbers that hardly any program writes."""
    for x in tensors:
        memory = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
        memory.fill_(1 if x.dtype == torch.bool else 0xA5)


def random_on_host() -> Any:
    """The states of Python's and NumPy's random numbers."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy and pickle.dumps(numpy.random.get_state(legacy=False))


def user_line() -> str:
    """The innermost line that is not of PyTorch or dfgnn."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "dfgnn", "contextlib"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "a line of the backward pass"
