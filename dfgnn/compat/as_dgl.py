"""Makes ``import dgl`` work without DGL: its names stand for dfgnn's.

:func:`install_as_dgl` puts an import finder in front of Python's. It makes modules that look up every name in
dfgnn's modules; a name that these lack raises an AttributeError or ImportError that says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..runtime.wrong_call import DOCS

#: The version of DGL with these names; the part after + distinguishes it from DGL.
VERSION = "2.1.0+dfgnn"
PAGE = f"{DOCS}/dgl_without_dgl.md"
_COMPAT, _NN = "dfgnn.compat", "dfgnn.compat.nn"

#: Modules of DGL -> dfgnn's modules in which their names are looked up, in this order.
MODULES: dict[str, tuple[str, ...]] = {
    "dgl": (_COMPAT,),
    "dgl._ffi": (_COMPAT,),
    "dgl._ffi.base": (_COMPAT,),
    "dgl.base": ("dfgnn.compat.base",),
    "dgl.convert": (_COMPAT,),
    "dgl.data": ("dfgnn.compat.data",),
    "dgl.data.citation_graph": ("dfgnn.compat.data",),
    "dgl.data.utils": ("dfgnn.compat.data",),
    "dgl.dataloading": ("dfgnn.compat.dataloading",),
    "dgl.function": ("dfgnn.compat.function",),
    "dgl.heterograph": (_COMPAT,),
    "dgl.nn": (_NN,),
    "dgl.nn.functional": (_NN,),
    "dgl.nn.pytorch": (_NN,),
    "dgl.nn.pytorch.conv": (_NN,),
    "dgl.nn.pytorch.glob": (_NN,),
    "dgl.nn.pytorch.hetero": (_NN,),
    "dgl.nn.pytorch.softmax": (_NN,),
    "dgl.nn.pytorch.utils": (_NN,),
    "dgl.ops": ("dfgnn.functional.ops",),
    "dgl.random": (_COMPAT,),
    "dgl.readout": (_COMPAT,),
    "dgl.sparse": ("dfgnn.compat.sparse",),
    "dgl.sparse.matmul": ("dfgnn.compat.sparse",),
    "dgl.transform": ("dfgnn.compat.transforms", _COMPAT),
    "dgl.transforms": ("dfgnn.compat.transforms", _COMPAT),
    "dgl.utils": ("dfgnn.compat.utils",),
} | {
    f"dgl.nn.pytorch.conv.{name}": (_NN,)
    for name in ("agnnconv", "dotgatconv", "edgegatconv", "egatconv", "gatconv", "gatv2conv", "graphconv",
                 "hgtconv")
}  # fmt: skip
# Modules of DGL whose purpose another module of dfgnn serves -> a hint for the error.
_INSTEAD = {
    "dgl.distributed": "dfgnn.distributed shares a graph between processes",
    "dgl.graphbolt": "dfgnn.sampling samples mini-batches",
    "dgl.sampling": "dfgnn.sampling samples mini-batches",
    "dgl.dataloading": "dfgnn.sampling samples mini-batches",
}


class _StandIn(ModuleType):
    """A module with a name of DGL's, which looks up its attributes in dfgnn's modules."""

    def __init__(self, name: str):
        super().__init__(name, f"dfgnn's names for {name}; see dfgnn.compat.install_as_dgl.")
        self.__path__: list[str] = []  # makes it a package, so that imports below it ask the finder
        self.__dfgnn__ = True

    def __getattr__(self, name: str) -> Any:
        place = self.__name__
        if place == "dgl" and name == "__version__":
            return VERSION
        if not name.startswith("__"):
            for home in MODULES[place]:
                module = importlib.import_module(home)
                # Only names that the module offers, not what it has imported.
                if name in getattr(module, "__all__", ()) or _defines(module, name):
                    return getattr(module, name)
            if f"{place}.{name}" in MODULES:
                return importlib.import_module(f"{place}.{name}")
        raise AttributeError(lacks(f"{place}.{name}"), name=name, obj=self)

    def __dir__(self) -> list[str]:
        names = {name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == self.__name__}
        for home in MODULES[self.__name__]:
            module = importlib.import_module(home)
            names |= {*getattr(module, "__all__", ())} or {n for n in vars(module) if _defines(module, n)}
        return sorted(names)


def _defines(module: ModuleType, name: str) -> bool:
    """Whether a module without ``__all__`` offers a name: a function or class that it defines."""
    if hasattr(module, "__all__") or name.startswith("_"):
        return False
    return getattr(getattr(module, name, None), "__module__", None) == module.__name__


def lacks(name: str) -> str:
    instead = next((text for place, text in _INSTEAD.items() if f"{name}.".startswith(f"{place}.")), None)
    hint = f" ({instead})" if instead else ""
    return f"{name}: dfgnn stands for DGL here and has no such name{hint}; {PAGE} says what there is"


class _Finder:
    """Finds the modules of `MODULES`, and refuses others below dgl."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in MODULES:
            return ModuleSpec(name, _Finder, origin="dfgnn", is_package=True)  # type: ignore[arg-type]
        if name.startswith("dgl."):
            # name="dgl": with name=name, "from dgl import x" would report a missing attribute without text.
            raise ModuleNotFoundError(lacks(name), name="dgl")
        return None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


_lock = threading.RLock()
_holders = 0  # how many results of `install_as_dgl` are active
_before: list[Any] = []  # what sys.modules["dgl"] was before the first call, for the last `undo`


class AsDGL:
    """The result of :func:`install_as_dgl`; ``undo()``, or leaving it as a context, restores DGL's names."""

    def __init__(self) -> None:
        self._active = True

    def undo(self) -> None:
        """Restore DGL's names, unless another call is still active. Further calls do nothing."""
        global _holders
        with _lock:
            if not self._active:
                return
            self._active, _holders = False, _holders - 1
            if _holders == 0:
                sys.meta_path.remove(_Finder)  # type: ignore[arg-type]
                for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
                    del sys.modules[name]
                if _before:
                    sys.modules["dgl"] = _before.pop()

    def __enter__(self) -> AsDGL:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<dfgnn.compat.install_as_dgl(), {'active' if self._active else 'undone'}>"


def install_as_dgl(force: bool = False) -> AsDGL:
    """Let ``import dgl`` and its modules stand for dfgnn's, for scripts that were written for DGL.

    To be called before anything imports dgl; ``python -m dfgnn.run --as-dgl script.py`` does it for a whole
    script. ``dgl`` is :mod:`dfgnn.compat`, ``dgl.nn`` has the layers of :mod:`dfgnn.nn.dgl`, ``dgl.ops`` is
    :mod:`dfgnn.ops`, ``dgl.sparse`` is :mod:`dfgnn.compat.sparse`; ``dgl.function``, ``dgl.nn.functional``,
    ``dgl.dataloading``, ``dgl.data``, ``dgl.transforms`` and ``dgl.utils`` exist, too. A missing name raises
    AttributeError or ImportError with a sentence that says where to look.

    Args:
        force: also if DGL is installed, which is then hidden.

    Returns:
        An object whose ``undo()`` restores DGL's names; it is also a context manager.

    Raises:
        RuntimeError: DGL is installed and not ``force``; or it has been imported already.

    Example::

        import dfgnn.compat

        with dfgnn.compat.install_as_dgl(force=True):
            import dgl
            import dgl.function as fn

            g = dgl.graph(([0, 1], [1, 2]))
            g.ndata["h"] = torch.ones(3, 4)
            g.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
    """
    global _holders
    with _lock:
        if _holders == 0:
            _check(force)
            if "dgl" in sys.modules:  # it is None, which hides DGL
                _before.append(sys.modules.pop("dgl"))
            sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
            # After "import dgl.heterograph" the name dgl.heterograph must still be the function. Python binds
            # a name to a module only where it loads the module, not where it is in sys.modules already.
            for name in ("dgl.heterograph", "dgl.sparse.matmul"):
                spec = _Finder.find_spec(name)
                sys.modules[name] = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        _holders += 1
    return AsDGL()


def _check(force: bool) -> None:
    if sys.modules.get("dgl") is not None:
        raise RuntimeError(
            "install_as_dgl: dgl has been imported already, and modules hold its names; call this before "
            "anything imports dgl (dfgnn.nn.dgl's layers do where DGL is installed), or use "
            "python -m dfgnn.run --as-dgl"
        )
    spec = None if "dgl" in sys.modules else importlib.util.find_spec("dgl")
    if spec is not None and spec.origin is not None and not force:  # a mere folder of that name has no origin
        raise RuntimeError(
            f"install_as_dgl: DGL is installed ({spec.origin}) and would be hidden: dfgnn.patch('dgl') puts "
            "dfgnn's layers into it instead. To hide it all the same: install_as_dgl(force=True), "
            "python -m dfgnn.run --as-dgl --force"
        )


def is_installed() -> bool:
    """Whether ``dgl`` currently stands for dfgnn.compat."""
    return _holders > 0
