"""The planner of a graph of fixed capacity, whose edges may change between the replays of a CUDA graph."""

from __future__ import annotations

from ..sparse.fixed import FixedStructure
from . import choose
from .planner import Planner
from .plans import Plan, Shape


class FixedPlanner(Planner):
    """Plans anew after the edges have changed. On a GPU it does not wait, because it plans as for a graph of
    one step (``once``)."""

    structure: FixedStructure

    def __init__(self, structure: FixedStructure) -> None:
        super().__init__(structure, once=True)
        self._of_all_shapes = None  # `on_cpu.handle` takes no CSRs with room for more edges than are in use
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
