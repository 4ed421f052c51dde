"""The result of the operator `coo_to_csr`, on the CPU: CSRs, and for few edges also plans, in one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime import library
from ..runtime.arguments import GraphArgs, GraphHandle
from ..runtime.ops import coo_to_csr
from ..runtime.torch_internals import without_frame
from ..runtime.tracing import not_compiled, untraced

# Maximum edges per work item on a CPU, where rows are cut only so that several threads can share one.
CPU_BOUND = 4096
# The tensor (`PackedGraph._tensor`) begins with the struct Header of csrc/torch/cpu_structure.cpp, in int64:
# the four numbers of `ranges`; `by_src`; then for each direction the begin and the length, in units of int32,
# of indptr, indices, eids, work items and splits, and the number of partial-result slots.
_RANGES, _BY_SRC, _SIDES, _SIDE = slice(0, 4), 4, 5, 11
_HEADER = _SIDES + 2 * _SIDE
_drop = library.graph_dropper("cpu")
_coo_to_csr = without_frame(coo_to_csr)
# indptr, indices and eids of a `csr.CSR`.
Arrays = tuple[Tensor, Tensor, Tensor | None]


class PackedGraph(GraphHandle):
    """The sorted edges, and if there are few the handle of a planned graph. Tensors for the arrays are made
    when they are asked for, because a step on a graph only needs the library's number of it.

    sizes: (num_src, num_dst). backward: whether the reverse CSR was made and planned, too. edge_map: with
    loops, int64, the position of each edge among the given ones, -1 for an appended loop.
    """

    __slots__ = ("_args", "_given", "_made", "_tensor", "backward", "edge_map", "num_edges", "sizes")

    def __init__(self, src: Tensor, dst: Tensor | None, sizes: tuple[int, int], with_loops: bool) -> None:
        """src, dst: as `coo_to_csr` takes them. sizes: -1 stands for one that is not known, which the caller
        has to replace. If a node is out of range, num_edges is -1, and only `ranges` may be asked for."""
        self.backward, self.sizes = torch.is_grad_enabled(), sizes
        self.number, self.num_edges, self._tensor, self.edge_map, indptr, indices, eids = _coo_to_csr(
            src, dst, *sizes, with_loops, CPU_BOUND, self.backward
        )
        self._args: GraphArgs | None = None
        self._given, self._made, self._drop = None, {}, _drop
        if indptr is not None:  # the graph is not planned, and its arrays are tensors of their own
            by_src = self.by_src
            if indices is None:  # the operator made none, because the given ids serve as indices
                indices = dst if by_src else src
            self._made = {by_src: (indptr, indices, eids), not by_src: None}
        elif dst is not None and torch.int32 in (src.dtype, dst.dtype) and self.number:
            (_, indices, *_), _ = self._side(self.by_src)
            if indices is None:  # here, too, the given ids serve as indices
                self._given = dst if self.by_src else src

    @property
    def ranges(self) -> list[int]:
        """Least and largest source, least and largest destination."""
        return self._header()[_RANGES]

    @property
    def by_src(self) -> bool:
        """Whether the given edges were sorted by source and not by destination: the CSR by source needed no
        sort."""
        return bool(self._header()[_BY_SRC])

    def csr(self, reverse: bool) -> Arrays | None:
        """The CSR by destination or by source, with its edge ids; None if it was not made."""
        return self._made[reverse] if reverse in self._made else self._csr(reverse)

    @not_compiled
    def _csr(self, reverse: bool) -> Arrays | None:
        with untraced(self._tensor):
            (indptr, indices, eids, _, _), _ = self._side(reverse)
            found = None
            if indptr is not None:
                indices = self._given if indices is None else indices
                assert indices is not None
                # Copies, because a view is sent to another process, or written to a file, with all of the
                # tensor's memory.
                if indices is not self._given:
                    indices = indices.clone()
                found = indptr.view(torch.int64).clone(), indices, None if eids is None else eids.clone()
        return self._made.setdefault(reverse, found)

    @property
    def args(self) -> GraphArgs:  # type: ignore[override]
        found = self._args
        if found is None:
            with untraced(self._tensor):
                found = self._args = self._arguments()
        return found

    @not_compiled
    def _arguments(self) -> GraphArgs:
        num_src, num_dst = self.sizes
        args: list = []
        for reverse, rows in ((False, (num_dst, num_src)), (True, (num_src, num_dst)))[: 1 + self.backward]:
            csr, ((*_, items, splits), slots) = self.csr(reverse), self._side(reverse)
            assert csr is not None and items is not None and splits is not None
            args += *csr[1:], items.view(-1, 4), splits.view(-1, 4)
            args.append([slots, 0, 0, *rows, self.num_edges])
        if not self.backward:
            args += None, None, None, None, []
        return GraphArgs._make([*args, None, None])

    def _header(self) -> list[int]:
        return self._tensor[: 2 * _HEADER].view(torch.int64).tolist()

    def _side(self, reverse: bool) -> tuple[list[Tensor | None], int]:
        """The five arrays of a direction, None for those that are missing, and its number of slots."""
        *places, slots = self._header()[_SIDES + _SIDE * reverse :][:_SIDE]
        spans = zip(places[::2], places[1::2])
        return [None if size < 0 else self._tensor[begin : begin + size] for begin, size in spans], slots
