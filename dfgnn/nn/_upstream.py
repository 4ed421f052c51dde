"""The class of DGL or torch_geometric that a layer stands for, and whether its code is as the library wrote
it."""

from __future__ import annotations

import sys
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch.nn.functional as F

# Methods that may be replaced, because they do not change the results of an existing layer.
_NO_MATTER = ("__init__", "__repr__", "reset_parameters", "extra_repr")


def upstream(cls: type, package: str) -> type | None:
    """The class of this package that ``cls`` is, or is derived from."""
    return next((base for base in cls.__mro__ if base.__module__.startswith(f"{package}.")), None)


def replaced_method(cls: type, package: str) -> str | None:
    """The first method of a class of a library, or of its bases there, whose code was written elsewhere."""
    for base in cls.__mro__:
        if base.__module__.split(".")[0] == package:
            for name, method in vars(base).items():
                if name not in _NO_MATTER and not is_from(package, method):
                    return name
    return None


class Called:
    """The forward of a library's class and the functions that its methods call by their names, in its module
    and in torch.nn.functional.

    ``now()`` is the same tuple until a program replaces one of them, as tools do that change what all layers
    compute.
    """

    _in_torch = "linear", "dropout", "leaky_relu", "normalize"
    _of_torch = attrgetter(*_in_torch)

    def __init__(self, cls: Any):
        self._fine: tuple[Any, ...]
        self._cls, self._module = cls, vars(sys.modules[cls.__module__])
        methods = [
            x for name, x in vars(cls).items() if isinstance(x, FunctionType) and name not in _NO_MATTER
        ]
        called = {name for x in methods for name in x.__code__.co_names}
        names = sorted(name for name in called if isinstance(self._module.get(name), FunctionType))
        self._of_module = itemgetter(*names, "__name__", "__name__")  # at least two names, to get a tuple
        self._names = "forward", *names, "__name__", "__name__", *self._in_torch
        self._known, self._fine = self.now(), ()

    def now(self) -> tuple[Any, ...]:
        return self._cls.forward, *self._of_module(self._module), *Called._of_torch(F)

    def replaced(self) -> str | None:
        """The name of the first function that was replaced since this object was made, or that was another
        package's already then."""
        now = self.now()
        if now == self._fine:
            return None
        package = self._cls.__module__.split(".")[0]
        for name, known, x in zip(self._names, self._known, now):
            if _is_piece(x) or (_is_piece(known) and is_from(package, x)):
                continue
            genuine = is_from(package, x) or is_from("torch", x)
            # If `known` was another package's replacement already, a genuine x is the original put back.
            if not genuine or (x is not known and (is_from(package, known) or is_from("torch", known))):
                return name
        self._fine = now
        return None


def _is_piece(x: object) -> bool:
    """Whether this is a replacement by `dfgnn.patch`, which computes the same."""
    return getattr(x, "__module__", None) == "dfgnn.switch.pieces"


def is_from(package: str, method: object) -> bool:
    """Whether this function was written in the package, or by it at run time; True if it is no function.

    Its globals tell: functools.wraps copies everything else.
    """
    method = getattr(method, "__func__", method)  # the function inside a staticmethod or classmethod
    if not callable(method) or isinstance(method, type):
        return True
    if isinstance(method, BuiltinFunctionType):
        home = method.__module__ or ""
    else:
        home = getattr(method, "__globals__", {}).get("__name__", "")
    return home.split(".")[0] == package
