"""dfgnn in code that was written for DGL or torch_geometric: for a model that exists, or for a whole script.

Both work with subclasses of the libraries' own layers (``dfgnn.nn.dgl.upstream``, :mod:`dfgnn.nn.pyg`)
that have the same parameters and results. Neither library is imported before it is needed.
"""

from __future__ import annotations

import importlib
import sys
import threading
from typing import NamedTuple

from torch import nn

#: Name of a library -> its package.
LIBRARIES = {"dgl": "dgl", "pyg": "torch_geometric"}
# Where the classes are that take the place of its layers.
_OURS = {"dgl": "dfgnn.nn.dgl.upstream", "pyg": "dfgnn.nn.pyg"}

# An accelerated module keeps the class that it had under this name.
_BEFORE = "_class_before_dfgnn"


class Replaced(NamedTuple):
    """A layer that has another class now."""

    name: str  # as in model.named_modules()
    before: type
    after: type


class Kept(NamedTuple):
    """A layer of DGL or torch_geometric that was left alone."""

    name: str
    cls: type
    reason: str


class Report:
    """What :func:`accelerate` did: ``replaced`` and ``kept``, in the order of ``model.named_modules()``.

    ``print(report)`` shows it on one screen, layers of the same fate on one line.
    """

    def __init__(self, replaced: list[Replaced], kept: list[Kept]):
        self.replaced = replaced
        self.kept = kept

    def __repr__(self) -> str:
        return f"Report({len(self.replaced)} replaced, {len(self.kept)} kept)"

    def __str__(self) -> str:
        if not self.replaced and not self.kept:
            return "no layer of DGL or torch_geometric found"
        lines = [f"{len(self.replaced)} replaced"]
        lines += _grouped((x.name, f"{_path(x.before)} -> {_path(x.after)}") for x in self.replaced)
        lines.append(f"{len(self.kept)} not replaced")
        lines += _grouped((x.name, f"{_path(x.cls)}: {x.reason}") for x in self.kept)
        return "\n".join(lines)


def accelerate(model: nn.Module) -> Report:
    """Let the attention layers of DGL and torch_geometric in ``model`` compute with dfgnn, in place.

    A layer gets the class of the same name in ``dfgnn.nn.dgl.upstream`` or :mod:`dfgnn.nn.pyg`, and
    nothing else changes: parameters, buffers, state_dict, hooks and an optimizer over them stay as they are,
    and results are the same up to rounding. ``model`` may itself be such a layer. :func:`restore` undoes it.

    A subclass of a library's layer is left alone, since what it changes is not known. So are layers that
    dfgnn does not have. The report names both. What a layer is set up for and the fused one cannot do
    (torch_geometric's hooks and explanations, say) runs the library's forward, with a warning.

    A pickled model refers to dfgnn's classes then, and loads where dfgnn is installed; a state_dict, or a
    model pickled after :func:`restore`, loads anywhere.

    Raises TypeError for anything but a module.
    """
    _check_module("accelerate", model)
    layers = {old: new for library in LIBRARIES for old, new in _layers(library).items()}
    replaced, kept = [], []
    for name, module in model.named_modules():
        cls = type(module)
        reason = _why_not(module, layers)
        if reason is not None:
            kept.append(Kept(name, cls, reason))
        elif cls in layers:
            setattr(module, _BEFORE, cls)
            module.__class__ = layers[cls]
            replaced.append(Replaced(name, cls, layers[cls]))
    return Report(replaced, kept)


def restore(model: nn.Module) -> list[str]:
    """Undo :func:`accelerate`: the layers get back the classes that they had. Returns their names.

    Works on copies and unpickled ones, too. Raises TypeError for anything but a module.
    """
    _check_module("restore", model)
    names = []
    for name, module in model.named_modules():
        before = vars(module).pop(_BEFORE, None)
        if before is not None:
            module.__class__ = before
            names.append(name)
    return names


class Patch:
    """A library whose names stand for dfgnn's layers; see :func:`patch`."""

    def __init__(self, name: str):
        self._name = name
        self._active = True

    def undo(self) -> None:
        """Give the names back, unless another patch of the library still holds. More calls do nothing."""
        with _lock:
            if self._active:
                self._active = False
                _depth[self._name] -= 1
                if _depth[self._name] == 0:
                    layers = _layers(self._name)
                    _rename(LIBRARIES[self._name], {new: old for old, new in layers.items()})

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<dfgnn.patch({self._name!r}), {'active' if self._active else 'undone'}>"


_lock = threading.RLock()
_depth = dict.fromkeys(LIBRARIES, 0)


def patch(library: str) -> Patch:
    """Put dfgnn's layers in the place of a library's, for code that constructs layers from now on.

    ``dfgnn.patch("dgl")`` at the top of a script is enough; ``with dfgnn.patch("dgl"):`` does it for a while,
    as does ``.undo()`` of what is returned. Uses may be nested.

    In every loaded module of the library the names of its attention layers (``dgl.nn.GATConv``,
    ``torch_geometric.nn.GATConv``, also where the library's own models use them) stand for subclasses of them
    with the same arguments, parameters and results. Only the module that defines a class keeps it, so that
    pickles and the class itself keep working. What was imported by name or constructed before is not
    touched: for models that exist there is :func:`accelerate`.

    Args:
        library: "dgl" or "pyg" (torch_geometric).

    Raises:
        ValueError: another name.
        ImportError: the library is not installed.
    """
    if library not in LIBRARIES:
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
        _depth[library] += 1
        _rename(package, _layers(library))
    return Patch(library)


def _layers(library: str) -> dict[type, type]:
    """The library's classes and dfgnn's subclasses of them; none while the library is not loaded."""
    package = LIBRARIES[library]
    if f"{package}.nn" not in sys.modules:
        return {}
    module = importlib.import_module(_OURS[library])
    layers = [getattr(module, name) for name in module.__all__]
    pairs = ((_upstream(cls, package), cls) for cls in layers if issubclass(cls, nn.Module))
    return {old: new for old, new in pairs if old is not None}


def _upstream(cls: type, package: str) -> type | None:
    """The class of this package that ``cls`` is, or is derived from."""
    return next((base for base in cls.__mro__ if base.__module__.startswith(f"{package}.")), None)


def _rename(package: str, classes: dict[type, type]) -> None:
    """Let names that stand for one of ``classes`` stand for its counterpart, throughout a package."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value in classes and name != value.__module__:
                    setattr(module, key, classes[value])


def _why_not(module: nn.Module, layers: dict[type, type]) -> str | None:
    """Why a layer of a library keeps its class; None for one that does not, and for other modules."""
    cls = type(module)
    if cls in layers:
        return "its forward was replaced on the instance" if "forward" in vars(module) else None
    if cls in layers.values():
        return "is dfgnn's already"
    base = next((base for base in cls.__mro__ if base in layers), None)
    if base is not None:
        return f"a subclass of {base.__name__}, which may change what it computes"
    return "no such layer in dfgnn" if any(map(_is_convolution, cls.__mro__)) else None


def _is_convolution(cls: type) -> bool:
    in_dgl = cls.__module__.startswith("dgl.nn.pytorch.conv.")
    return in_dgl or cls.__module__ == "torch_geometric.nn.conv.message_passing"


def _check_module(function: str, model) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model: expected a torch.nn.Module, got {type(model).__name__}")


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
