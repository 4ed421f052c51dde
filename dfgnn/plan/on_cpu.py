"""Makes a CPU graph's handle for eager calls: sorts and plans both directions in one native call."""

from __future__ import annotations

from typing import Any

from ..runtime.arguments import GraphArgs, GraphHandle
from ..runtime.ops import plan_graph
from ..sparse.csr import CSR
from ..sparse.packed import CPU_BOUND
from ..sparse.structure import Structure

_NONE = None, None, None


def handle(structure: Structure, backward: bool) -> GraphHandle:
    """The handle of "auto", which on a CPU serves all feature shapes. It has edge ids whether a call needs
    them or not. It is made by one call, because a graph that is used once is planned anew at every step."""
    dst, src = structure.dst, structure.src
    if dst.built is not None and not dst.built[1]:
        structure.csr()
    if backward and src.built is not None and not src.built[1]:
        structure.reverse_csr(need_eids=True)
    forward: Any = _NONE if dst.built is None else dst.built[0]
    reverse: Any = _NONE if src.built is None or not src.built[1] else src.built[0]
    number, slots, rev_slots, *csr, items, splits, rev_items, rev_splits = plan_graph(
        *forward, *reverse, dst.num_rows, src.num_rows, CPU_BOUND, backward
    )
    if csr[0] is not None:
        side = dst if dst.built is None else src
        side.built = CSR(*csr), True
        forward, reverse = (csr, reverse) if side is dst else (forward, csr)
    size = dst.num_rows, src.num_rows, len(forward[1])
    args: list[Any] = [*forward[1:], items, splits, [slots, 0, 0, *size]]
    if backward:
        args += *reverse[1:], rev_items, rev_splits, [rev_slots, 0, 0, size[1], size[0], size[2]]
    else:
        args += *_NONE, None, []
    return GraphHandle(GraphArgs._make([*args, None, None]), number)
