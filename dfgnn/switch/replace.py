"""``accelerate`` and ``patch``: dfgnn's layers in a model that exists, or in a whole script.

Both use subclasses of the libraries' layers (:mod:`dfgnn.nn.dgl`, :mod:`dfgnn.nn.pyg`) with the same
parameters and results. Neither library is imported before it is needed.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from ..nn._errors import remember_parameters
from ..nn._upstream import replaced_method, upstream
from ..nn.prepared import forget
from ..runtime.wrong_call import says_calls
from . import pieces, subclasses

#: Name of a library -> its package.
LIBRARIES = {"dgl": "dgl", "pyg": "torch_geometric"}
# Library -> the module with the classes that replace its layers.
_OURS = {"dgl": "dfgnn.nn.dgl", "pyg": "dfgnn.nn.pyg"}

# An accelerated module keeps the class that it had under this name.
_BEFORE = "_class_before_dfgnn"


class Replaced(NamedTuple):
    """A layer whose class was replaced."""

    name: str  # as in model.named_modules()
    before: type
    after: type


class Kept(NamedTuple):
    """A layer of DGL or torch_geometric that was not replaced, with the reason."""

    name: str
    cls: type
    reason: str


_IN_PLACE = "dfgnn.accelerate changes the model in place: go on with the model, not with this report of it"


class Report:
    """The result of :func:`accelerate`: ``replaced`` and ``kept``, in the order of ``model.named_modules()``.

    ``print(report)`` shows it on one screen, with one line for layers with the same outcome.
    """

    def __init__(self, replaced: list[Replaced], kept: list[Kept]):
        self.replaced = replaced
        self.kept = kept

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{_IN_PLACE}, which has no attribute {name!r}", name=name, obj=self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{_IN_PLACE}, which cannot be called")

    def __repr__(self) -> str:
        return f"Report({len(self.replaced)} replaced, {len(self.kept)} kept)"

    def __str__(self) -> str:
        if not self.replaced and not self.kept:
            return "no layer of DGL or torch_geometric found"
        lines = [f"{len(self.replaced)} replaced"]
        lines += _grouped((x.name, f"{_path(x.before)} -> {_after(x.after)}") for x in self.replaced)
        lines.append(f"{len(self.kept)} not replaced")
        lines += _grouped((x.name, f"{_path(x.cls)}: {x.reason}") for x in self.kept)
        return "\n".join(lines)


@says_calls
def accelerate(model: nn.Module) -> Report:
    """Let the attention layers of DGL and torch_geometric in ``model`` compute with dfgnn, in place.

    A layer gets the class of the same name in :mod:`dfgnn.nn.dgl` or :mod:`dfgnn.nn.pyg`, and
    nothing else changes: parameters, buffers, state_dict, hooks and an optimizer over them stay as they are,
    and results are the same up to rounding. ``model`` may itself be such a layer. :func:`restore` undoes it.

    A subclass of such a layer that overrides ``__init__`` and ``forward`` alone, and calls
    ``super().forward(...)``, gets a class of the same name with two bases, itself and dfgnn's layer, so that
    this call runs fused. A subclass that overrides ``message``, ``aggregate`` or another method of the layer
    is left alone. So are layers that dfgnn does not have, layers whose class has replaced methods, and layers
    with a setting that the fused layer does not support (hooks on messages or on a LeakyReLU, another
    aggregation). The report names them with the reason. If such a setting is made later, the library's
    forward runs, with a :class:`~dfgnn.nn.FallbackWarning`.

    A pickle of the model then refers to dfgnn's classes and needs dfgnn to load; a state_dict, or a model
    pickled after :func:`restore`, does not.

    Raises TypeError for anything but a module.
    """
    _check_module("accelerate", model)
    layers: dict[type, type] = {}
    unsupported: dict[str, str] = {}  # package -> why its version is not supported
    for library, package in LIBRARIES.items():
        try:
            layers |= layers_of(library)
        except ImportError as error:
            unsupported[package] = str(error)
    replaced, kept = [], []
    for name, module in model.named_modules():
        cls = type(module)
        reason, after = _becomes(module, layers, unsupported)
        if after is not None:
            setattr(module, _BEFORE, cls)
            module.__class__ = after
            remember_parameters(module)
            replaced.append(Replaced(name, cls, after))
        elif reason is not None:
            kept.append(Kept(name, cls, reason))
    return Report(replaced, kept)


@says_calls
def restore(model: nn.Module) -> list[str]:
    """Undo :func:`accelerate`: the layers get back the classes that they had. Returns their names.

    It also works on copies and unpickled models. Raises TypeError for anything but a module.
    """
    _check_module("restore", model)
    names = []
    for name, module in model.named_modules():
        before = vars(module).pop(_BEFORE, None)
        if before is not None:
            forget(module)
            module.__class__ = before
            names.append(name)
    return names


_lock = threading.RLock()
_names: dict[str, _Names] = {}  # patched library -> its replaced names


class Patch:
    """A library whose names stand for dfgnn's layers; see :func:`patch`."""

    def __init__(self, name: str):
        self._name = name
        self._active = True

    def undo(self) -> None:
        """Restore the names, unless another patch of the library is active. Further calls do nothing."""
        with _lock:
            if self._active:
                self._active = False
                names = _names[self._name]
                names.holders -= 1
                if names.holders == 0:
                    del _names[self._name]
                    names.take_back()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<dfgnn.patch({self._name!r}), {'active' if self._active else 'undone'}>"


@says_calls
def patch(library: str) -> Patch:
    """Put dfgnn's layers in the place of a library's, for code that constructs layers from now on.

    ``dfgnn.patch("dgl")`` at the top of a script is enough; ``with dfgnn.patch("dgl"):`` or ``.undo()`` of
    the result limits it. Uses may be nested.

    In every loaded module the names of the library's attention layers are bound to subclasses of them with
    the same arguments, parameters and results: in the library itself (``dgl.nn.GATConv``, also where its
    models use it), and where a layer was imported by name before (``from torch_geometric.nn import
    GATConv``). Undoing restores exactly these names. Only the module that defines a class keeps it, so that
    pickles and the class itself go on working.

    If a program holds the library's class elsewhere (in a dictionary, a default argument, the module that
    defines it) and constructs a layer of exactly this class, the layer gets dfgnn's class when its
    constructor ends. For layers that were constructed before there is :func:`accelerate`; subclasses whose
    ``class`` statement ran before are not changed.

    Functions from which scripts build attention are also replaced: ``torch_geometric.utils.softmax`` and
    ``scatter`` (sums, those of message passing too), ``scatter_softmax``, ``scatter_sum``, ``scatter_add``
    and ``scatter`` of torch_scatter, and of DGL ``edge_softmax``, ``copy_e_sum`` and ``u_mul_e_sum``, which
    ``update_all`` calls. On the CPU, in float32 and float64 along the first dimension, dfgnn's kernels
    compute them where they are faster; every other call goes on to the original.

    Args:
        library: "dgl" or "pyg" (torch_geometric).

    Raises:
        ValueError: another name.
        ImportError: the library is not installed.
    """
    if not isinstance(library, str) or library not in LIBRARIES:
        names = " or ".join(repr(name) for name in LIBRARIES)
        raise ValueError(f"patch: library: expected {names}, got {library!r}")
    package = LIBRARIES[library]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(f"patch: library: expected {package} to be installed for {library!r}") from error
    importlib.import_module(f"{package}.nn")
    with _lock:
        if library not in _names:
            _names[library] = _Names(library)
        _names[library].holders += 1
        _names[library].put()
    return Patch(library)


def layers_of(library: str) -> dict[type, type]:
    """The library's classes and dfgnn's subclasses of them; none while the library is not loaded."""
    package = LIBRARIES[library]
    if f"{package}.nn" not in sys.modules:
        return {}
    module = importlib.import_module(_OURS[library])
    layers = [getattr(module, name) for name in module.__all__]
    pairs = ((upstream(cls, package), cls) for cls in layers if issubclass(cls, nn.Module))
    return {old: new for old, new in pairs if old is not None}


class _Names:
    """What stands for a library's layers while at least one patch of it holds."""

    def __init__(self, library: str):
        self.holders = 0
        self._package = LIBRARIES[library]
        self._library = library
        self._layers = layers_of(library)
        self._ours: dict[Any, Any] = {}  # library's class or function -> dfgnn's
        self._rebound: list[tuple[ModuleType, str, Any]] = []  # names changed outside of the library
        self._constructors: dict[type, tuple[Any, Any]] = {}  # class -> its __init__, and the one set here

    def put(self) -> None:
        """Let names that stand for a layer stand for dfgnn's, in all modules that are loaded now."""
        self._ours = {**self._layers, **pieces.of(self._library)}
        pieces.active.add(self._library)
        for in_library, module, name, cls in self._where(self._ours):
            setattr(module, name, self._ours[cls])
            if not in_library:
                self._rebound.append((module, name, cls))
        for cls in self._layers.keys() - self._constructors.keys():
            self._constructors[cls] = vars(cls)["__init__"], _becoming(cls, self._layers[cls])
            cls.__init__ = self._constructors[cls][1]  # type: ignore[misc]

    def take_back(self) -> None:
        """Undo `put`: in all of the library, which may have loaded more modules since; elsewhere for the
        names that it changed."""
        pieces.active.discard(self._library)
        theirs = {ours: cls for cls, ours in self._ours.items()}
        for in_library, module, name, ours in self._where(theirs):
            if in_library:
                setattr(module, name, theirs[ours])
        for module, name, cls in self._rebound:
            if vars(module).get(name) is self._ours[cls]:  # not bound to something else since
                setattr(module, name, cls)
        for cls, (before, meanwhile) in self._constructors.items():
            if vars(cls)["__init__"] is meanwhile:
                cls.__init__ = before  # type: ignore[misc]

    def _where(self, classes: Iterable[Any]) -> list[tuple[bool, ModuleType, str, Any]]:
        """(in the library?, module, name, class or function) in all loaded modules but those that define it.

        A module that defines one of the functions is left out for all names, so that the original functions
        keep calling each other. Not so torch_scatter, because scripts may look up its functions in the very
        module that defines them."""
        homes = {getattr(x, "__module__", None) for x in self._ours if not isinstance(x, type)}
        of_id = {id(cls): cls for cls in classes}
        found = []
        for place, module in list(sys.modules.items()):
            root = place.partition(".")[0]
            if root == "dfgnn" or not isinstance(module, ModuleType):
                continue
            if place in homes and place != "torch_scatter":
                continue
            values = dict(vars(module))  # other threads may be importing
            if not of_id.keys().isdisjoint(map(id, values.values())):
                for name, value in values.items():
                    cls = of_id.get(id(value))
                    if cls is not None and (cls.__module__ != place or place == "torch_scatter"):
                        found.append((root == self._package, module, name, cls))
        return found


def _becoming(cls: type, ours: type) -> Callable[..., None]:
    """The constructor that a library's class gets, for code that uses the class by a name which `_where` does
    not find: an instance of exactly this class becomes one of ours, as by `accelerate`."""
    construct = vars(cls)["__init__"]

    @functools.wraps(construct)
    def __init__(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        if type(self) is cls:
            self.__class__ = ours
            remember_parameters(self)

    return __init__


def _becomes(
    module: nn.Module, layers: dict[type, Any], unsupported: dict[str, str]
) -> tuple[str | None, type | None]:
    """(None, the class that a layer of a library gets), or (why it keeps its own, None); (None, None) for
    other modules."""
    cls = type(module)
    if any(base in layers.values() for base in cls.__mro__):
        return "is dfgnn's already", None
    base = next((base for base in cls.__mro__ if base in layers), None)
    if base is None:
        library = next((base.__module__.split(".")[0] for base in cls.__mro__ if is_convolution(base)), None)
        return None if library is None else unsupported.get(library, "no such layer in dfgnn"), None
    reason, ours = _why_not(module, base, layers[base]), layers[base]
    if reason is not None:
        return reason, None
    if cls is base:
        return None, ours
    reason = subclasses.why_not(module, base, ours)
    if reason is not None:
        return f"a subclass of {base.__name__}: {reason}", None
    made: Any = subclasses.made_of(cls, ours)
    reason = made.why_not(module)
    return (reason, None) if reason is not None else (None, made)


def _why_not(module: nn.Module, base: type, ours: Any) -> str | None:
    """Why a layer of the library's class ``base``, or of a subclass, cannot be replaced; None if it can."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    name = replaced_method(base, base.__module__.split(".")[0])
    if name is not None:
        return f"{base.__name__}.{name} was replaced"
    return ours.why_not(module) if type(module) is base else None


def is_convolution(cls: type) -> bool:
    """Whether a class is a layer of DGL, or DGL's or torch_geometric's base class of layers."""
    in_dgl = cls.__module__.startswith("dgl.nn.pytorch.conv.")
    return in_dgl or cls.__module__ == "torch_geometric.nn.conv.message_passing"


def _check_module(function: str, model) -> None:
    if not isinstance(model, nn.Module):
        way = ""
        if isinstance(model, type) and issubclass(model, nn.Module):
            way = f"; make a layer of it, {model.__name__}(...), or dfgnn.patch has all that are made later"
        elif isinstance(model, (list, tuple)):
            way = "; torch.nn.ModuleList(model) is one"
        elif isinstance(model, dict):
            way = "; give the module whose state_dict it is"
        elif isinstance(model, str):
            way = "; make the module and load the file's state_dict into it"
        raise TypeError(f"{function}: model: expected a torch.nn.Module, got {type(model).__name__}{way}")


def _after(cls: type) -> str:
    pair = subclasses.pair_of(cls)
    return _path(cls) if pair is None else f"the same on {_path(pair[1])}"


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _grouped(named, shown: int = 6) -> list[str]:
    """A line for each text, with the names that it applies to."""
    groups: dict[str, list[str]] = {}
    for name, text in named:
        groups.setdefault(text, []).append(name or "(the model)")
    lines = []
    for text, names in groups.items():
        more = f" and {len(names) - shown} more" if len(names) > shown else ""
        lines.append(f"  {', '.join(names[:shown])}{more}: {text}")
    return lines
