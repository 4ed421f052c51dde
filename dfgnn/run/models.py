"""The models of a script: modules that pass messages and that no other module calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..switch.replace import is_convolution
from .compiled import passes_messages


class Models:
    """Lets ``called(call, model, args, kwargs)`` make the calls of models while it is installed; ``call`` is
    that of nn.Module."""

    def __init__(self, called: Callable[[Callable[..., Any], nn.Module, tuple, dict[str, Any]], Any]):
        self.called = called
        self._call: Callable[..., Any] | None = None  # nn.Module's own
        # A module that was called -> whether it passes messages.
        self._is_model: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._inside = False

    def install(self) -> None:
        if self._call is not None:
            return
        self._call = call = nn.Module.__call__

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._inside:
                return call(module, *args, **kwargs)
            with self.inside():
                if not torch.is_grad_enabled() or not self._passes_messages(module):
                    return call(module, *args, **kwargs)
                return self.called(call, module, args, kwargs)

        __call__.passes_on_to = call  # type: ignore[attr-defined]  # so fused layers take no other way
        nn.Module.__call__ = __call__  # type: ignore[method-assign, assignment]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A context for a model's call, within which no other module counts as a model."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def remove(self) -> None:
        if self._call is not None:
            nn.Module.__call__ = self._call  # type: ignore[method-assign]
            self._call = None

    def _passes_messages(self, model: nn.Module) -> bool:
        if model not in self._is_model:
            classes = {type(module) for module in model.modules()}
            bases = {base for cls in classes for base in cls.__mro__}
            self._is_model[model] = any(map(passes_messages, classes)) or any(
                is_convolution(base) or base.__module__.startswith("dfgnn.nn.") for base in bases
            )
        return self._is_model[model]
