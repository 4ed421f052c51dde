"""What a step changes: parameters, buffers, the optimizer and the generators; kept and put back in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def prepare(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Makes an optimizer's step one that a CUDA graph can hold: learning rates and steps are read from the
    device at every replay, so that schedulers of torch.optim go on working.

    Raises TypeError for one that has no such form.
    """
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        elif isinstance(optimizer, torch.optim.SGD):
            group["fused"], group["foreach"] = True, False  # the one form that takes its rate from the device
        else:
            raise TypeError(
                "dfgnn.capture: optimizer: expected one with capturable=True, or torch.optim.SGD, "
                f"got {type(optimizer).__name__}"
            )
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(float(group["lr"]), device=device)
        elif group["lr"].device != device:
            group["lr"] = group["lr"].to(device)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device != device and value.dim() == 0:
                state[key] = value.to(device)


class Snapshot:
    """The state before something that has to leave no trace."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device):
        self._device = device
        self._tensors = [(x, x.detach().clone()) for x in _tensors(model, optimizer)]
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @torch.no_grad()
    def restore(self) -> None:
        """Into the same tensors, as a CUDA graph will read them."""
        for x, before in self._tensors:
            x.copy_(before)
        self.restore_generators()

    def restore_generators(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    def drew(self) -> bool:
        """Whether random numbers were drawn since."""
        if not torch.equal(self._cpu, torch.get_rng_state()):
            return True
        return self._cuda is not None and not torch.equal(self._cuda, torch.cuda.get_rng_state(self._device))


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    if optimizer is None:
        return
    own = {id(x) for x in model.parameters()}
    for group in optimizer.param_groups:
        yield from (x for x in group["params"] if id(x) not in own)
    for state in optimizer.state.values():
        yield from (x for x in state.values() if isinstance(x, Tensor))


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Modules whose ``dropout`` is a number, or that are one of torch's dropouts, drop nothing."""
    changed: list[tuple[Any, str, float]] = []
    for module in model.modules():
        names = ["dropout", *(["p"] if isinstance(module, nn.modules.dropout._DropoutNd) else [])]
        for name in names:
            value = module.__dict__.get(name)
            if isinstance(value, float) and value > 0:
                changed.append((module, name, value))
                setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
