"""One call of a module in training as a sample: repeated on copies, forward and backward."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from ..runtime import torch_internals as internals

_STEPS, _SECONDS = 5, 2.0  # the most timed steps of each way, and seconds after which two are enough


class Copy:
    """A copy of a module and of the arguments of a call. call: what is called with both."""

    def __init__(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any], call: Any = nn.Module.__call__
    ):
        self.module, self.call = copy.deepcopy(module), call
        self.args, self.kwargs = tree_map(_copied, args), tree_map(_copied, kwargs)

    def outputs(self) -> list[Tensor]:
        return tensors_of(self.call(self.module, *self.args, **self.kwargs))

    def loss(self) -> Any:
        return sum(x.float().sum() for x in self.outputs() if x.requires_grad)

    def step(self) -> None:
        self.module.zero_grad()
        loss = self.loss()
        if isinstance(loss, Tensor):
            loss.backward()

    def results(self, training: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """(outputs, gradients) of a step; without training in eval mode."""
        modes = {part: part.training for part in self.module.modules()}
        for part, mode in modes.items():
            part.training = mode and training
        try:
            return self._results()
        finally:
            for part, mode in modes.items():
                part.training = mode

    def _results(self) -> tuple[list[Tensor], list[Tensor]]:
        inputs = [x for x in tensors_of(self.args, self.kwargs) if x.requires_grad]
        for x in inputs:
            x.grad = None
        self.module.zero_grad()
        outputs = self.outputs()
        loss = sum((x.float() * x.detach()).sum() for x in outputs if x.requires_grad)
        if isinstance(loss, Tensor):
            loss.backward()
        grads = [x.grad for x in (*inputs, *self.module.parameters()) if x.grad is not None]
        return [x.detach() for x in outputs], grads


def tensors_of(*arguments: Any) -> list[Tensor]:
    return [x for x in tree_flatten(arguments)[0] if isinstance(x, Tensor)]


def _copied(x: Any) -> Any:
    """A tensor of its own; other objects as they are copied."""
    if isinstance(x, Tensor):
        return x.detach().clone().requires_grad_(x.requires_grad)
    return copy.deepcopy(x)


def said(error: BaseException) -> str:
    error = getattr(error, "inner_exception", error)  # of a compiler's error
    return f"{type(error).__name__}: {error}".partition("\n")[0]


@contextlib.contextmanager
def unseen(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context that restores the random generators at its end: code after it draws the numbers that it would
    have drawn without it."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(list({x.device for x in tensors if x.is_cuda})):
            yield
    finally:
        random.setstate(before[0])
        if numpy:
            numpy.random.set_state(before[1])


def random_state(on_gpu: bool) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]


def put_random_state(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def milliseconds_of_gpu(steps: Sequence[Callable[[], Any]], of_host: Sequence[float]) -> list[float]:
    """The least that the GPU takes for each where it never waits for the host, as in a CUDA graph: they are
    launched behind a kernel that lasts longer than the host. of_host: what each takes from idle to idle."""
    least = [float("inf")] * len(steps)
    for _ in range(3):
        for place, step in enumerate(steps):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            internals.gpu_sleep(2 * of_host[place] + 1.0)
            begin.record()
            step()
            end.record()
            end.synchronize()
            least[place] = min(least[place], round(begin.elapsed_time(end), 3))
    return least


def milliseconds(steps: Sequence[Callable[[], Any]], on_gpu: bool) -> list[float]:
    """The least that each takes, of several times in turns."""
    # What one thread computes is timed without what other programs take of its processor.
    clock = time.perf_counter if on_gpu or torch.get_num_threads() > 1 else time.process_time
    least = [float("inf")] * len(steps)
    end = clock() + _SECONDS
    for k in range(_STEPS):
        for place, step in enumerate(steps):
            if on_gpu:
                torch.cuda.synchronize()
            start = clock()
            step()
            if on_gpu:
                torch.cuda.synchronize()
            least[place] = min(least[place], round(1000 * (clock() - start), 3))
        if k and clock() > end:
            break
    return least
