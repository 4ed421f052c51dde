"""What a model's call reads outside of its modules and arguments, and which other code it calls.

Code of the script reads global variables, attributes of classes, of the script's Python modules and of
objects, and variables of enclosing functions. One call is recorded by the interpreter's profiling hook: where
the functions of the script that ran may read is known by the names in their code. The code of PyTorch, of
libraries built on it, and of what these use themselves, is taken to read nothing that changes.

Code of other packages, printing and writing are what a replay leaves out: they are noted.
"""

from __future__ import annotations

import builtins
import functools
import gc
import io
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

#: Packages whose code computes, and leaves nothing elsewhere that a script would miss.
_TRUSTED = {
    "torch", "torch_geometric", "torch_scatter", "torch_sparse", "torch_cluster", "torch_spline_conv",
    "pyg_lib", "dgl", "dfgnn", "numpy", "scipy", "einops", "opt_einsum", "opt_einsum_fx", "e3nn", "sympy",
    "jaxtyping", "beartype", "typeguard", "typing_extensions", "packaging",
    "abc", "ast", "bisect", "collections", "contextlib", "copy", "copyreg", "dataclasses", "enum",
    "functools", "heapq", "importlib", "inspect", "itertools", "keyword", "linecache", "math", "numbers",
    "operator", "random", "re", "reprlib", "statistics", "string", "textwrap", "threading", "token",
    "tokenize", "types", "typing", "warnings", "weakref", "_collections_abc", "_weakrefset",
}  # fmt: skip
#: Where packages are installed, and Python's own modules.
_INSTALLED = tuple(
    os.path.join(path, "")
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OURS = {"dfgnn"}  # also in a checkout
_WRITING = {"print", "input", "open", "breakpoint"}
#: How deep objects within objects are looked at; items of a list; and places all in all.
_DEPTH, _MOST_ITEMS, _MOST = 4, 256, 2048
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


_recordings = 0


def is_recording() -> bool:
    """Whether a call is being recorded, whose modules are to run as written."""
    return _recordings > 0


@contextmanager
def paused() -> Iterator[None]:
    """A context whose calls are not recorded, such as those of a compiler."""
    profile = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profile)


class Elsewhere:
    """The places that calls of a model read. places: functions, and the name with which each gives the value
    of a place; lists: lists and dicts that hold objects of which places were found; others: what the last
    recorded call called that a replay leaves out, and where; unknown: why not all places are known."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        roots = {_package(type(part).__module__) for part in module.modules()}
        self._packages = roots - _TRUSTED  # whose code is the script's, though it may be installed
        self._functions: dict[CodeType, dict[str, Any]] = {}  # of the script that ran -> their globals
        self._codes: set[CodeType] = set()  # that ran in this recording
        self._nested: set[CodeType] = set()  # of functions that are made within calls
        self._words: set[str] = set()  # names in the functions' code
        self.others: dict[str, str] = {}
        self.unknown = "its calls were not recorded"
        self.version = 0  # counts how often other places were found
        self._forget()

    def _forget(self) -> None:
        self._places: dict[tuple[int, str], tuple[Callable[[str], Any], str]] = {}
        self.lists: list[Any] = []
        self._seen: dict[int, Any] = {}  # objects, held, so that their ids stay theirs

    @property
    def places(self) -> list[tuple[Callable[[str], Any], str]]:
        return [*self._places.values()]

    # ---- a call

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which calls are recorded."""
        if sys.getprofile() is not None:
            self.unknown = "a profiler runs, so that what it reads was not recorded"
            yield
            return
        failed: list[str] = []
        self._codes, self.others = set(), {}

        def profile(frame: FrameType, event: str, what: Any) -> None:
            try:
                if event == "call":
                    self._called(frame)
                elif event == "c_call":
                    self._called_builtin(frame, what)
            except Exception as error:  # of an object of the script
                failed.append(f"looking at what it calls raised {type(error).__name__}: {error}")

        global _recordings
        _recordings += 1
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            _recordings -= 1
        before, self.unknown = [*self._places], "".join(failed[:1])
        try:
            self._look()
        except Exception as error:
            self.unknown = f"looking at what it reads raised {type(error).__name__}: {error}"
        self.version += before != [*self._places]

    def _is_own(self, frame: FrameType) -> bool:
        """Whether it is of the script, or of an installed package that has a class of the model."""
        package, file = _package_of(frame), frame.f_code.co_filename
        if _is_installed(file):
            return package in self._packages
        if file.startswith("<") and (_is_library(package, None) or package.startswith("namedtuple_")):
            return False  # generated, as the methods of a dataclass are
        return package not in _OURS

    def _called(self, frame: FrameType) -> None:
        code, caller = frame.f_code, frame.f_back
        if code in self._codes:
            return
        if self._is_own(frame):
            self._codes.add(code)
            self._functions[code] = frame.f_globals
            self._nested.update(x for x in code.co_consts if isinstance(x, CodeType))
            self._words.update(code.co_names, (x for x in code.co_consts if isinstance(x, str)))
        elif not _is_installed(code.co_filename) or _package_of(frame) in _TRUSTED:
            self._codes.add(code)
        elif caller is not None and self._is_own(caller):  # what other libraries call is theirs
            self._other(_package_of(frame) or code.co_filename, caller)

    def _called_builtin(self, frame: FrameType, what: Any) -> None:
        owner = getattr(what, "__self__", None)
        if isinstance(owner, io.IOBase) or (owner is builtins and what.__name__ in _WRITING):
            other = what.__name__
        elif owner is None or isinstance(owner, ModuleType):
            package = _package(getattr(what, "__module__", None) or "")
            other = "" if package in _TRUSTED or package in sys.stdlib_module_names else package
        else:
            return
        if other and self._is_own(frame):
            self._other(other, frame)

    def _other(self, what: str, frame: FrameType) -> None:
        self.others.setdefault(what, f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")

    # ---- what is read

    def _look(self) -> None:
        """Finds the places."""
        self._forget()
        module = self._module()
        if module is None:
            return
        self._own = set(map(id, module.modules()))
        for code, of_module in self._functions.items():
            for name in code.co_names:
                self._place(of_module, of_module, name, 1)
            if {*code.co_freevars} - {"__class__"} and code not in self._nested:
                self._enclosing(code)
        for part in module.modules():
            self._class(type(part), 1)
            for value in list(vars(part).values()):
                self._value(value, 1)
        if len(self._places) > _MOST:
            self.unknown = "its calls may read more objects than can be looked at"

    def _place(self, owner: Any, values: Any, name: str, depth: int) -> None:
        """values: a mapping, that of the owner's attributes."""
        if name in values and (id(owner), name) not in self._places and len(self._places) <= _MOST:
            self._seen[id(owner)] = owner
            self._places[id(owner), name] = values.get, name
            self._value(values[name], depth)

    def _value(self, value: Any, depth: int) -> None:
        """What may be read of a value."""
        if isinstance(value, (Tensor, *_FUNCTIONS)) or id(value) in self._own or id(value) in self._seen:
            return
        if isinstance(value, (list, tuple, dict, set)):
            self._items(value, depth)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, ModuleType):
            if not _is_library(value.__name__, getattr(value, "__file__", None)):
                self._attributes(value, depth)
        elif isinstance(getattr(value, "__dict__", None), dict):
            kind = type(value)
            of_script = kind.__module__ in ("argparse", "types") or not _is_library(kind.__module__, None)
            if isinstance(value, nn.Module) or of_script:
                self._attributes(value, depth)
                self._class(kind, depth)

    def _items(self, value: Any, depth: int) -> None:
        if not value or depth > _DEPTH or len(value) > _MOST_ITEMS:
            return
        self._seen[id(value)] = value
        before = len(self._places)
        for x in list(value.values() if isinstance(value, dict) else value):
            self._value(x, depth + 1)
        if len(self._places) > before and isinstance(value, (list, dict)):
            self.lists.append(value)

    def _attributes(self, x: Any, depth: int) -> None:
        self._seen[id(x)] = x
        if depth > _DEPTH:
            self.unknown = f"it may read more of a {type(x).__name__} within other objects than is looked at"
            return
        whole = isinstance(x, nn.Module)  # no part of the model; PyTorch's code reads it, too
        for name in list(vars(x)):
            if whole or name in self._words:
                self._place(x, vars(x), name, depth + 1)

    def _class(self, cls: type, depth: int) -> None:
        for base in cls.__mro__:
            if id(base) not in self._seen and not _is_library(base.__module__, None):
                self._seen[id(base)] = base
                for name in vars(base):
                    if name in self._words:
                        self._place(base, vars(base), name, depth + 1)

    def _enclosing(self, code: CodeType) -> None:
        """The variables of enclosing functions."""
        found = [x for x in gc.get_referrers(code) if isinstance(x, FunctionType) and x.__code__ is code]
        if not found:  # as gc.freeze() hides them
            self.unknown = (
                f"what encloses {code.co_name} ({os.path.basename(code.co_filename)}) was not found"
            )
        for cell in chain.from_iterable(function.__closure__ or () for function in found):
            self._seen[id(cell)] = cell
            self._places[id(cell), ""] = partial(_content, cell), ""
            self._value(_content(cell), 1)


def _content(cell: CellType, name: str = "") -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _package(name: str) -> str:
    return name.partition(".")[0]


def _package_of(frame: FrameType) -> str:
    return _package(str(frame.f_globals.get("__name__", "")))


def _is_installed(file: str) -> bool:
    return file.startswith((*_INSTALLED, "<frozen "))


@functools.cache
def _is_library(name: str, file: str | None) -> bool:
    """Whether a Python module is of a package whose variables and classes are taken to stay the same."""
    package = _package(name)
    return package in _TRUSTED or package in sys.stdlib_module_names or _is_installed(file or "")
