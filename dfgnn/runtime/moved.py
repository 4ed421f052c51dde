"""Lets modules that have moved be imported by their old names, with a warning that says where they are now.

Files that were pickled before a move name classes by their old modules, so no line may leave the table.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Old name -> new name, both below ``dfgnn``. The modules of a package that moved come along.
MOVED = {
    "_arguments": "runtime.arguments",
    "_autograd": "engine.autograd",
    "_batches": "runtime.batches",
    "_checks": "engine.checks",
    "_compile": "runtime.compiling",
    "_csr": "sparse.csr",
    "_eager": "runtime.eager",
    "_edge_attention": "engine.traced",
    "_edge_rows": "engine.edge_rows",
    "_edge_terms": "engine.edge_projection",
    "_edges": "engine.traced_graph",
    "_fixed": "sparse.fixed",
    "_flex": "engine.flex",
    "_gated_layer": "nn.whole.gated",
    "_hops": "sparse.hops",
    "_kept": "graph.cache",
    "_library": "runtime.library",
    "_ops": "runtime.ops",
    "_plain": "engine.plain",
    "_products": "engine.products",
    "_replayed": "engine.recorded_graph",
    "_short": "engine.unchecked",
    "_structure": "sparse.structure",
    "_timing": "runtime.timing",
    "_typed_layer": "nn.whole.typed",
    "nn._recorded": "nn.whole.traced",
    "nn.checkpoints": "switch.checkpoints",
    "nn.switch": "switch.replace",
    "schedule": "plan",
}


def new_name(name: str) -> str | None:
    """The module that a full old name stands for, or None where nothing of that name has moved."""
    parent, _, below = name.partition(".")
    if parent != "dfgnn":
        return None
    for old, new in MOVED.items():
        if below == old or below.startswith(f"{old}."):
            return f"dfgnn.{new}{below[len(old) :]}"
    return None


class _Moved(MetaPathFinder, Loader):
    """Answers an import by an old name with the module of the new one, the same object."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_name(fullname)
        if new is None or importlib.util.find_spec(new) is None:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = new_name(spec.name)
        assert new is not None
        warnings.warn(f"{spec.name} has moved to {new}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        # The import system overwrites the module's spec; exec_module restores it.
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def install() -> None:
    """Let old names be imported; once per process."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        # Before the others, which would import the modules of a moved package a second time.
        sys.meta_path.insert(0, _Moved())


def attribute(name: str) -> ModuleType:
    """``dfgnn.<name>`` for the name of a module that has moved; AttributeError for any other."""
    if name not in MOVED:
        raise AttributeError(f"module 'dfgnn' has no attribute {name!r}")
    return importlib.import_module(f"dfgnn.{name}")
