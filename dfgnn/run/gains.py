"""What compiling a script's own message passing would gain, measured in the script: ``dfgnn.run --gain``.

Of each class that `compiled.Compiled` would compile, one call in training is taken as a sample: copies of the
module, as it is and compiled, run forward and backward on copies of its arguments. Nothing of the script's
own is changed, its random numbers included.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from ..compiling import backend
from .compiled import passes_messages

#: The call of a class that is the sample: what a first call prepares is done.
_SAMPLE = 3
_STEPS = 5


class Gains:
    """Measures, while it is installed, a call of each class with message passing of its own."""

    def __init__(self) -> None:
        self.calls: Counter[type] = Counter()
        self.found: dict[type, dict[str, Any]] = {}
        self._call: Callable[..., Any] | None = None  # nn.Module's own

    def install(self) -> Gains:
        if self._call is None:
            self._call = call = nn.Module.__call__
            before = self._before

            def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                before(module, args, kwargs)
                return call(module, *args, **kwargs)

            nn.Module.__call__ = __call__  # type: ignore[method-assign, assignment]
        return self

    def remove(self) -> None:
        if self._call is not None:
            nn.Module.__call__ = self._call  # type: ignore[method-assign]
            self._call = None

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        cls = type(module)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not passes_messages(cls):
            return
        self.calls[cls] += 1
        if self.calls[cls] != _SAMPLE:
            return
        self.remove()  # the compiler is to see modules as they are
        try:
            self.found[cls] = self._measured(module, args, kwargs)
        except Exception as error:
            self.found[cls] = {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}
        finally:
            self.install()

    def _measured(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        devices = {x.device for x in tensors if x.is_cuda}
        seconds = []
        with torch.random.fork_rng(list(devices)):
            for compiled in (False, True):
                copied = copy.deepcopy(module)
                if compiled:
                    copied.compile(backend=backend)
                given: Any = tree_map(_copied, args), tree_map(_copied, kwargs)
                seconds.append(_least_seconds(copied, given[0], given[1], bool(devices)))
        return {"milliseconds": round(1000 * seconds[0], 3), "compiled": round(1000 * seconds[1], 3)}

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"class": f"{cls.__module__}.{cls.__qualname__}", "calls": self.calls[cls], **found}
            for cls, found in self.found.items()
        ]


def _copied(x: Any) -> Any:
    """A tensor of its own; other objects as they are copied."""
    if isinstance(x, Tensor):
        return x.detach().clone().requires_grad_(x.requires_grad)
    return copy.deepcopy(x)


def _least_seconds(module: nn.Module, args: tuple, kwargs: dict[str, Any], on_gpu: bool) -> float:
    """Of a call, forward and backward."""
    least = float("inf")
    for _ in range(2 + _STEPS):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        outputs = [x for x in tree_flatten(module(*args, **kwargs))[0] if isinstance(x, Tensor)]
        total = sum(x.float().sum() for x in outputs if x.requires_grad)
        if isinstance(total, Tensor):
            total.backward()
        if on_gpu:
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - start)
    return least


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Of the report, for a terminal."""
    said = ["  what `model = dfgnn.compile(model)` would gain, in one call, forward and backward:"]
    for row in rows:
        if "failed" in row:
            said.append(f"    {row['class']}: not measured, {row['failed']}")
            continue
        before, after = row["milliseconds"], row["compiled"]
        worth = f"{before / after:.2f} times as fast" if after < before else "nothing"
        said.append(f"    {row['class']}: {before:.2f} ms, compiled {after:.2f}: {worth}")
    return said if rows else ["  --gain: no module with message passing of its own was trained"]
