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


class Settings:
    """What a CUDA graph of a step has of its model and optimizer beside values: addresses, flags, numbers.

    Modules of the model must stay; their parameters may be replaced.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device):
        modules = [module.__dict__ for module in model.modules()]
        self._modules = modules
        self._parameters = [own["_parameters"] for own in modules if own["_parameters"]]
        self._shares = [(own, name) for own in modules for name in _SHARES if type(own.get(name)) is float]
        self._optimizer, self._device = optimizer, device
        self._seen: list[Any] = []  # states of the optimizer; kept, so that ids are told apart
        self._rates: list[Tensor] = []

    def now(self) -> tuple[Any, ...]:
        """Hashable; equal where a graph of before computes what a new one would."""
        parameters = [x for own in self._parameters for x in own.values() if x is not None]
        found = (
            tuple([own["training"] for own in self._modules]),
            tuple([own.get(name) for own, name in self._shares]),
            tuple([x.data_ptr() for x in parameters]),
            tuple([x.requires_grad for x in parameters]),
        )
        optimizer = self._optimizer
        if optimizer is None:
            return found
        if self._device.type == "cuda":
            self._follow(optimizer)
        if not any(optimizer.state is x for x in self._seen):  # load_state_dict makes another one
            self._seen.append(optimizer.state)
        names = [name for name in optimizer.defaults if name != "lr"]
        groups = tuple(
            [
                (len(group["params"]), *[_setting(group.get(name)) for name in names])
                for group in optimizer.param_groups
            ]
        )
        return *found, groups, id(optimizer.state)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Learning rates that were given as other tensors or numbers go to where graphs read them."""
        groups = optimizer.param_groups
        if len(groups) == len(self._rates) and all(g["lr"] is x for g, x in zip(groups, self._rates)):
            return
        prepare(optimizer, self._device)
        for group, rate in zip(groups, self._rates):
            group["lr"] = rate.copy_(group["lr"])
        self._rates = [group["lr"] for group in groups]


# What modules call the share that they drop.
_SHARES = "p", "dropout"


def _setting(value: Any) -> Any:
    return ("at", value.data_ptr()) if isinstance(value, Tensor) else value


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
def buffers_stay(model: nn.Module) -> Iterator[None]:
    """A buffer that a module replaces (``self.running_mean = ...``) gets the values of the new one, as its
    memory is what the next replay reads."""
    before = [
        (own, name, x) for module in model.modules() for own in (module._buffers,) for name, x in own.items()
    ]
    yield
    with torch.no_grad():
        for own, name, x in before:
            new = own.get(name)
            if x is not None and new is not None and new is not x and new.shape == x.shape:
                own[name] = x.copy_(new)


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
