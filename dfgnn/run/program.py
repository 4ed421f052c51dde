"""Runs a script, a folder, a zip file or a module as ``__main__``, exactly as the interpreter does."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any


class NotRunnableError(Exception):
    """There is no such program; the text and the exit status are Python's."""

    def __init__(self, text: str, status: int):
        super().__init__(text)
        self.status = status


class Program:
    """A program: the module that becomes ``__main__``, and its code."""

    def __init__(self, code: Callable[[], CodeType], spec: Any, loader: Any, file: str):
        self._code = code
        self.module = ModuleType("__main__")
        vars(self.module).update(
            __builtins__=sys.modules["builtins"], __loader__=loader, __spec__=spec, __file__=file,
            __package__=None if spec is None else spec.parent, __cached__=spec and spec.cached,
        )  # fmt: skip
        if sys.version_info < (3, 14):
            vars(self.module)["__annotations__"] = {}

    def run(self) -> None:
        """Runs it. The module stays ``__main__``, which threads, exit handlers, pickles and processes use."""
        code = self._code()
        sys.modules["__main__"] = self.module
        exec(code, vars(self.module))

    def own_traceback(self, error: BaseException) -> TracebackType | None:
        """The traceback of an error from `run`, beginning with the program's first line."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is not vars(self.module):
            trace = trace.tb_next
        return trace


def of_path(path: str, arguments: list[str]) -> Program:
    """``python path arguments...``. Sets sys.argv and sys.path."""
    sys.argv = [path, *arguments]
    if not _is_safe_path():
        del sys.path[0]
    file = os.path.join(os.getcwd(), path)
    if pkgutil.get_importer(file) is not None:  # a folder or a zip file
        sys.path.insert(0, file)
        spec = importlib.machinery.PathFinder.find_spec("__main__", [file])
        if spec is None:
            raise NotRunnableError(f"can't find '__main__' module in {file!r}", 1)
        return _of_spec(spec)
    compiled = path.endswith(".pyc")
    kind = importlib.machinery.SourcelessFileLoader if compiled else importlib.machinery.SourceFileLoader
    loader: Any = kind("__main__", file)
    try:
        data = loader.get_data(file)
    except OSError as error:
        text = f"can't open file {file!r}: [Errno {error.errno}] {error.strerror}"
        raise NotRunnableError(text, 2) from error
    if not _is_safe_path():
        sys.path.insert(0, str(Path(path).resolve().parent))

    def code() -> CodeType:
        return loader.get_code("__main__") if compiled else loader.source_to_code(data, file)

    return Program(code, None, loader, file)


def of_module(name: str, arguments: list[str]) -> Program:
    """``python -m name arguments...``. Sets sys.argv and sys.path."""
    sys.argv = ["-m", *arguments]
    if not _is_safe_path():
        sys.path[0] = os.getcwd()
    if name.startswith("."):
        raise NotRunnableError("Relative module names not supported", 1)
    spec = _find(name)
    if spec is None:
        raise NotRunnableError(f"No module named {name}", 1)
    if spec.submodule_search_locations is not None:
        spec = None if name.endswith("__main__") else _find(f"{name}.__main__")
        if spec is None:
            text = f"No module named {name}.__main__; {name!r} is a package and cannot be directly executed"
            raise NotRunnableError(text, 1)
    program = _of_spec(spec)
    sys.argv[0] = spec.origin or name
    return program


def _find(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ImportError as error:
        # Only for the enclosing packages, not for modules that these import.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            text = f"Error while finding module specification for {name!r} ({type(error).__name__}: {error})"
            if name.endswith(".py"):
                text += f"; a script goes without -m, or as the module {name[:-3]}"
            raise NotRunnableError(text, 1) from error
        raise


def _of_spec(spec: Any) -> Program:
    code = spec.loader.get_code
    return Program(lambda: code(spec.name), spec, spec.loader, spec.origin)


def _is_safe_path() -> bool:
    """Whether Python was told to put nothing at the front of sys.path (-P, since 3.11)."""
    return bool(getattr(sys.flags, "safe_path", False))
