"""Compiles the modules of a script that hold message passing of their own: ``python -m dfgnn.run --compile``.

Such a module is of a class of the script, not of a library, whose own code mentions a segment softmax or sum.
Each instance is compiled when it is first called; a module within another one is compiled as a part of that.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from ..compiling import backend
from ..compiling.backend import listeners
from ..compiling.report import Report
from ..runtime import torch_internals as internals
from .layers import shown

_WORDS = re.compile(r"softmax|scatter|index_add|index_put|segment_reduce|propagate\(|update_all")
_LIBRARIES = {"torch", "torch_geometric", "torch_scatter", "torch_sparse", "pyg_lib", "dgl", "dfgnn"}


class Compiled:
    """Makes modules compile themselves while it is installed, and notes what was found in them."""

    def __init__(self, started: str):
        self.started = started
        self.modules: Counter[str] = Counter()  # class -> number of instances
        self.reports: list[Report] = []
        self._undo: Callable[[], None] | None = None

    def install(self) -> Compiled:
        construct = nn.Module.__init__
        counted = self._count

        def __init__(module: Any, *args: Any, **kwargs: Any) -> None:
            construct(module, *args, **kwargs)
            counted(module)

        # Code that asks for int(index.max()) would else end the graph between a softmax and its sum.
        internals.let_dynamo_record_numbers()
        nn.Module.__init__ = __init__  # type: ignore[method-assign, assignment]
        listeners.append(self.reports.append)

        def undo() -> None:
            nn.Module.__init__ = construct  # type: ignore[method-assign]
            listeners.remove(self.reports.append)

        self._undo = undo
        return self

    def remove(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _count(self, module: nn.Module) -> None:
        cls = type(module)
        if passes_messages(cls) and module._compiled_call_impl is None:
            self.modules[f"{cls.__module__}.{cls.__qualname__}"] += 1
            module.compile(backend=backend)

    def rows(self) -> dict[str, Any]:
        """What was compiled, and each attention found: its file and line, its form, or why it has none."""
        found = dict.fromkeys(x for report in self.reports for x in report.found)
        return {
            "modules": dict(self.modules),
            "attention": [
                {
                    "file": shown(x.place.file, self.started),
                    "line": x.place.line,
                    "form": x.form,
                    "reason": x.reason,
                }
                for x in found
            ],
        }


def passes_messages(cls: type) -> bool:
    """Whether a class of the script has message passing of its own."""
    if cls not in _known:
        _known[cls] = _passes_messages(cls)
    return _known[cls]


_known: dict[type, bool] = {}


def _passes_messages(cls: type) -> bool:
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in _LIBRARIES or base is object:
            continue
        try:
            if _WORDS.search(inspect.getsource(base)):
                return True
        except (OSError, TypeError):  # its source cannot be read
            continue
    return False
