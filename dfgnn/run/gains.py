"""What a script would gain by one line more, measured in the script: ``dfgnn.run --gain``.

Of each class of models that pass messages, one call in training is taken as a sample: copies of the model, as
it is and by each line, run forward and backward on copies of its arguments. A model is a module that no other
one calls. Nothing of the script's own is changed, its random numbers included.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..capturing import capture
from ..compiling import backend
from ..runtime import cuda_graphs
from .captured import Calls
from .models import Models
from .sample import Copy, milliseconds, said, tensors_of, unseen

COMPILE, CAPTURE = "dfgnn.compile(model)", "dfgnn.capture(loss, model, optimizer)"
FLAG = "python -m dfgnn.run --capture"

#: The call of a class that is the sample: what a first call prepares is done.
_SAMPLE = 3


class Gains:
    """Measures, while it is installed, a call of each class of models."""

    def __init__(self) -> None:
        self.calls: Counter[type] = Counter()
        self.found: dict[type, dict[str, Any]] = {}
        self.models = Models(self._called)
        self.install, self.remove = self.models.install, self.models.remove

    def _called(
        self, call: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        cls = type(module)
        if cls not in self.found:
            self.calls[cls] += 1
            if self.calls[cls] == _SAMPLE:
                self._sample(module, args, kwargs)
        return call(module, *args, **kwargs)

    def _sample(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.remove()  # the compiler is to see modules as they are
        try:
            self.found[type(module)] = self._measured(module, args, kwargs)
        except Exception as error:
            self.found[type(module)] = {"failed": said(error)}
        finally:
            self.install()

    def _measured(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        tensors = tensors_of(args, kwargs)
        on_gpu = any(x.device.type == cuda_graphs.Recorder.device_type for x in tensors)
        found: dict[str, Any] = {"milliseconds": 0.0, "lines": {}}
        with unseen(tensors):
            for line in ("", COMPILE, *((FLAG, CAPTURE) if on_gpu else ())):
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
    """The milliseconds that a call takes, forward and backward."""
    if line == COMPILE:
        copied.module.compile(backend=backend)
    step = copied.step
    if line == FLAG:
        calls = Calls(copied.module, copied.call, False)
        copied.call = lambda module, *args, **kwargs: calls(module, args, kwargs)
    if line == CAPTURE:
        step = capture(copied.loss, copied.module, torch.optim.SGD(copied.module.parameters(), lr=0.0))
    for _ in range(5 if line == FLAG else 3):
        step()
    if line == FLAG and not calls.row.replayed:
        raise RuntimeError(calls.row.reason)
    return milliseconds([step], on_gpu and torch.cuda.is_available())[0]


class Waits:
    """Sees by one call of a model whether a GPU waits for the host, and takes itself out then."""

    def __init__(self) -> None:
        self.calls = 0
        self.found: dict[str, Any] = {}
        self.models = Models(self._called)
        self.install, self.remove = self.models.install, self.models.remove

    def _called(
        self, call: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        self.calls += 1
        if self.calls <= _SAMPLE:
            return call(module, *args, **kwargs)
        self.remove()
        kinds = {x.device.type for x in tensors_of(args, kwargs, list(module.parameters()))}
        if kinds != {cuda_graphs.Recorder.device_type}:
            return call(module, *args, **kwargs)
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = call(module, *args, **kwargs)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        self.found = {"class": name, "host": 1e3 * (launched - start), "more": 1e3 * (done - launched)}
        return out


def of_waits(found: dict[str, Any]) -> list[str]:
    """The lines of the report about a GPU that waits for the host. There are none if the GPU, after the host
    has launched everything, works for more than a fifth of the host's time."""
    if not found or found["more"] > 0.2 * found["host"]:
        return []
    took = f"took the host {found['host']:.2f} ms, and the GPU {found['more']:.2f} ms more"
    return [
        f"  the GPU waits for the host: a forward of {found['class']} {took}",
        f"    {FLAG} replays such calls as CUDA graphs; --gain measures what this and other lines gain",
    ]


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of the report about gains, for a terminal: two for each model."""
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
