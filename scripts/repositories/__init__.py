"""Public repositories on which scripts/users.py trains, with the inputs that each needs.

None of their code is here. A function of this package gets the folder of a checkout, imports the repository's
own modules from there, and returns what a training step needs: the model and a function that computes the
loss. Inputs are random numbers in the shapes that the repository trains with, or its own data.

This package imports nothing but PyTorch, so that it runs without dfgnn, too.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

MODULES = ("molecules", "weather", "traffic", "typed", "citation", "untuned", "recent", "biology")


@dataclass(frozen=True)
class Change:
    """Text that takes the place of other text in a file of a temporary copy of the checkout."""

    file: str
    old: str
    new: str


class Steps(Protocol):
    """Training steps, each of which waits until it is asked for."""

    def ready(self) -> None:
        """The model is made, its memory is not counted."""

    def begin(self) -> bool:
        """Called before each step. Returns False if no more steps are wanted."""

    def end(self, loss: Tensor) -> None:
        """Called after each step."""


@dataclass(frozen=True)
class Repository:
    """One row of the table.

    case: its name in the table, unique.
    source: owner and name on GitHub; the checkout is the folder of that name.
    what: the module that is trained, and on what.
    build: gets the folder, and how many times as large its graphs are to be, and returns (model, loss); or a
        function that gets `Steps`, runs the repository's own training script, and says where a step begins
        and ends. What it makes is on PyTorch's default device.
    options: those of ``python -m dfgnn.run``.
    lines: the lines of the repository that dfgnn's side changes; none means that `run` alone does it.
    to_run_here: changes for both sides, because there is no GPU or a dependency is missing.
    dgl_sparse: upstream's side needs an interpreter with a DGL that has dgl.sparse.
    tolerance: of the losses, relative.
    epoch: the number of steps in one pass over its data; 0: all steps use the same data.
    needs: packages to install in addition to the project's own.
    large: on a GPU, how many times as large graphs are in the second size; 0: there is no such case.
    graphs: its code allows PyTorch's CUDA graphs of what it compiles.
    slow_to_compile: it takes minutes, and is left out.
    """

    case: str
    source: str
    what: str
    build: Callable[[Path, int], tuple[nn.Module, Callable[[], Tensor]] | Callable[[Steps], None]]
    options: tuple[str, ...] = ()
    lines: tuple[Change, ...] = ()
    to_run_here: tuple[Change, ...] = ()
    dgl_sparse: bool = False
    tolerance: float = 1e-4
    epoch: int = 0
    needs: tuple[str, ...] = ()
    large: int = 8
    graphs: bool = True
    slow_to_compile: bool = False

    @property
    def folder(self) -> str:
        return self.source.partition("/")[2]


REPOSITORIES: dict[str, Repository] = {}


def repository(case: str, source: str, what: str, **options: Any) -> Callable:
    """Enters a function that builds a model and its loss into the table."""

    def enter(build):
        REPOSITORIES[case] = Repository(case, source, what, build, **options)
        return build

    return enter


def all_repositories() -> dict[str, Repository]:
    for name in MODULES:
        importlib.import_module(f"{__name__}.{name}")
    return REPOSITORIES


# ---- for those that build --------------------------------------------------------------------------------


def put_on_path(*folders: Path) -> None:
    sys.path[:0] = [str(folder) for folder in folders]


def without_init(root: Path, *packages: str) -> None:
    """Replaces packages by empty ones with the same path: their modules can then be imported without running
    an __init__ that would import far more."""
    for name in packages:
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


def loaded(file: Path) -> ModuleType:
    """The module of a file that imports nothing of its own package."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def scatter_stand_in() -> None:
    """Lets code that imports torch_scatter run on torch_geometric's functions where it is not installed."""
    if "torch_scatter" in sys.modules or importlib.util.find_spec("torch_scatter") is not None:
        return
    utils = importlib.import_module("torch_geometric.utils")
    module = sys.modules["torch_scatter"] = ModuleType("torch_scatter")
    module.__spec__ = ModuleSpec("torch_scatter", None)

    def scatter(src, index, dim=-1, out=None, dim_size=None, reduce="sum"):
        return utils.scatter(src, index, dim, dim_size, reduce)

    def scatter_sum(src, index, dim=-1, out=None, dim_size=None):
        return utils.scatter(src, index, dim, dim_size, "sum")

    def scatter_mean(src, index, dim=-1, out=None, dim_size=None):
        return utils.scatter(src, index, dim, dim_size, "mean")

    def scatter_softmax(src, index, dim=-1, dim_size=None):
        return utils.softmax(src, index, num_nodes=dim_size, dim=dim)

    names = {"scatter": scatter, "scatter_sum": scatter_sum, "scatter_add": scatter_sum}
    vars(module).update(names, scatter_mean=scatter_mean, scatter_softmax=scatter_softmax)


class _Any(type):
    """The metaclass of empty classes, whose attributes and type parameters are empty classes, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any(name, (), {})

    def __getitem__(cls, key: Any) -> Any:
        return cls


class _Absent(ModuleType):
    """A module in which any name is an empty class."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__, self.__all__, self.__spec__ = [], [], ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any(name, (), {})


def absent(*names: str) -> None:
    """Replaces missing packages by stand-ins: those that are imported but not used in what is trained."""
    for name in names:
        sys.modules.setdefault(name, _Absent(name))


class _Missing(MetaPathFinder, Loader):
    """Finds stand-ins for packages that no other finder has found."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.partition(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def absent_if_missing(*names: str) -> None:
    """Does as `absent` for those of these packages that are not installed, and for all modules in them."""
    sys.meta_path.append(_Missing(names))


def no_gpu() -> None:
    """``.cuda()`` leaves a tensor where it is, and ranges for NVIDIA's profiler do nothing."""
    Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    torch.cuda.nvtx.range = lambda *args: contextlib.nullcontext()  # type: ignore[assignment]


class Batch:
    """Tensors by name, which a module may also set. (PyTorch cannot compile that with SimpleNamespace.)"""

    def __init__(self, **tensors: Any):
        for name, value in tensors.items():
            setattr(self, name, value)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with all dropout set to 0, because dfgnn draws other masks and losses are to be compared."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]
    return model


def random_edges(num_src: int, num_dst: int, num_edges: int) -> Tensor:
    """[2, E], sources and destinations drawn at random, no edge twice."""
    code = torch.randperm(num_src * num_dst)[:num_edges] if num_src * num_dst < 1 << 25 else None
    if code is None:
        code = torch.randint(num_src * num_dst, (num_edges * 2,)).unique()
        code = code[torch.randperm(len(code))[:num_edges]]
    return torch.stack([code % num_src, code // num_src])


def nearest(points: Tensor, count: int) -> Tensor:
    """[2, N · count]: edges to each point from those that are nearest to it."""
    src = []
    for start in range(0, len(points), 4096):  # not the distances of all pairs at once
        some = points[start : start + 4096]
        distance = torch.cdist(some, points)
        distance[:, start : start + len(some)].fill_diagonal_(torch.inf)
        src.append(distance.topk(count, largest=False).indices)
    dst = torch.arange(len(points), device=points.device).repeat_interleave(count)
    return torch.stack([torch.cat(src).flatten(), dst])
