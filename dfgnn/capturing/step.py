"""``dfgnn.capture``: replays a training step as a CUDA graph, for batches of changing size."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..runtime.wrong_call import says_calls
from . import samples
from ._run import Body, Captured, Replay, compiled_modules
from .padded_batch import Buffers, capacity_for, distinct
from .samples import Sample, Sizes
from .state import Settings, prepare

__all__ = ["CaptureWarning", "CapturedStep", "capture"]

_CHANGES = "settings of the model or the optimizer change more often than max_graphs"

# A new capacity has a quarter more room than the batch that it is made for; a batch does not use one with
# more than four times as many nodes as it needs, but gets another.
_ROOM, _MOST = 1.25, 4.0


class CaptureWarning(UserWarning):
    """A step runs eagerly instead of from a CUDA graph."""


@says_calls
def capture(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    capacities: Iterable[tuple[int, ...]] | None = None,
    max_graphs: int = 8,
    before_step: Callable[[], Any] | None = None,
    check: bool = True,
    debug: bool = False,
) -> CapturedStep:
    """A training step as a CUDA graph: forward, backward and optimizer in one launch, for every batch.

    .. code-block:: python

        step = dfgnn.capture(lambda b: F.cross_entropy(model(b), b.y), model, optimizer)
        for batch in loader:
            loss = step(batch)

    The step that is called does what this does: ``optimizer.zero_grad()``, ``loss = loss_fn(batch)``,
    ``loss.backward()``, ``optimizer.step()``; without an optimizer only ``loss_fn`` without gradients, as in
    an evaluation. The first batch runs eagerly, which makes the optimizer's state and lazy parameters. From
    then on a batch is copied into buffers of a *capacity*, padded, and a CUDA graph of that capacity is
    replayed. It is captured once, after a warm-up on a separate stream, whose changes (parameters, buffers,
    optimizer, generators) are undone. Sorting and planning the batch's edges are part of the CUDA graph.
    Nothing waits for the device. Dropout draws from torch's generator of the device at every replay.

    **A batch** is a torch_geometric Data or Batch, a dict of tensors with ``x`` and ``edge_index``, or
    tensors ``step(x, edge_index, y, batch)``, as many as ``loss_fn`` takes; on the host or the device; or a
    dict with a `dfgnn.sampling.Sample` of `NeighborSampler`, in which each hop has its own graph, and tensors
    with a row for each source of the first hop, destination of a hop, or edge. ``loss_fn`` gets an object of
    the same kind. Its attention layers are those of `dfgnn.nn.pyg`, or torch_geometric's after `accelerate`
    or `patch`; the layers must add self loops, not the batch.

    **Padding.** The batch that ``loss_fn`` gets has rows that are not in use: nodes without edges that belong
    to an additional graph, edges between the last node and itself, features of 0. They do not count in batch
    normalisation, in the losses of ``torch.nn.functional`` and in means, sums, variances and deviations over
    all rows; pooling gives the additional graph a row, which the loss leaves out. A Data or dict also has the
    masks ``node_mask``, ``edge_mask`` and ``graph_mask``, bool, which are True for rows in use; a dict with a
    sample has ``node_masks`` of the sources of each hop and the seeds, and ``edge_masks``. Other operations
    that mix rows need them. Each new capacity is checked: loss and gradients with and without padding.

    **A graph that stays the same**: where a step is called with the same object as the call before, or with
    nothing, it is captured without padding; and what depends on values, and would wait, is allowed where it
    comes of constants alone (``out[data.train_mask]``, ``int(edge_index.max())``, ``unique``, tensors made on
    the host): of tensors that exist before the step and that it does not write to, other than parameters,
    floating-point buffers and the optimizer's state, by operations without random numbers. It is captured
    again where a tensor of the batch was modified or replaced, or one of which such values are known was
    modified, which takes as long as many steps; other tensors must not be modified. Here the model may be
    compiled, which makes its kernels fewer: ``model = dfgnn.compile(model)``, of which ``loss_fn`` calls the
    result, or ``model.compile(backend="dfgnn")``. Attention of any size is then on dfgnn's kernels.

    **What may change between steps**: values of parameters, buffers and the optimizer's state, and learning
    rates, by a scheduler or by hand. A change of other settings (``train`` and ``eval`` of any module,
    ``requires_grad``, dropout, betas and decay, a loaded state) is noticed: one step runs eagerly, and new
    CUDA graphs are captured. Other Python values that ``loss_fn`` reads stay those of the capture.

    **Not supported**: other shapes that depend on values (``x[x > 0]``, ``unique``), ``.item()`` and prints:
    an error says where, and what varies. Typed layers (RGAT, HGT) with edges that change. GradScaler, whose
    steps wait: use bfloat16. ``.grad`` is None after a step: use ``before_step``.

    Args:
        loss_fn: called with the batch; returns the loss, or a tuple of it and other tensors; without an
            optimizer any tensors.
        model: the module to train; steps run on its device. On a CPU they run eagerly, after one warning.
        optimizer: one of torch.optim with ``capturable``, which is set, or SGD. Learning rates become
            tensors; schedulers go on working.
        capacities: (nodes, edges) or (nodes, edges, graphs) of the buffers, for samples of hops (sources,
            edges, destinations, edges, ..., seeds); a batch takes the smallest that holds it and one more
            node and graph. By default they are made from the batches, a quarter larger than the first batch
            for which there is none. A batch that fits none runs eagerly, after one warning.
        max_graphs: the maximum number of CUDA graphs.
        before_step: called between backward and the optimizer's step, as for
            ``torch.nn.utils.clip_grad_norm_``.
        check: compare with and without padding.
        debug: run padded steps eagerly, on any device: the same computation, for a debugger.

    Returns:
        The step, which returns the result of ``loss_fn``, detached, without rows that are not in use.

    Raises:
        TypeError: an argument or a batch is not as described.
        ValueError: with ``check``, the loss or a gradient differs with padding.
        RuntimeError: the step does something that a CUDA graph cannot hold.
    """
    _check(callable(loss_fn), "loss_fn", "a function", loss_fn)
    _check(isinstance(model, nn.Module), "model", "a torch.nn.Module", model)
    _check(
        optimizer is None or isinstance(optimizer, torch.optim.Optimizer),
        "optimizer", "one of torch.optim", optimizer,
    )  # fmt: skip
    _check(before_step is None or callable(before_step), "before_step", "a function", before_step)
    if isinstance(max_graphs, bool) or not isinstance(max_graphs, int) or max_graphs < 1:
        raise ValueError(f"dfgnn.capture: max_graphs: expected a number >= 1, got {max_graphs!r}")
    device = next((x.device for x in model.parameters()), torch.device("cpu"))
    sizes = None if capacities is None else _capacities(capacities)
    body = Body(loss_fn, model, optimizer, before_step, device, check, debug)
    return CapturedStep(body, sizes, max_graphs)


class CapturedStep:
    """A step that `capture` returns. ``replays``, ``eager_steps`` and ``captures`` count its calls;
    ``capacities`` are the sizes of its buffers."""

    def __init__(self, body: Body, capacities: list[tuple[int, ...]] | None, max_graphs: int):
        self._body, self.device = body, body.device
        self._user_capacities, self._max_graphs = capacities, max_graphs
        self._replays_anything = body.debug or self.device.type == "cuda"
        if body.optimizer is not None and self.device.type == "cuda":
            prepare(body.optimizer, self.device)
        self._settings = Settings(body.model, body.optimizer, self.device)
        self._settings_now: Any = None  # the settings at this call
        self._warmed_up: deque[Any] = deque(maxlen=max_graphs)  # settings with which a step ran eagerly
        self._captured_settings: set[Any] = set()  # settings for which there are CUDA graphs
        self._changes = 0  # how often settings changed to new ones
        self._captured: dict[tuple[Sizes, Any], Captured] = {}
        self._same: dict[Any, tuple[Any, Replay]] = {}  # settings -> (an unchanging batch, its CUDA graph)
        self._last: Any = None  # the batch of the previous call; None before the first one
        # Properties of the first batch, which later batches must share to be padded.
        self._levels: dict[str, samples.Level] = {}
        self._shapes: dict[str, tuple] = {}
        self._constants: dict[str, Any] = {}
        self._warned: set[str] = set()
        self._widths: set[int] | None = None  # sizes of parameters, from which capacities must differ
        self._most = 0  # the most graphs of a batch so far: an epoch's last batch has fewer
        self.replays = self.eager_steps = self.captures = 0

    @property
    def capacities(self) -> list[Sizes]:
        return sorted({sizes for sizes, _ in self._captured})

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.capacities))
        return (
            f"CapturedStep on {self.device}: {self.replays} replays, {self.eager_steps} eager steps, "
            f"{self.captures} captures; capacities: {sizes or 'none'}"
        )

    def __call__(self, *batch: Any) -> Any:
        if not self._replays_anything:
            self._warn("device", "the model is on a CPU, which has no CUDA graphs: steps run eagerly")
            return self._eagerly(samples.take_apart(batch))
        if self._last is not None:  # the first step has made lazy parameters
            self._settings_now = self._settings.now()
        same = self._same.get(self._settings_now)
        if same is not None and _is_same(same[0], batch) and same[1].is_current(batch):
            self.replays += 1
            return same[1]()
        sample = samples.take_apart(batch)
        self._most = max(self._most, sample.sizes.graphs)
        if self._last is None:  # the first batch
            self._levels = samples.levels_of(sample)
            self._shapes = {name: (tuple(x.shape), x.dtype) for name, x in sample.tensors.items()}
            self._constants = sample.constants
            self._last = batch
            out = self._eagerly(sample)
            self._warmed_up.append(self._settings.now())
            return out
        before, self._last = self._last, batch
        if not self._is_warmed_up():
            return self._eagerly(sample)
        if _is_same(before, batch):
            return self._without_padding(batch, sample)
        if compiled_modules(self._body.model):
            raise ValueError(
                "dfgnn.capture: batch: expected the same object in every step of a model that was compiled, "
                "whose code does not see padding, got another one: capture the model without torch.compile"
            )
        misfit = samples.misfit(sample, self._levels, self._shapes, self._constants)
        if misfit is not None:
            self._warn("misfit", f"a batch is not like the first one ({misfit}): it runs eagerly")
            return self._eagerly(sample)
        captured = self._find(sample)
        if captured is None:
            why = f"a batch of {sample.sizes} does not fit into a capacity"
            if any(now != self._settings_now for _, now in self._captured):
                why = f"{why}, or {_CHANGES}"
            self._warn("capacity", f"{why} ({self!r}): it runs eagerly")
            return self._eagerly(sample)
        self.replays += 1
        return captured(sample)

    def _is_warmed_up(self) -> bool:
        """Whether a step has run eagerly with the current settings, which makes the optimizer's state."""
        settings = self._settings_now
        if self._body.optimizer is None or settings in self._warmed_up or settings in self._captured_settings:
            return True
        self._warmed_up.append(settings)
        self._changes += 1
        if self._changes > self._max_graphs:
            self._warn("settings", f"{_CHANGES} ({self!r}): the first steps with others run eagerly")
        return False

    def _eagerly(self, sample: Sample) -> Any:
        self.eager_steps += 1
        return self._body.eager(sample)

    def _warn(self, kind: str, text: str) -> None:
        """Warns once for each kind of reason."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"dfgnn.capture: {text}", CaptureWarning, stacklevel=3)

    def _without_padding(self, batch: Any, sample: Sample) -> Any:
        if self._settings_now not in self._same and len(self._same) >= self._max_graphs:
            self._warn("settings", f"{_CHANGES} ({self!r}): it runs eagerly")
            return self._eagerly(sample)
        self.captures += not self._body.debug
        replay = Replay(self._body, batch, sample)
        self._same[self._settings_now] = batch, replay
        self._captured_settings.add(self._settings_now)
        self.replays += 1
        return replay()

    def _find(self, sample: Sample) -> Captured | None:
        """The captured step of the smallest capacity that fits, captured now where there is none yet."""
        sizes = sample.sizes
        need = sizes.with_spare()
        if self._user_capacities is not None:
            fitting = [_capacity(given, sizes, self._most + 1) for given in self._user_capacities]
            known = {k for k, _ in self._captured if k.fits(need)}
            fitting = sorted([*known, *(c for c in fitting if c.fits(need))])
        else:
            fitting = sorted(k for k, _ in self._captured if k.fits(need))
            if (
                not fitting
                or fitting[0].nodes > _MOST * need.nodes
                and len(self._captured) < self._max_graphs
            ):
                fitting = [capacity_for(sizes._replace(graphs=self._most), _ROOM)]
        if not fitting:
            return None
        if self._widths is None:  # lazy parameters have shapes only after the first step
            self._widths = {n for x in self._body.model.parameters() for n in x.shape}
        key = distinct(fitting[0], self._widths), self._settings_now
        if key not in self._captured:
            if len(self._captured) >= self._max_graphs:
                return None
            buffers = Buffers(sample, self._levels, key[0], self.device)
            made = Captured(self._body, buffers, sample)
            self._captured[key] = made
            self._captured_settings.add(self._settings_now)
            self.captures += not self._body.debug
        return self._captured[key]


def _check(ok: bool, name: str, expected: str, got: Any) -> None:
    if not ok:
        way = {
            "model": "; the order is loss_fn, model, optimizer",
            "optimizer": "; call it with the parameters",
        }
        hint = way.get(name, "") if isinstance(got, type) or name == "model" else ""
        raise TypeError(f"dfgnn.capture: {name}: expected {expected}, got {type(got).__name__}{hint}")


def _capacities(given: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    pairs = isinstance(given, (list, tuple)) and all(isinstance(sizes, (list, tuple)) for sizes in given)
    _check(pairs, "capacities", "a list of pairs (nodes, edges), or of longer tuples", given)
    capacities = [tuple(sizes) for sizes in given]
    for numbers in capacities:
        fits = len(numbers) == 2 or len(numbers) > 2 and len(numbers) % 2
        if not fits or not all(isinstance(n, int) and n > 0 for n in numbers):
            raise ValueError(
                "dfgnn.capture: capacities: expected (nodes, edges) or (nodes, edges, graphs), of samples of "
                f"hops (nodes, edges, nodes, edges, ..., seeds), all of them positive, got {numbers!r}"
            )
    if not capacities:
        raise ValueError("dfgnn.capture: capacities: expected at least one, got none")
    return sorted(capacities)


def _capacity(numbers: tuple[int, ...], sizes: Sizes, most: int) -> Sizes:
    """The capacity that the user gave, for batches with hops like those of ``sizes``. most: the number of
    graphs, where the user gave none."""
    if not sizes.hops and len(numbers) <= 3:
        return Sizes(numbers[0], numbers[1], numbers[2] if len(numbers) == 3 else most)
    if sizes.hops and len(numbers) == 2 + len(sizes.hops):
        return Sizes(numbers[0], numbers[1], most, numbers[2:])
    expected = "(nodes, edges) or (nodes, edges, graphs)"
    if sizes.hops:
        expected = f"{2 + len(sizes.hops)} numbers, (nodes, edges, nodes, edges, ..., seeds),"
    raise ValueError(f"dfgnn.capture: capacities: expected {expected} for these batches, got {numbers!r}")


def _is_same(before: Any, batch: tuple[Any, ...]) -> bool:
    return before is not None and len(before) == len(batch) and all(x is y for x, y in zip(before, batch))
