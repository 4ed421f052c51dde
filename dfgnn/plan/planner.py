"""Caches a graph's plans and the arguments that the attention operators take from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import index
from typing import Any

import torch

from ..runtime import ops as _ops
from ..runtime.arguments import GraphArgs, GraphHandle
from ..runtime.tracing import not_compiled, untraced
from ..sparse.fixed import FixedStructure
from ..sparse.structure import Structure
from . import choose, cost, handles
from . import device as devices
from .device import Device
from .direction import Direction
from .plans import Plan, Shape


class Planner:
    """The plans of one graph, by feature shape, direction and schedule.

    once: the graph is used for one training step. device: what to plan for; by default the graph's device.
    There is no lock: two threads may both build a plan, and either result serves.
    """

    def __init__(self, structure: Structure, once: bool = False, device: Device | None = None) -> None:
        self.structure, self.once = structure, once
        self._device = device
        self._directions: dict[bool, Direction] = {}
        self._plans: dict[tuple[Shape, bool, str, bool], Plan] = {}
        self._arguments: dict[tuple[Shape, str, bool, bool], GraphArgs] = {}
        # The keys are the arguments of `handle`: (heads, dim, dtype, layer, schedule, edges, backward).
        self.handles: dict[tuple[int, int, torch.dtype, str | None, str, bool, bool], GraphHandle] = {}
        #: What calls of functions on this graph have in common (`engine.paths` fills it).
        self.kinds: dict[tuple, Any] = {}
        # On a CPU one handle per value of backward serves all shapes. None: each shape has its own handle.
        on_cpu = device is None and structure.place[0].type == "cpu"
        self._of_all_shapes: dict[bool, GraphHandle] | None = structure.planned() if on_cpu else None

    def plan(self, shape: Shape, reverse: bool = False, schedule: str = "auto", edges: bool = False) -> Plan:
        """reverse: rows are sources, as in backward's main loop. schedule, edges: see `choose.plan`."""
        found = self._plans.get((shape, reverse, schedule, edges))
        return self._plan(shape, reverse, schedule, edges) if found is None else found

    @not_compiled
    def _plan(self, shape: Shape, reverse: bool, schedule: str, edges: bool) -> Plan:
        plans = self._plans  # read before anything is built, because `trial` replaces the dictionary
        found = plans[shape, reverse, schedule, edges] = self.estimate(shape, reverse, schedule, edges)
        return found

    def estimate(self, shape: Shape, reverse: bool, schedule: str = "auto", edges: bool = False) -> Plan:
        """The plan by estimate, even if `adopt` has replaced "auto"."""
        with untraced(self.structure.indices):
            return choose.plan(self._direction(reverse), shape, schedule, edges, self.once)

    def _direction(self, reverse: bool) -> Direction:
        found = self._directions.get(reverse)
        if found is None:
            if self._device is None:
                self._device = devices.of(self.structure.indices.device)
            found = self._directions[reverse] = Direction(self.structure, reverse, self._device)
        return found

    def arguments(
        self,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        layer: str | None,
        *,
        schedule: str,
        edges: bool,
        backward: bool,
    ) -> GraphArgs:
        """edges: edge tensors, dropout or returned attention, which need edge ids. backward: gradients."""
        shape = Shape(index(num_heads), index(head_dim), dtype, layer)  # index, because sizes may be symbolic
        found = self._arguments.get((shape, schedule, edges, backward))
        return self._make_arguments(shape, schedule, edges, backward) if found is None else found

    @property
    def edge_schedule(self) -> str:
        """The schedule of operators on edge terms, which gather no rows: they take no source partitions."""
        # On a CPU, and for a graph that is used once, "auto" has none.
        return "auto" if self.once or self.structure.place[0].type == "cpu" else "natural sources/1"

    def handle(
        self, num_heads: int, head_dim: int, dtype: torch.dtype, layer: str | None, schedule: str,
        edges: bool, backward: bool,
    ) -> GraphHandle:  # fmt: skip
        """`arguments` with the number by which the eager operators find them in the library."""
        found = self.handles.get((num_heads, head_dim, dtype, layer, schedule, edges, backward))
        if found is None and self._of_all_shapes and schedule == "auto":
            found = self._of_all_shapes.get(backward)
        if found is not None:
            return found
        return self._make_handle(num_heads, head_dim, dtype, layer, schedule, edges, backward)

    @not_compiled
    def _make_handle(self, num_heads, head_dim, dtype, layer, schedule, edges, backward) -> GraphHandle:
        known = self.handles  # read before plans are made, because `adopt` may replace it meanwhile
        handle = self._handle_of_all_shapes(schedule, backward)
        if handle is None and schedule == "auto" and not self.once:
            handle = self._planned_without_waiting(Shape(num_heads, head_dim, dtype, layer), edges, backward)
        if handle is None:
            args = self.arguments(
                num_heads, head_dim, dtype, layer, schedule=schedule, edges=edges, backward=backward
            )
            with untraced(self.structure.indices):
                handle = GraphHandle(args)
        known[num_heads, head_dim, dtype, layer, schedule, edges, backward] = handle
        return handle

    def _handle_of_all_shapes(self, schedule: str, backward: bool) -> GraphHandle | None:
        """The handle that serves all shapes, if there is one."""
        known = self._of_all_shapes
        if known is None or schedule != "auto":
            return None
        handle = known.get(backward)
        if handle is None:
            with untraced(self.structure.indices):
                handle = known[backward] = handles.on_cpu(self.structure, backward)
        return handle

    def _planned_without_waiting(self, shape: Shape, edges: bool, backward: bool) -> GraphHandle | None:
        """The handle of a new GPU graph, made without waiting for the GPU; None if that is not possible, or
        if there are plans already, among which `adopt` may have put another "auto"."""
        structure = self.structure
        if structure.dst.stats is None or not _ops.on_device(structure.indices) or self._plans:
            return None
        with untraced(structure.indices):
            return handles.on_gpu(self._direction(False), self._direction(True), shape, edges, backward)

    @not_compiled
    def _make_arguments(self, shape: Shape, schedule: str, edges: bool, backward: bool) -> GraphArgs:
        cache = self._arguments  # read before the plans, because `adopt` replaces both dictionaries
        of_all = self._handle_of_all_shapes(schedule, backward)
        if of_all is not None:
            cache[shape, schedule, edges, backward] = of_all.args
            return of_all.args
        plan, csr = self.plan(shape, False, schedule, edges), self.structure.csr()
        ids = edges or (
            backward and plan.tiles is None and cost.saves_alpha_ds(shape, self._direction(False))
        )
        forward = (csr.indices, csr.eids if ids else None, plan.items, plan.splits, plan.launch)
        if backward:
            back = self.structure.reverse_csr(need_eids=ids)  # before `plan`, which would make it without ids
            plan_back = self.plan(shape, True, schedule, edges)
            reverse = (back.indices, back.eids, plan_back.items, plan_back.splits, plan_back.launch)
            arguments = GraphArgs(*forward, *reverse, plan.tiles, plan_back.tiles)
        else:
            arguments = GraphArgs(*forward, None, None, None, None, [], plan.tiles, None)
        cache[shape, schedule, edges, backward] = arguments
        return arguments

    # ---- tuning ----------------------------------------------------------------------------------

    def alternatives(self, shape: Shape, reverse: bool) -> list[str]:
        """See `choose.alternatives`."""
        with untraced(self.structure.indices):
            return choose.alternatives(self._direction(reverse), shape, self.plan(shape, reverse))

    def most_partial_bytes(self, shape: Shape, reverse: bool) -> int:
        """The most bytes of partial rows that a plan of "auto" may write."""
        return cost.most_partial_bytes(shape, self._direction(reverse))

    def adopt(self, shape: Shape, reverse: bool, schedule: str, why: str) -> Plan:
        """Makes a schedule the shape's "auto": one on rows for all calls, tiles for those that can use
        them."""
        plan = replace(self.plan(shape, reverse, schedule), why=why)
        for edges in (False,) if plan.tiles is not None else (False, True):
            self._plans[shape, reverse, "auto", edges] = plan
        self._of_all_shapes = None
        self._arguments, self.handles = {}, {}  # not cleared: other threads may still fill the old ones
        return plan

    @contextmanager
    def trial(self) -> Iterator[None]:
        """A context at whose end all plans that were made or adopted in it are dropped."""
        plans, directions = self._plans, self._directions
        self._plans = dict(plans)
        self._directions = {reverse: found.copy() for reverse, found in directions.items()}
        try:
            yield
        finally:
            self._plans, self._directions, self._arguments, self.handles = plans, directions, {}, {}


class FixedPlanner(Planner):
    """The planner of a graph of fixed capacity, whose edges may change between the replays of a CUDA graph:
    it plans anew after they have. On a GPU it does not wait, because it plans as for a graph of
    one step (``once``)."""

    structure: FixedStructure

    def __init__(self, structure: FixedStructure) -> None:
        super().__init__(structure, once=True)
        self._of_all_shapes = None  # `handles.on_cpu` takes no CSRs with room for more edges than are in use
        self._made_for = structure.generation

    @property
    def handles(self):
        self._renew()
        return self._handles

    @handles.setter
    def handles(self, found) -> None:
        self._handles = found

    def _renew(self) -> None:
        if self._made_for != self.structure.generation:
            self._made_for = self.structure.generation
            self._directions, self._plans, self._arguments, self._handles = {}, {}, {}, {}

    def plan(self, shape: Shape, reverse: bool = False, schedule: str = "auto", edges: bool = False) -> Plan:
        self._renew()
        return super().plan(shape, reverse, schedule, edges)

    def arguments(self, *args, **kwargs):
        self._renew()
        return super().arguments(*args, **kwargs)

    def estimate(self, shape: Shape, reverse: bool, schedule: str = "auto", edges: bool = False) -> Plan:
        if choose.parse(schedule)[0] not in ("auto", "natural"):
            raise ValueError(
                f"schedule: expected 'auto' or 'natural' for a graph of fixed capacity, got {schedule!r}"
            )
        return super().estimate(shape, reverse, "auto", edges)


def plan(
    graph,
    *,
    reverse: bool = False,
    num_heads: int = 4,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    schedule: str = "auto",
    layer: str | None = "gat",
    edges: bool = False,
) -> Plan:
    """The plan of one direction of a graph for a feature shape, by estimate.

    graph: :class:`dfgnn.Graph`. reverse: rows are sources (backward) instead of destinations. num_heads,
    head_dim, dtype: shape and type of the features. schedule: one of ``SCHEDULES``, alone or with a bound
    (see ``parse``), or "auto" for the cheapest. layer: "gat", "gatv2" or "dot", the layer to plan for; None
    for the plain products. edges: the call has edge tensors or dropout, or returns attention.

    Raises ValueError for an unknown schedule, or one that this device or feature shape does not have.
    """
    shape = Shape(num_heads, head_dim, dtype, layer)
    return graph._planner.estimate(shape, reverse, schedule, edges)


def alternatives(
    graph,
    *,
    reverse: bool,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    layer: str | None = "gat",
) -> list[str]:
    """Names of the schedules that could be taken instead of "auto": see `choose.alternatives`."""
    return graph._planner.alternatives(Shape(num_heads, head_dim, dtype, layer), reverse)
