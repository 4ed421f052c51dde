"""Where a library's own forward runs instead of the fused one: how that is found out and said."""

from __future__ import annotations

import warnings

_warned: set[tuple[type, str]] = set()

# What does not enter into the results of a layer that exists.
_NO_MATTER = ("__init__", "__repr__", "reset_parameters", "extra_repr")


class FallbackWarning(UserWarning):
    """A layer runs its library's own forward: the fused one does not do what it is set up for."""


def warn(cls: type, library: str, reason: str) -> None:
    """Once per class and reason; to be called by what a layer's ``forward`` calls."""
    if (cls, reason) not in _warned:
        _warned.add((cls, reason))
        warnings.warn(
            f"{cls.__module__}.{cls.__qualname__} runs {library}'s own forward: {reason}",
            FallbackWarning,
            stacklevel=6,  # past forward and what calls it: where the module is called
        )


def warned() -> frozenset[tuple[type, str]]:
    """The classes that have run their library's own forward so far, and why."""
    return frozenset(_warned)


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


def is_from(package: str, method: object) -> bool:
    """Whether this function was written in the package, or by it at run time; true of what is no function.

    Its globals tell: functools.wraps copies everything else.
    """
    method = getattr(method, "__func__", method)  # of a staticmethod or classmethod
    if not callable(method) or isinstance(method, type):
        return True
    home = getattr(method, "__globals__", {}).get("__name__", "")
    return home.split(".")[0] == package
