"""What a script would gain by one line more, measured in the script: ``dfgnn.run --gain``.

Of each class of models that pass messages, one call in training is taken as a sample: copies of the model, as
it is and by each line, run forward and backward on copies of its arguments. A model is a module that no other
one calls. Nothing of the script's own is changed, its random numbers included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..capturing import capture
from ..compiling import backend
from ..switch.replace import is_convolution
from .compiled import passes_messages
from .sample import Copy, milliseconds, said, tensors_of, unseen

COMPILE, CAPTURE = "dfgnn.compile(model)", "dfgnn.capture(loss, model, optimizer)"

#: The call of a class that is the sample: what a first call prepares is done.
_SAMPLE = 3


class Gains:
    """Measures, while it is installed, a call of each class of models."""

    def __init__(self) -> None:
        self.calls: Counter[type] = Counter()
        self.found: dict[type, dict[str, Any]] = {}
        self._call: Callable[..., Any] | None = None  # nn.Module's own
        # A module that was called -> whether it passes messages.
        self._is_model: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._inside = False

    def install(self) -> Gains:
        if self._call is None:
            self._call = call = nn.Module.__call__
            before = self._before

            def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if self._inside or torch.compiler.is_compiling():
                    return call(module, *args, **kwargs)
                before(module, args, kwargs)
                self._inside = True
                try:
                    return call(module, *args, **kwargs)
                finally:
                    self._inside = False

            nn.Module.__call__ = __call__  # type: ignore[method-assign, assignment]
        return self

    def remove(self) -> None:
        if self._call is not None:
            nn.Module.__call__ = self._call  # type: ignore[method-assign]
            self._call = None

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        cls = type(module)
        if cls in self.found or not torch.is_grad_enabled() or not self._passes_messages(module):
            return
        self.calls[cls] += 1
        if self.calls[cls] != _SAMPLE:
            return
        self.remove()  # the compiler is to see modules as they are
        try:
            self.found[cls] = self._measured(module, args, kwargs)
        except Exception as error:
            self.found[cls] = {"failed": said(error)}
        finally:
            self.install()

    def _passes_messages(self, model: nn.Module) -> bool:
        if model not in self._is_model:
            classes = {type(module) for module in model.modules()}
            bases = {base for cls in classes for base in cls.__mro__}
            self._is_model[model] = any(map(passes_messages, classes)) or any(
                is_convolution(base) or base.__module__.startswith("dfgnn.nn.") for base in bases
            )
        return self._is_model[model]

    def _measured(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        tensors = tensors_of(args, kwargs)
        on_gpu = any(x.is_cuda for x in tensors)
        found: dict[str, Any] = {"milliseconds": 0.0, "lines": {}}
        with unseen(tensors):
            for line in ("", COMPILE, *[CAPTURE] * on_gpu):
                copied = Copy(module, args, kwargs)
                try:
                    took = _milliseconds(copied, line, on_gpu)
                except Exception as error:
                    if not line:
                        raise
                    found["lines"][line] = said(error)
                else:
                    found["lines"] |= {line: took} if line else {}
                    found["milliseconds"] = found["milliseconds"] or took
        return found

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"class": f"{cls.__module__}.{cls.__qualname__}", "calls": self.calls[cls], **found}
            for cls, found in self.found.items()
        ]


def _milliseconds(copied: Copy, line: str, on_gpu: bool) -> float:
    """Of a call, forward and backward."""
    if line == COMPILE:
        copied.module.compile(backend=backend)
    step = copied.step
    if line == CAPTURE:
        step = capture(copied.loss, copied.module, torch.optim.SGD(copied.module.parameters(), lr=0.0))
    for _ in range(3):
        step()
    return milliseconds([step], on_gpu)[0]


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Of the report, for a terminal: two of each model."""
    said = []
    for row in rows:
        if "failed" in row:
            said.append(f"  {row['class']}: what one line more would gain was not measured, {row['failed']}")
            continue
        before = row["milliseconds"]
        said.append(
            f"  one line more: a call of {row['class']}, forward and backward, takes {before:.2f} ms as it is"
        )
        parts = []
        for line, took in row["lines"].items():
            if isinstance(took, str):
                parts.append(f"{line}: not possible ({took})")
            else:
                worth = f"{before / took:.2f} times as fast" if took < before else "nothing gained"
                parts.append(f"{line}: {took:.2f} ms, {worth}")
        said.append(f"    {'; '.join(parts)}")
    return said or ["  --gain: no model with message passing was trained for three calls"]
