"""Accelerates subclasses of a library's layers that only wrap its ``forward``, for :func:`dfgnn.accelerate`.

A layer of ``class Own(TransformerConv)``, whose forward calls ``super().forward(...)``, gets a new class with
bases (Own, dfgnn's TransformerConv): in its method order dfgnn's forward comes after Own's and before the
library's.
"""

from __future__ import annotations

import copyreg
import inspect
import threading
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

#: Methods that a subclass may override: they call the layer, or do not change what it computes.
_MAY_OVERRIDE = frozenset(("__init__", "forward", "reset_parameters", "extra_repr", "__repr__"))
# Attributes that every class has, and those that torch_geometric generates for each.
_OF_EVERY_CLASS = frozenset(
    (
        *("__module__", "__qualname__", "__name__", "__doc__", "__dict__", "__weakref__", "__slots__"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
        *("__static_attributes__", "__firstlineno__", "__parameters__", "__orig_bases__"),
        *("__abstractmethods__", "_abc_impl"),
        *("_orig_propagate", "_orig_edge_updater", "_jinja_propagate", "_jinja_edge_updater"),
    )
)
#: The attribute of a combined class that holds (the subclass, dfgnn's layer).
_PAIR = "_dfgnn_pair"

_made: WeakValueDictionary[tuple[type, type], type] = WeakValueDictionary()
_lock = threading.Lock()


def pair_of(cls: type) -> tuple[type, type] | None:
    """(the subclass, dfgnn's layer) of a combined class; None for any other class."""
    return getattr(cls, _PAIR, None)


def made_of(theirs: type, ours: type) -> type:
    """The combined class of both: the same one as long as it is in use."""
    with _lock:
        made = _made.get((theirs, ours))
        if made is None:
            namespace: dict[str, Any] = {
                "__module__": theirs.__module__, "__qualname__": theirs.__qualname__,
                "__doc__": theirs.__doc__, "__reduce_ex__": _reduce_ex, _PAIR: (theirs, ours),
            }  # fmt: skip
            if hasattr(ours, "__prepare_scriptable__"):
                namespace["__prepare_scriptable__"] = _prepare_scriptable
            made = _made[theirs, ours] = type(theirs)(theirs.__name__, (theirs, ours), namespace)
        return made


def made_for(theirs: type) -> type | None:
    """dfgnn's layer with which this subclass was combined; None if it was not."""
    return next((ours for cls, ours in list(_made) if cls is theirs), None)


def _blank(theirs: type, ours: type) -> Any:
    return copyreg.__newobj__(made_of(theirs, ours))  # type: ignore[attr-defined]


def _reduce_ex(self: Any, protocol: int) -> Any:
    """``__reduce_ex__`` of combined classes, which cannot be pickled by name."""
    how, args, *rest = super(pair_of(type(self))[1], self).__reduce_ex__(max(protocol, 2))  # type: ignore
    if how is copyreg.__newobj__ and pair_of(args[0]) is not None:  # type: ignore[attr-defined]
        how, args = _blank, pair_of(args[0])
    return how, args, *rest


def _prepare_scriptable(self: Any) -> Any:
    """A module with the original class, which TorchScript compiles in place of this one."""
    plain = copyreg.__newobj__(pair_of(type(self))[0])  # type: ignore
    vars(plain).update(vars(self))
    return plain


def why_not(module: nn.Module, base: type, ours: type) -> str | None:
    """Why dfgnn's ``ours`` cannot replace the library's layer ``base`` in a subclass: the method that the
    subclass changes besides its forward. None if it can."""
    cls = type(module)
    own = [c for c in cls.__mro__ if c not in base.__mro__]
    if type(cls) is not type and type(cls).__module__ != "abc":
        return f"its metaclass is {type(cls).__name__}"
    if any(vars(c).get("__slots__") for c in own):
        return "it has __slots__"
    # The classes that make up dfgnn's layer, the library's among them; nn.Module and its bases are left out.
    # A subclass must not override what these define.
    parts = [c for c in ours.__mro__ if c not in nn.Module.__mro__]
    taken = {name for c in parts for name in vars(c)} - _MAY_OVERRIDE - _OF_EVERY_CLASS
    taken |= {"__reduce__", "__reduce_ex__"}
    for name in sorted(taken):
        home = next((c for c in cls.__mro__ if name in vars(c)), None)
        if home in own and not _is_compiled(home, name):
            return f"it overrides {name}"
    for name in sorted(_names_of_instance(module) - _names_of_class(base)):
        value = getattr(ours, name, None)
        if value is None:
            continue
        # An attribute that equals what dfgnn's property of that name computes does no harm.
        same = isinstance(value, property) and vars(module).get(name, value) == _read(module, value)
        if not same:
            return f"it has an attribute {name}, which is a name within dfgnn's {ours.__name__}"
    for c in own:
        if "forward" in vars(c) and not _calls_super(vars(c)["forward"]):
            return f"the forward of {c.__name__} does not call super().forward"
    return None


def _is_compiled(cls: Any, name: str) -> bool:
    """Whether torch_geometric has generated this method for the class, with `propagate` or `edge_updater`."""
    module = getattr(vars(cls)[name], "__module__", None) or ""
    return module in {f"{cls.__module__}_{cls.__name__}_{of}" for of in ("propagate", "edge_updater")}


def _names_of_instance(module: nn.Module) -> set[str]:
    kept = (module._parameters, module._buffers, module._modules)
    return set(vars(module)).union(*kept)


def _names_of_class(cls: type) -> set[str]:
    return {name for c in cls.__mro__ for name in vars(c)} | {"training"}


def _read(module: nn.Module, prop: property) -> Any:
    try:
        return prop.fget(module)  # type: ignore[misc]
    except AttributeError:
        return None


def _calls_super(forward: Any) -> bool:
    """Whether the code of a method names ``super`` and ``forward``."""
    forward = inspect.unwrap(getattr(forward, "__func__", forward))
    if not isinstance(forward, FunctionType):
        return False
    return {"super", "forward"} <= _names_in(forward.__code__)


def _names_in(code: CodeType) -> set[str]:
    found = set(code.co_names)
    return found.union(*(_names_in(x) for x in code.co_consts if isinstance(x, CodeType)))
