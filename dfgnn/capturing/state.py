"""Saves and restores what a step changes (parameters, buffers, optimizer, generators), for warm-ups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def prepare(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Makes an optimizer's step capturable: every replay reads learning rates and step counts from the
    device, so that schedulers of torch.optim go on working.

    Raises TypeError for an optimizer that has no such form.
    """
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        elif isinstance(optimizer, torch.optim.SGD):
            group["fused"], group["foreach"] = True, False  # only fused SGD reads its rate from the device
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
    """The settings of model and optimizer that become part of a CUDA graph: addresses, flags, Python numbers.

    Modules of the model must stay the same; their parameters may be replaced.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device):
        modules = [module.__dict__ for module in model.modules()]
        self._modules = modules
        self._parameters = [own["_parameters"] for own in modules if own["_parameters"]]
        self._shares = [(own, name) for own in modules for name in _SHARES if type(own.get(name)) is float]
        self._optimizer, self._device = optimizer, device
        self._seen: list[Any] = []  # states of the optimizer; held, so that their ids stay unique
        self._rates: list[Tensor] = []  # the learning rates that CUDA graphs read

    def now(self) -> tuple[Any, ...]:
        """The current settings, hashable. A CUDA graph captured with equal settings is still valid."""
        parameters = [x for attrs in self._parameters for x in attrs.values() if x is not None]
        settings = (
            tuple([attrs.get("training") for attrs in self._modules]),
            tuple([attrs.get(name) for attrs, name in self._shares]),
            tuple([x.data_ptr() for x in parameters]),
            tuple([x.requires_grad for x in parameters]),
        )
        optimizer = self._optimizer
        if optimizer is None:
            return settings
        if self._device.type == "cuda":
            self._follow(optimizer)
        if not any(optimizer.state is x for x in self._seen):  # load_state_dict makes a new one
            self._seen.append(optimizer.state)
        names = [name for name in optimizer.defaults if name != "lr"]
        groups = tuple(
            [
                (len(group["params"]), *[_setting(group.get(name)) for name in names])
                for group in optimizer.param_groups
            ]
        )
        return *settings, groups, id(optimizer.state)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Copies learning rates that the user has set anew into the tensors that CUDA graphs read."""
        groups = optimizer.param_groups
        if len(groups) == len(self._rates) and all(g["lr"] is x for g, x in zip(groups, self._rates)):
            return
        prepare(optimizer, self._device)
        for group, rate in zip(groups, self._rates):
            group["lr"] = rate.copy_(group["lr"])
        self._rates = [group["lr"] for group in groups]


# The names of dropout probabilities in modules.
_SHARES = "p", "dropout"


def _setting(value: Any) -> Any:
    """A hashable form of an optimizer's setting; of a tensor, the address at which CUDA graphs read it."""
    return ("at", value.data_ptr()) if isinstance(value, Tensor) else value


class Snapshot:
    """Copies of tensors, and the states of PyTorch's generators, taken before a warm-up or comparison, to be
    restored afterwards."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device):
        self._device = device
        self._tensors = [(x, x.detach().clone()) for x in tensors]
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @torch.no_grad()
    def restore(self) -> None:
        """Copies the values back into the same tensors, whose addresses CUDA graphs read. Their versions
        stay: a backward pass that is still to come may have saved them."""
        for x, before in self._tensors:
            if not torch.equal(x, before):
                x.data.copy_(before)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    def writes(self) -> bool:
        """Whether one of the tensors has other values since the snapshot."""
        return not all(torch.equal(x, before) for x, before in self._tensors)

    def drew(self) -> bool:
        """Whether random numbers have been drawn since the snapshot."""
        if not torch.equal(self._cpu, torch.get_rng_state()):
            return True
        return self._cuda is not None and not torch.equal(self._cuda, torch.cuda.get_rng_state(self._device))


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[Tensor]:
    """All tensors that a step may change."""
    yield from model.parameters()
    yield from model.buffers()
    if optimizer is None:
        return
    own = {id(x) for x in model.parameters()}
    for group in optimizer.param_groups:
        yield from (x for x in group["params"] if id(x) not in own)
    for state in optimizer.state.values():
        yield from (x for x in state.values() if isinstance(x, Tensor))


def forget_streams(tensors: Iterable[Tensor]) -> None:
    """Autograd adds up the gradient of a parameter on the stream of the call that used it first, as long as
    results of that call live: a script's last loss, say. A CUDA graph must have nothing to do with that
    stream. Data of another dtype makes autograd begin anew (its metadata no longer fit); gradients, hooks and
    versions stay."""
    for x in tensors:
        if type(x) is nn.Parameter and x.requires_grad:
            data = x.data
            x.data = data.new_empty(0, dtype=torch.float16 if x.dtype != torch.float16 else torch.float32)
            x.data = data


@contextmanager
def buffers_stay(model: nn.Module) -> Iterator[None]:
    """A context at whose end buffers that a module replaced (``self.running_mean = ...``) are the old tensors
    again, with the new values: the next replay reads the old memory."""
    before = [(module._buffers, name, x) for module in model.modules() for name, x in module._buffers.items()]
    yield
    with torch.no_grad():
        for buffers, name, x in before:
            new = buffers.get(name)
            if x is not None and new is not None and new is not x and new.shape == x.shape:
                buffers[name] = x.copy_(new)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """A context in which torch's dropout modules, and modules with a number ``dropout``, drop nothing."""
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
