"""What a model's call reads outside of its modules and arguments, and which other code it calls.

Code of the script reads global variables, attributes of classes, of the script's Python modules and of
objects, and variables of enclosing functions. One call is recorded by the interpreter's profiling hook: where
the functions of the script that ran may read is known by the names in their code. The code of PyTorch, of
libraries built on it, and of what these use themselves, is taken to read nothing that changes.

Code of other packages, printing and writing are what a replay leaves out: they are noted.
"""

from __future__ import annotations

import builtins
import collections
import copy
import functools
import gc
import io
import os
import random
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import PLAIN

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
_WRITING_MODULES = {"_csv", "_pickle", "posix", "nt"}  # of Python, built in
#: Functions of trusted packages that set the state of generators, and that write.
_SEEDING = {"manual_seed", "manual_seed_all", "seed", "set_rng_state"}
_SAVING = {"save", "savez", "savez_compressed", "savetxt"}
#: Names in code that may read any attribute of an object.
_BY_ANY_NAME = {
    "getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "asdict", "astuple", "copy", "deepcopy",
}  # fmt: skip
#: How deep objects within objects are looked at; items of a list; and places all in all.
_DEPTH, _MOST_ITEMS, _MOST = 6, 1024, 2048
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_OF_MODULES = frozenset(vars(nn.Module()))


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
    of a place; lists: containers that calls may read; others: what the last recorded call called that a
    replay leaves out, and where; unknown: why not all places are known."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        roots = {_package(type(part).__module__) for part in module.modules()}
        self._packages = roots - _TRUSTED  # whose code is the script's, though it may be installed
        self._functions: dict[CodeType, dict[str, Any]] = {}  # of the script that ran -> their globals
        self._codes: set[CodeType] = set()  # that ran in this recording
        self._nested: set[CodeType] = set()  # of functions that are made within calls
        self._words: set[str] = set()  # names in the functions' code
        self.classes: set[type] = set()  # of objects among the arguments
        self.others: dict[str, str] = {}
        self.unknown = "its calls were not recorded"
        self._which: list[Any] = []  # of the last look
        self.version = 0  # counts how often more places were found
        self._forget()

    def _forget(self) -> None:
        self._places: dict[tuple[int, str], tuple[Callable[[str], Any], str]] = {}
        self._setters: dict[tuple[int, str], Callable[[str, Any], Any]] = {}
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
        self.unknown, known = "".join(failed[:1]), self._seen  # held until ids were compared
        try:
            self._look()
        except Exception as error:
            self.unknown = f"looking at what it reads raised {type(error).__name__}: {error}"
        before, self._which = self._which, self._found()
        # Fewer places are no change: functions of objects that are gone.
        self.version += not set(self._which) <= set(before)
        del known

    def _found(self) -> list[Any]:
        """Which places and containers are looked at, but for those that a script puts anew into attributes of
        the model, which `ModelState` looks at."""
        module = self._module()
        parts = () if module is None else module.modules()
        direct = {id(x) for part in parts for x in vars(part).values()}
        return [*self._places, *(id(x) for x in self.lists if id(x) not in direct)]

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
        if caller is not None and _leaves_something(frame):
            self._other(code.co_name, caller)
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
            known = package in _TRUSTED or package in sys.stdlib_module_names
            other = package if package in _WRITING_MODULES or not known else ""
        elif type(owner).__module__ in _WRITING_MODULES:
            other = what.__name__
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
        functions: dict[CodeType, list[FunctionType]] = {}
        for x in gc.get_referrers(*self._functions) if self._functions else ():
            if isinstance(x, FunctionType):
                functions.setdefault(x.__code__, []).append(x)
        for code, of_module in self._functions.items():
            for name in self._words if "globals" in code.co_names else code.co_names:
                self._place(of_module, of_module, name, 1)
                package = of_module.get("__package__")  # of a module that the function imports
                for imported in (name, f"{package}.{name}"):
                    if isinstance(found := sys.modules.get(imported), ModuleType):
                        self._value(found, 1)
            for function in functions.get(code, ()):
                self._value(function, 1)
            if {*code.co_freevars} - {"__class__"} and code not in self._nested:
                self._enclosing(code, functions.get(code, []))
        for part in module.modules():
            self._class(type(part), 1)
            for name, value in list(vars(part).items()):
                if name not in _OF_MODULES and not (name.endswith("hooks") and not value):
                    self._value(value, 1)
        for cls in self.classes:
            self._class(cls, 1)
        if len(self._places) > _MOST:
            self.unknown = "its calls may read more objects than can be looked at"

    def _place(self, owner: Any, values: Any, name: str, depth: int) -> None:
        """values: a mapping, that of the owner's attributes."""
        if name in values and (id(owner), name) not in self._places and len(self._places) <= _MOST:
            self._seen[id(owner)] = owner
            self._places[id(owner), name] = values.get, name
            is_dict = isinstance(values, dict)
            self._setters[id(owner), name] = values.__setitem__ if is_dict else partial(setattr, owner)
            self._value(values[name], depth)

    def _value(self, value: Any, depth: int) -> None:
        """What may be read of a value."""
        if isinstance(value, Tensor) or id(value) in self._own or id(value) in self._seen:
            return
        if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, partial, weakref.ref)):
            self._function(value, depth)
        elif isinstance(value, CONTAINERS):
            self._items(value, depth)
            if isinstance(getattr(value, "__dict__", None), dict):
                self._attributes(value, depth)
        elif _is_array(value):
            self._seen[id(value)] = value
            self.lists.append(value)
            if value.size > _MOST_ITEMS or value.dtype.hasobject:
                self._hidden(value)
        elif is_generator(value) or hasattr(type(value), "__next__"):
            self._hidden(value)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, ModuleType):
            if not _is_library(value.__name__, getattr(value, "__file__", None)):
                self._attributes(value, depth)
        else:
            kind = type(value)
            of_script = kind.__module__ in ("argparse", "types", "collections") or not _is_library(
                kind.__module__, None
            )
            if isinstance(value, nn.Module) and any(map(_has_hooks, value.modules())):
                self._hidden(value)
            if isinstance(value, nn.Module) or (of_script and kind.__module__ != "builtins"):
                self._attributes(value, depth)
                self._class(kind, depth)

    def _hidden(self, value: Any) -> None:
        self.unknown = f"it may read a {type(value).__name__}, of which is not seen whether it changes"

    def _items(self, value: Any, depth: int) -> None:
        self._seen[id(value)] = value
        if len(value) > _MOST_ITEMS:
            self._hidden(value)
            return
        if not isinstance(value, (tuple, frozenset)):
            self.lists.append(value)
        items = list(value.values() if isinstance(value, dict) else value)
        if depth > _DEPTH and any(isinstance(x, CONTAINERS) or hasattr(x, "__dict__") for x in items):
            self._hidden(value)
            return
        for x in items:
            self._value(x, depth + 1)

    def _function(self, value: Any, depth: int) -> None:
        """What a function holds."""
        self._seen[id(value)] = value
        if isinstance(value, partial):
            held = [value.func, value.args, value.keywords]
        elif isinstance(value, weakref.ref):
            held = [value()]
        elif isinstance(value, FunctionType):
            if _is_library(value.__module__ or "", None):
                return
            held = [value.__defaults__, value.__kwdefaults__]
            for name in list(vars(value)):
                self._place(value, vars(value), name, depth + 1)
        else:  # of the host's generators the states are compared
            owner = getattr(value, "__self__", None)
            is_builtin = isinstance(value, BuiltinFunctionType)
            if isinstance(owner, ModuleType) or (is_builtin and not isinstance(owner, CONTAINERS)):
                return
            shared = owner is getattr(random.random, "__self__", None)
            held = [getattr(value, "__func__", None), None if shared else owner]
        for x in held:
            if x is not None:
                self._value(x, depth)

    def _attributes(self, x: Any, depth: int) -> None:
        self._seen[id(x)] = x
        if depth > _DEPTH:
            self.unknown = f"it may read more of a {type(x).__name__} within other objects than is looked at"
            return
        # A module that is no part of the model is read by PyTorch's code, too.
        whole = isinstance(x, nn.Module) or type(x).__module__ == "collections"
        if not whole and self._words & _BY_ANY_NAME:  # of the script's Python modules only what code names
            whole = not any(getattr(x, "__dict__", None) is own for own in self._functions.values())
        for name in list(getattr(x, "__dict__", ())):
            if whole or name in self._words:
                self._place(x, vars(x), name, depth + 1)
        for cls in type(x).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if (whole or name in self._words) and hasattr(x, name):
                    self._places[id(x), name] = partial(_slot, x), name
                    self._setters[id(x), name] = partial(setattr, x)
                    self._value(getattr(x, name), depth + 1)

    def _class(self, cls: type, depth: int) -> None:
        if type(cls) is not type and id(type(cls)) not in self._seen:
            self._class(type(cls), depth)
        for base in cls.__mro__:
            if id(base) not in self._seen and not _is_library(base.__module__, None):
                self._seen[id(base)] = base
                for name in vars(base):
                    if name in self._words:
                        self._place(base, vars(base), name, depth + 1)

    def _enclosing(self, code: CodeType, found: list[FunctionType]) -> None:
        """The variables of enclosing functions."""
        if not found:  # as gc.freeze() hides them
            self.unknown = (
                f"what encloses {code.co_name} ({os.path.basename(code.co_filename)}) was not found"
            )
        for cell in chain.from_iterable(function.__closure__ or () for function in found):
            self._seen[id(cell)] = cell
            self._places[id(cell), ""] = partial(_content, cell), ""
            self._setters[id(cell), ""] = partial(_fill, cell)
            self._value(_content(cell), 1)

    def restoring(self) -> Callable[[], None]:
        """What puts back the objects that are there now, after calls that were a sample."""
        places = [(get, name, self._setters[key], get(name)) for key, (get, name) in self._places.items()]
        contents = [(x, copy.copy(x)) for x in self.lists]

        def restore() -> None:
            for get, name, put, value in places:
                if get(name) is not value:
                    put(name, value)
            for x, before in contents:
                if seen_in(x) != seen_in(before):
                    put_back(x, before)

        return restore


def is_generator(x: Any) -> bool:
    """Whether it is a generator of random numbers."""
    numpy = sys.modules.get("numpy")
    names = ("Generator", "RandomState", "BitGenerator")
    of_numpy = [getattr(numpy.random, name) for name in names] if numpy else []
    return isinstance(x, (torch.Generator, random.Random, *of_numpy))


def _is_array(x: Any) -> bool:
    numpy = sys.modules.get("numpy")  # which is there if one is
    return numpy is not None and isinstance(x, numpy.ndarray)


def seen_in(x: Any) -> tuple[Any, ...]:
    """What is seen of a container."""
    if _is_array(x):
        return x.shape, x.dtype, x.tobytes()
    if isinstance(x, (set, frozenset)):
        return (frozenset(map(seen, x)),)
    if isinstance(x, dict):
        return (*map(seen, x), *map(seen, x.values()))
    return tuple(map(seen, x))


def seen(x: Any) -> Any:
    """What is seen of an object: which it is, or which value."""
    if isinstance(x, Tensor):
        return id(x), 0 if x.is_inference() else x._version
    return (type(x), x) if type(x) in PLAIN else id(x)


def put_back(x: Any, before: Any) -> None:
    """Gives a container the contents of another one."""
    if _is_array(x):
        x[...] = before
        return
    x.clear()
    x.extend(before) if isinstance(x, (list, collections.deque)) else x.update(before)


def _has_hooks(module: nn.Module) -> bool:
    return any(x for name, x in vars(module).items() if name.endswith("hooks") and "state_dict" not in name)


def _leaves_something(frame: FrameType) -> bool:
    """Whether a function of a trusted package writes or seeds."""
    name, module = frame.f_code.co_name, str(frame.f_globals.get("__name__", ""))
    if name in _SEEDING:
        return module in ("torch.random", "torch.cuda.random")
    return module.startswith("torch.utils.tensorboard") or (
        name in _SAVING and module.startswith(("torch.serialization", "numpy.lib"))
    )


def _slot(x: Any, name: str) -> Any:
    return getattr(x, name, None)


def _fill(cell: CellType, name: str, value: Any) -> None:
    cell.cell_contents = value


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
