"""Errors of layers, which name the layer, the argument, what was expected, what came and what to do."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.eager import in_autocast
from ._terms import plain_linear


class DGLError(Exception):
    """Raised by :mod:`dfgnn.compat`, and by layers of DGL's names, where DGL raises its own DGLError."""


# Names of arguments of torch_geometric's layers -> the names in DGL's layers; and the inverse.
_DGL_NAMES = {
    "in_channels": "in_feats",
    "out_channels": "out_feats",
    "heads": "num_heads",
    "dropout": "attn_drop",
}
_PYG_NAMES = {theirs: name for name, theirs in _DGL_NAMES.items()}


def check_constructor(init: Callable[..., None]) -> Callable[..., None]:
    """``init`` of a layer, which first checks what PyTorch would complain of much later, or not at all."""
    parameters = list(inspect.signature(init).parameters)

    @functools.wraps(init)
    def checked(self, *args, **kwargs):
        layer = type(self).__name__
        for name in kwargs:
            _check_name(layer, name, parameters)
        options = dict(zip(parameters[1:], args)) | kwargs
        for name in ("heads", "num_heads"):
            if name in options:
                _check_heads(layer, name, options[name])
        activation = options.get("activation")
        if activation is not None and not callable(activation):
            raise TypeError(
                f"{layer}: activation: expected a function such as torch.nn.functional.relu, a module or "
                f"None, got {activation!r}"
            )
        init(self, *args, **kwargs)

    return checked


def _check_name(layer: str, name: str, parameters: list[str]) -> None:
    if name in parameters:
        return
    for names, here, there in (
        (_DGL_NAMES, "DGL's", "torch_geometric's layers are in dfgnn.nn.pyg"),
        (_PYG_NAMES, "torch_geometric's", "DGL's layers are in dfgnn.nn"),
    ):
        if names.get(name) in parameters:
            raise TypeError(
                f"{layer}: {name}: this layer has {here} arguments, among which it is called {names[name]}; "
                f"{there}"
            )


def _check_heads(layer: str, name: str, heads: Any) -> None:
    try:
        number = operator.index(heads)
    except TypeError:
        raise TypeError(f"{layer}: {name}: expected an integer, got {heads!r}") from None
    if number < 1:
        raise ValueError(f"{layer}: {name}: expected at least 1, got {number}")


def wrong_argument(
    layer: nn.Module | str, argument: str, expected: str, got: Any, kind: type[Exception] = ValueError
) -> Exception:
    """The error of an argument that is not as expected. layer: a layer, or its name."""
    where = layer if isinstance(layer, str) else type(layer).__name__
    return kind(f"{where}: {argument}: expected {expected}, got {got}")


def wrong_features(layer: nn.Module, name: str, x: Any, shapes: str) -> TypeError:
    """The error of features that are no floating-point tensor. shapes: the expected ones, in words."""
    where = f"{type(layer).__name__}: {name}: expected"
    if not isinstance(x, Tensor):
        return TypeError(f"{where} a tensor {shapes}, got {type(x).__name__}")
    where = f"{where} float32, float64, float16 or bfloat16, got {x.dtype}"
    if x.dtype in (torch.int32, torch.int64) and x.dim() == 2 and len(x) == 2:
        return TypeError(f"{where} {list(x.shape)}, which looks like an edge_index: are the two swapped?")
    return TypeError(f"{where}; convert it with {name}.float()")


def projected(layer: nn.Module, name: str, linear: nn.Module, x: Tensor) -> Tensor:
    """``linear(x)``, where x is the argument ``name`` of a layer: if it does not fit, the error names it."""
    check_fits(layer, name, linear, x)
    return linear(x)


def check_fits(layer: nn.Module, name: str, linear: nn.Module, x: Tensor) -> None:
    """Raise an error that names the argument where ``linear(x)`` would raise one that does not. A layer that
    runs as one autograd function need not call it: its conditions (`nn.fused`) exclude such x."""
    plain = None if torch.compiler.is_compiling() else plain_linear(linear)
    if plain is None:
        return
    check_takes(layer, name, plain[0], x)


def check_takes(layer: nn.Module, name: str, weight: Tensor, x: Tensor) -> None:
    """`check_fits`, given the weight ``[out, in]``, or ``[types, in, out]``, that x is multiplied with."""
    where = f"{type(layer).__name__}: {name}: expected"
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{where} {weight.shape[1]} features per row, as the layer was made for, got {x.shape[-1]} in "
            f"{list(x.shape)}"
        )
    if x.device != weight.device:
        raise ValueError(f"{where} device {weight.device}, where the layer's parameters are, got {x.device}")
    if x.dtype != weight.dtype and not in_autocast(x):
        raise TypeError(
            f"{where} {weight.dtype}, as the layer's parameters, got {x.dtype}; convert one of them, with "
            f"{name}.to({weight.dtype}) or layer.to({x.dtype})"
        )
