"""Counts the layers of DGL, torch_geometric and dfgnn that a script constructs, and whether dfgnn computes
them.

Processes that the script starts by multiprocessing each write their counts to a file: a fork has its parent's
patches; a new interpreter is patched when it unpickles its process object.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import multiprocessing.process
import multiprocessing.spawn
import os
import runpy
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compat.as_dgl import is_installed
from ..nn import _fused_or_upstream, dgl
from ..nn._upstream import is_from
from ..switch.replace import LIBRARIES, is_convolution, layers_of, patch
from ..switch.subclasses import made_for

_CHILD = Path(__file__).with_name("child.py")
_OFTEN = 1000  # layers, up to which a child process writes its counts at each


class Layers:
    """Counts layers by class while it is installed.

    folder: the folder to which the processes of a run write their counts; None makes one for the children.
    """

    def __init__(self, impl: str, in_calling_thread: bool, folder: str | None = None):
        self.options, self.started = (impl, in_calling_thread), os.getcwd()
        self.is_child, self.made = folder is not None, Counter[type]()
        self.folder = folder or tempfile.mkdtemp(prefix="dfgnn-run-")
        self.programs: list[str] = []  # Python programs that the script has started
        self._process = os.getpid()
        # The libraries' layers -> dfgnn's; and the set of dfgnn's.
        self._pairs = {old: new for library in LIBRARIES for old, new in layers_of(library).items()}
        self._ours = frozenset(self._pairs.values())
        if is_installed():  # `dgl` is dfgnn.compat, which has nothing to replace
            self._ours |= {cls for name in dgl.__all__ if issubclass(cls := getattr(dgl, name), nn.Module)}
        self._counts: dict[type, bool] = {}  # class -> whether it is counted
        self._called: set[type] = set()  # subclasses whose forward has called dfgnn's
        self._marked: set[type] = set()  # dfgnn's classes whose forward notes its callers
        self._undo: list[Callable[[], None]] = []

    def install(self) -> Layers:
        _fused_or_upstream.noticed.append(self._fell_back)
        self._undo.append(lambda: _fused_or_upstream.noticed.remove(self._fell_back))
        self._wrap(nn.Module, "__init__", self._counting)
        self._wrap(multiprocessing.process.BaseProcess, "start", self._starting)
        self._wrap(subprocess.Popen, "__init__", self._opening)
        if is_installed():
            self._wrap(multiprocessing.spawn, "get_preparation_data", self._preparing)
        return self

    def remove(self) -> None:
        """Undoes `install`, if it was called, and removes the folder."""
        while self._undo:
            self._undo.pop()()
        if not self.is_child and os.getpid() == self._process:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _wrap(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        before = getattr(owner, name)
        setattr(owner, name, functools.wraps(before)(wrap(before)))
        self._undo.append(lambda: setattr(owner, name, before))

    def _counting(self, construct: Any) -> Any:
        counts = self._counts

        def __init__(module, *args, **kwargs):
            cls = type(module)
            counted = counts.get(cls)
            if counted is None:
                counted = counts[cls] = self._is_layer(cls)
            if counted and "_modules" not in vars(module):  # not again if __init__ runs twice
                self._count(cls)
            construct(module, *args, **kwargs)

        return __init__

    def _is_layer(self, cls: type) -> bool:
        known = self._pairs.keys() | self._ours
        return any(base in known or is_convolution(base) for base in cls.__mro__)

    def _count(self, cls: type) -> None:
        self._notice_fork()
        if cls in self._pairs and is_from("dfgnn", vars(cls)["__init__"]):  # a patch replaced the constructor
            cls = self._pairs[cls]  # the class that the layer gets when the constructor ends
        is_new, self.made[cls] = not self.made[cls], self.made[cls] + 1
        if is_new and self._ours_of(cls) is not None and not self._forward_is_ours(cls):
            self._mark(cls)
        if self.is_child:
            if is_new and len(self.made) == 1:
                Finalize(None, self._leave, exitpriority=0)
            # A worker leaves its counts for the parent while it runs, because a pool kills its workers before
            # they exit: after each layer, and where there are many, after every _OFTEN.
            constructed = self.made.total()
            if is_new or constructed <= _OFTEN or constructed % _OFTEN == 0:
                self._leave()

    def _notice_fork(self) -> None:
        if os.getpid() != self._process:
            self._process, self.is_child = os.getpid(), True
            self.made.clear()

    # ---- subclasses with a forward of their own ------------------------------------------------------

    def _ours_of(self, cls: type) -> type | None:
        return next((base for base in cls.__mro__ if base in self._ours), None)

    @staticmethod
    def _forward_is_ours(cls: type) -> bool:
        home = next((base for base in cls.__mro__ if "forward" in vars(base)), cls)
        return home.__module__.startswith("dfgnn.")

    def _mark(self, cls: type) -> None:
        """Makes dfgnn's forward note which subclasses call it."""
        ours = self._ours_of(cls)
        if ours in self._marked:
            return
        assert ours is not None
        self._marked.add(ours)
        called, forward = self._called, ours.forward  # type: ignore[attr-defined]

        def noting(module, *args, **kwargs):
            if not torch.compiler.is_compiling() and type(module) not in called:
                called.add(type(module))
                if self.is_child:
                    self._leave()
            return forward(module, *args, **kwargs)

        self._wrap(ours, "forward", lambda before: noting)

    # ---- other processes -----------------------------------------------------------------------------

    def _starting(self, start: Any) -> Any:
        def noting(process, *args, **kwargs):
            process._dfgnn_run = _ToChild(self.folder, *self.options)
            try:
                return start(process, *args, **kwargs)
            finally:
                del process._dfgnn_run

        return noting

    def _preparing(self, prepare: Any) -> Any:
        """Makes a new interpreter install `dgl` before it imports the script's main module."""
        return lambda *args: {**prepare(*args), "dfgnn": _AsDGL()}

    def _opening(self, construct: Any) -> Any:
        def noting(process, args, *rest, **kwargs):
            words = args.split() if isinstance(args, str) else args
            if isinstance(words, (list, tuple)) and words and os.getpid() == self._process:
                name = os.path.basename(os.fsdecode(words[0]))
                if name.startswith(("python", "torchrun")) and not torch.compiler.is_compiling():
                    self.programs.append(" ".join(str(word) for word in words)[:100])
            return construct(process, args, *rest, **kwargs)

        return noting

    def _leave(self) -> None:
        """Writes a child process's counts for the process that reports."""
        with contextlib.suppress(OSError):  # raised if the report did not wait, and the folder is gone
            path = Path(self.folder) / str(os.getpid())
            path.with_suffix(".new").write_text(json.dumps(self.rows()))
            path.with_suffix(".new").replace(path)

    def _fell_back(self, cls: type) -> None:
        """Tells of a layer that ran its library's forward, which may be one that the parent constructed."""
        self._notice_fork()
        if self.is_child and self._is_layer(cls):
            self.made[cls] += 0
            self._leave()

    def of_children(self) -> list[list[dict[str, Any]]]:
        """The rows of each process that constructed layers."""
        found = []
        for path in sorted(Path(self.folder).iterdir()):
            with contextlib.suppress(OSError, ValueError):  # raised if the file is incomplete
                if not path.suffix:
                    found.append(json.loads(path.read_text()))
        return found

    # ---- the report ----------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """For each class: its name, how many were constructed (none, if a fork only called the layer of its
        parent), whether dfgnn computes them, and why not."""
        return [self._row(cls, count) for cls, count in self.made.items()]

    def _row(self, cls: type, count: int) -> dict[str, Any]:
        reasons = sorted(reason for warned, reason in _fused_or_upstream.warned() if warned is cls)
        ours = self._ours_of(cls)
        fused, note = ours is not None, None
        if ours is not None and not self._forward_is_ours(cls):
            fused = cls in self._called
            if fused:
                note = f"has a forward of its own, which calls {ours.__name__}'s"
            else:
                reasons.append(f"has a forward of its own, which was not seen to call {ours.__name__}'s")
        elif ours is None and (made := made_for(cls)) is not None:
            fused, note = True, f"dfgnn.accelerate put {made.__module__}.{made.__qualname__} under it"
        elif ours is None:
            reasons = [self._why_not(cls)]
        return {
            "layer": f"{cls.__module__}.{cls.__qualname__}", "constructed": count, "fused": fused,
            "fell_back": reasons, "note": note,
        }  # fmt: skip

    def _why_not(self, cls: type) -> str:
        theirs = next((base for base in cls.__mro__ if base in self._pairs), None)
        if theirs is cls:
            return "dfgnn.patch did not reach it"
        if theirs is not None:
            return f"a subclass of {theirs.__name__} from before dfgnn.patch; dfgnn.accelerate may take it"
        if cls.__module__.partition(".")[0] in LIBRARIES.values():
            return "no such layer in dfgnn"
        try:
            place = (
                f"{shown(inspect.getsourcefile(cls) or '', self.started)}:{inspect.getsourcelines(cls)[1]}"
            )
        except (OSError, TypeError):  # the class was not defined in a file
            place = f"module {cls.__module__}"
        return f"message passing of its own ({place})"


def shown(file: str, started: str) -> str:
    """The file's path relative to the folder where the script was started, if it is below that."""
    return os.path.relpath(file, started) if file.startswith(started + os.sep) else file


class _ToChild:
    """A new interpreter unpickles it after it has imported the script's main module, which runs child.py."""

    def __init__(self, folder: str, impl: str, in_calling_thread: bool):
        self.options = folder, impl, in_calling_thread

    def __reduce__(self):
        # By path, because the child's sys.path may lack dfgnn's folder.
        return runpy.run_path, (str(_CHILD), {"OPTIONS": self.options}, "dfgnn_run_child")


class _AsDGL:
    """A new interpreter unpickles it first, which installs `dgl` as dfgnn.compat."""

    def __reduce__(self):
        return runpy.run_path, (str(_CHILD), None, "dfgnn_run_as_dgl")


def import_libraries(impl: str, libraries: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Imports the installed libraries and dfgnn's layers for them, so that the script's time does not include
    that; for "dfgnn", patches them. Returns the reason for each that cannot be imported."""
    failed = {}
    for library in libraries:
        package = LIBRARIES[library]
        if package == "dgl" and is_installed():
            continue
        if importlib.util.find_spec(package) is not None:
            try:
                if impl == "dfgnn":
                    patch(library)
                else:
                    importlib.import_module(f"{package}.nn")
                layers_of(library)
            except Exception as error:  # a library that was built for another torch fails in many ways
                failed[package] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
    return failed
