"""Runs a captured step: eagerly, with padding, and as a CUDA graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map

from ..runtime import cuda_graphs
from ..runtime import torch_internals as internals
from ..runtime.cuda_graphs import Recorder, captured_step
from . import samples
from .constants import LEARNING_RUNS, Constants
from .masked_functions import WithoutDropout, WithoutPadding
from .padded_batch import Buffers
from .samples import Level, Sample, Sizes
from .state import Snapshot, buffers_stay, forget_streams, tensors_of, without_dropout

# The tolerances of `_compare`: relative, of a loss and of a gradient; and the share of the norm of all
# gradients that counts as nothing. Padding that counts by mistake changes a loss by about the share of padded
# rows, a fifth; rounding changes it by far less, even in 16 bits.
_LOSS, _GRADIENT, _NOTHING = 1e-2, 5e-2, 1e-4


class Body:
    """The training step itself: loss, backward and optimizer, for a batch with or without padding."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        before_step: Callable[[], Any] | None,
        device: torch.device,
        check: bool,
        debug: bool,
    ):
        self.loss_fn, self.model, self.optimizer, self.before_step = loss_fn, model, optimizer, before_step
        self.device, self.check, self.debug = device, check, debug
        self.modified: dict[int, Any] = {}  # of `Constants`
        self._recorder: Recorder | None = None

    def unpadded(self, sample: Sample) -> tuple[Any, ...]:
        """loss_fn's arguments without padding: the batch on the device, with masks that are True
        everywhere."""
        masks = {
            name: torch.ones(size, dtype=torch.bool, device=self.device)
            for name, (_, size) in sample.sizes.masks().items()
        }
        tensors = samples.to_device(sample, self.device) | masks
        return _arguments(sample.rebuild(tensors, sample.sizes))

    def step(self, args: tuple[Any, ...]) -> Any:
        with buffers_stay(self.model), captured_step():
            return self._step(args)

    def _step(self, args: tuple[Any, ...]) -> Any:
        if self.optimizer is None:
            with torch.no_grad():
                return self.loss_fn(*args)
        self.clear()
        out = self.backward(args)
        if self.before_step is not None:
            self.before_step()
        self.optimizer.step()
        return _detached(out)

    def backward(self, args: tuple[Any, ...]) -> Any:
        out = self.loss_fn(*args)
        loss = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"dfgnn.capture: loss_fn: expected it to return a loss of one element, got {got}")
        loss.backward()
        return out

    def clear(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        for x in self.model.parameters():
            x.grad = None

    def eager(self, sample: Sample) -> Any:
        return self.step(self.unpadded(sample))

    def recorded(self, run: Callable[[], Any], constants: Constants | None = None) -> Callable[[], Any]:
        """A function that replays a CUDA graph of ``run`` and returns the same tensors every time; with debug
        ``run`` itself. The warm-up's changes are undone. constants: of a step that never changes."""
        if self.debug:
            return run
        if self._recorder is None:
            self._recorder = cuda_graphs.Recorder(self.device)
        snapshot = Snapshot(tensors_of(self.model, self.optimizer), self.device)
        # DistributedDataParallel listens to what adds up gradients, which would be replaced.
        if not any(isinstance(part, DistributedDataParallel) for part in self.model.modules()):
            forget_streams(tensors_of(self.model, self.optimizer))
        try:
            with self._recorder.running():
                for _ in range(1 if constants is None else LEARNING_RUNS):
                    run()
                with no_waiting(self._recorder, constants):
                    run()
        finally:
            snapshot.restore()
            self.clear()
        out, again = self._recorder.recorded(run)
        self.clear()  # the captured gradients lie in the CUDA graph's memory, which every replay overwrites

        def replay() -> Any:
            again()
            return out

        return replay


def _arguments(batch: Any) -> tuple[Any, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


def _detached(out: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, out)


@contextmanager
def no_waiting(recorder: Recorder, constants: Constants | None) -> Iterator[None]:
    """A context in which waiting for the device raises an error that says what to change."""
    try:
        with recorder.without_waiting():
            yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        waited = constants.waited if constants is not None else ""
        raise RuntimeError(
            "dfgnn.capture: the step waits for the device, which a CUDA graph cannot hold: look at the line "
            f"of loss_fn or before_step above{waited and f' ({waited})'}. Shapes that depend on values "
            "(x[mask], unique), .item(), prints and tensors made from numbers on the host do that, unless "
            "the batch stays the same and the values come of it and other constants alone"
        ) from error


class Captured:
    """The captured step of one capacity, for all batches that fit into its buffers."""

    def __init__(self, body: Body, buffers: Buffers, sample: Sample):
        self._body, self._buffers = body, buffers
        tensors = buffers.tensors | buffers.masks
        self._args = _arguments(sample.rebuild(tensors, buffers.capacity))
        self._bounds = bounds_of(buffers.tensors, buffers.levels, buffers.capacity)
        buffers.load(sample)
        if body.check:
            exact = body.unpadded(sample)
            _compare(body, exact, self._padded, lambda x: buffers.cut(x, sample.sizes))
        self._run = body.recorded(self._step)
        buffers.forget()

    def _padded(self, run: Callable[[tuple[Any, ...]], Any]) -> Any:
        self._buffers.derive()
        with WithoutPadding(self._buffers.row_masks(), self._bounds):
            return run(self._args)

    def _step(self) -> Any:
        return self._padded(self._body.step)

    def __call__(self, sample: Sample) -> Any:
        self._buffers.load(sample)
        out = self._run()
        if self._body.debug:
            self._buffers.forget()
        return _copies(out, lambda x: self._buffers.cut(x, sample.sizes))


class Replay:
    """The captured step of one batch that does not change; without padding."""

    def __init__(self, body: Body, batch: tuple[Any, ...], sample: Sample):
        self._body, self._inputs = body, list(sample.tensors.values())
        self._objects = samples.objects_in(batch)
        self._state = self._now()
        self._args = body.unpadded(sample)
        self._constants = Constants(
            body.device, lambda: tensors_of(body.model, body.optimizer), body.modified
        )
        self._run = body.recorded(self._step, self._constants)
        self._constants.settle()  # the warm-up's end has restored buffers

    def _now(self) -> list[tuple[int, int]]:
        return [(x._version, x.data_ptr()) for x in self._inputs]

    def is_current(self, batch: tuple[Any, ...]) -> bool:
        """Whether the batch consists of the same tensors, and none was written to."""
        held = samples.objects_in(batch)
        same = len(held) == len(self._objects) and all(map(operator.is_, held, self._objects))
        return same and self._state == self._now() and self._constants.is_current()

    def _step(self) -> Any:
        with self._constants.running():
            return self._body.step(self._args)

    def __call__(self) -> Any:
        return _copies(self._run(), lambda x: x)


def compiled_modules(module: nn.Module) -> list[nn.Module]:
    """The modules that torch.compile has compiled, without those within them."""
    if internals.compiled_calls(module):
        return [module]
    return [found for child in module.children() for found in compiled_modules(child)]


def bounds_of(
    tensors: dict[str, Tensor], levels: dict[str, Level], sizes: Sizes
) -> list[tuple[int, int, int]]:
    """For each tensor of ids: (begin, end) of its addresses, and the number of possible ids."""
    bounds = []
    for name, x in tensors.items():
        level = levels.get(name)
        if level is not None and level.kind in (samples.INDEX, samples.GRAPH_OF):
            count = sizes.graphs if level.kind == samples.GRAPH_OF else sizes.ends()[level.hop][0]
            bounds.append((x.data_ptr(), x.data_ptr() + x.nbytes, count))
    return bounds


def _copies(out: Any, cut: Callable[[Any], Any]) -> Any:
    """Copies of the results, because the next replay overwrites the originals."""
    return tree_map(lambda x: cut(x).detach().clone() if isinstance(x, Tensor) else x, out)


# ---- with and without padding ----------------------------------------------------------------------------


def _compare(body: Body, unpadded: tuple, padded: Callable, unpad: Callable[[Any], Any]) -> None:
    """Raises ValueError if padding changes the loss or a gradient. All state is restored."""
    snapshot = Snapshot(tensors_of(body.model, body.optimizer), body.device)

    def run(args: tuple[Any, ...]) -> list[Tensor]:
        body.clear()
        with buffers_stay(body.model):
            if body.optimizer is None:
                with torch.no_grad():
                    out = body.loss_fn(*args)
            else:
                out = _detached(body.backward(args))
        results = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        return [*map(unpad, results), *(x.grad for x in body.model.parameters() if x.grad is not None)]

    try:
        with without_dropout(body.model), WithoutDropout():
            exact = run(unpadded)
            if snapshot.drew():
                return  # the step is random beyond dropout, so that two runs differ anyway
            snapshot.restore()
            with_padding = padded(run)
    finally:
        snapshot.restore()
        body.clear()
    if [x.shape for x in exact] != [x.shape for x in with_padding]:
        raise ValueError(
            "dfgnn.capture: loss_fn: expected results of a row per node, edge or graph, or of one size, got "
            f"{[list(x.shape) for x in exact]}, and with padding {[list(x.shape) for x in with_padding]}"
        )
    floating = [(a, b) for a, b in zip(exact, with_padding) if a.is_floating_point()]
    for k, (a, b) in enumerate(floating):
        allowed = _LOSS if k == 0 or body.optimizer is None else _GRADIENT
        difference, size = float((a - b).norm()), float(a.norm())
        if difference > allowed * size + _NOTHING * (1 + sum(float(x.norm()) for x, _ in floating[1:])):
            _refuse(k, body, a, b)
        if difference != difference and size == size:  # NaN, but only with padding
            _refuse(k, body, a, b)


def _refuse(place: int, body: Body, a: Tensor, b: Tensor) -> None:
    what = "the loss" if place == 0 and body.optimizer is not None else "a result or gradient"
    values = (
        f"{float(a):.6g} and {float(b):.6g}" if a.numel() == 1 else f"norm {a.norm():.6g} and {b.norm():.6g}"
    )
    raise ValueError(
        f"dfgnn.capture: {what} differs with padding ({values}): something mixes rows that are not in use "
        "into others. Leave them out by batch.node_mask, edge_mask or graph_mask, or pass check=False"
    )
