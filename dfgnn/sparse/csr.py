"""Makes CSRs (compressed sparse rows) from a user's edges: checks, sorts, transposes and batches them.

Functions whose names begin with ``check`` or ``probe`` wait for the device. So do ``from_blocks``; ``batch``,
because it copies offsets to the device; ``from_edges`` if it validates, appends loops or has to find the
numbers of nodes; and ``append_loops`` if it removes loops.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime import ops as _ops
from ..runtime.tracing import not_compiled, untraced, without_gradient
from .degrees import Degrees, degrees_from
from .packed import PackedGraph

# Node ids, edge positions and edge counts are int32 in the kernels.
LIMIT = 2**31
# One CSR has fewer edges than this; a larger graph is divided into several (graph/ranges.py).
MOST_EDGES = 2**31
INDEX_DTYPES = (torch.int32, torch.int64)
EDGE_INDEX = "edge_index[0]", "edge_index[1]"  # the names of sources and destinations in errors
_transpose_csr = _ops.transpose_csr
structure_on_gpu, structure_read = _ops.structure, _ops.structure_read
# How many numbers about edges the results of `structure` begin with: kEdgeNumbers in
# csrc/cuda/graph/structure.h.
_EDGE_NUMBERS = 7
# A GPU sorts both directions in one call for at most this number of edges. With more, the second direction is
# sorted only when it is needed, to save memory.
_MOST_AT_ONCE = 2**22


class CSR(NamedTuple):
    """One direction of a graph: the edges of row r are positions ``indptr[r] .. indptr[r + 1] - 1``.

    indptr: int64 [num_rows + 1].  indices: int32 [E], the node at the other end.  eids: int32 [E], each
    edge's position in the user's order, or None where both orders are the same.
    """

    indptr: Tensor
    indices: Tensor
    eids: Tensor | None


# ---- checks of arguments -------------------------------------------------------------------------


def as_size(where: str, name: str, value) -> int:
    """A number of nodes or edges as a python int in [0, 2**31)."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        got = f"{type(value).__name__}, {value!r:.60}"
        raise TypeError(f"{where}: {name}: expected an integer, got {got}") from None
    if not 0 <= number < LIMIT:
        raise ValueError(f"{where}: {name}: expected a number in [0, 2**31), got {number}")
    return number


def no_tensor(name: str, value: Any) -> str:
    """What an error says if something else was passed for a tensor, and what to do about it."""
    kind = type(value).__name__
    way = f"; torch.from_numpy({name}) makes one" if kind == "ndarray" else ""
    if isinstance(value, (list, tuple, range)):
        of_tensors = any(isinstance(x, Tensor) for x in value)
        way = f"; torch.{'stack' if of_tensors else 'tensor'}({name}) makes one"
    if name == "edge_index" and hasattr(value, name):
        way = f"; its {name} is one"
    return f"expected a tensor, got {kind}{way}"


@not_compiled
def as_index(where: str, name: str, value, shape: tuple[int | None, ...] = (None,)) -> Tensor:
    """`value` as a plain, strided int32 or int64 tensor of this shape (None: any length)."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{where}: {name}: {no_tensor(name, value)}")
    if type(value) is not Tensor and hasattr(value, "as_tensor"):  # torch_geometric.EdgeIndex and .Index
        value = value.as_tensor()
    value = without_gradient(value)
    if value.layout != torch.strided:
        raise TypeError(f"{where}: {name}: expected a dense tensor, got layout {value.layout}")
    if value.dtype not in INDEX_DTYPES:
        # Not for masks and bytes, which are seldom meant as ids.
        others = torch.int16, torch.uint16, torch.uint32, torch.uint64
        convertible = value.is_floating_point() or value.dtype in others
        way = f"; convert it with {name}.long()" if convertible else ""
        if shape == (2, None) and value.dim() == 2 and value.shape[0] == value.shape[1] > 2:
            way = "; of an adjacency matrix adj[source, destination], adj.nonzero().t() is one"
        raise TypeError(f"{where}: {name}: expected dtype torch.int32 or torch.int64, got {value.dtype}{way}")
    if value.dim() != len(shape) or any(want not in (None, got) for want, got in zip(shape, value.shape)):
        expected = ", ".join("*" if want is None else str(want) for want in shape)
        way = f"; transpose it with {name}.t()" if shape == (2, None) and value.shape[1:] == (2,) else ""
        if value.dim() == len(shape) + 1:
            one_hot = len(shape) == 1 and value.shape[1] > 1
            way = f"; {name}.argmax(1) are the numbers of one-hot rows" if one_hot else way
            way = f"; {name}.squeeze({value.shape.index(1)}) may be it" if 1 in value.shape else way
        raise ValueError(f"{where}: {name}: expected shape [{expected}], got {list(value.shape)}{way}")
    if value.is_meta:
        raise ValueError(
            f"{where}: {name}: expected values, got a tensor on meta, which has none; for shapes alone give "
            "functions and layers the edge_index itself, or features on meta and a Graph that has values"
        )
    return value


@not_compiled
def ends_of(where: str, edge_index) -> tuple[Tensor, Tensor]:
    """(sources, destinations) of an edge_index [2, E], checked."""
    edge_index = as_index(where, "edge_index", edge_index, (2, None))
    with untraced(edge_index):
        src, dst = edge_index.unbind()
    return src, dst


def same_device(where: str, name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.device != other.device:
        raise ValueError(
            f"{where}: {name}: expected device {other.device} like {other_name}, got {value.device}; "
            f"move it with {name}.to({str(other.device)!r})"
        )


def canonical(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` as a contiguous tensor of `dtype`: itself where it is one already."""
    value = value.to(dtype).contiguous()
    # Autograd refuses to save inference tensors, and a graph outlives the inference block that built it.
    return value.clone() if value.is_inference() else value


def probe(*scalars: Tensor | int) -> list[int]:
    """Python numbers from scalars of one device, with a single wait for the device."""
    device = next((s.device for s in scalars if isinstance(s, Tensor)), None)
    if device is None:
        return [int(s) for s in scalars]
    return torch.stack([torch.as_tensor(s, device=device).to(torch.int64) for s in scalars]).tolist()


def _range(values: Tensor) -> tuple[Tensor | int, Tensor | int]:
    return torch.aminmax(values) if values.numel() else (0, -1)


def is_sorted(values: Tensor) -> Tensor:
    return (values[1:] >= values[:-1]).all()


def is_identity(eids: Tensor) -> Tensor:
    return (eids == torch.arange(eids.numel(), device=eids.device)).all()


def _refuse_range(
    where: str, name: str, values: Tensor, low: int, high: int, size_name: str, size: int
) -> None:
    """Raises when [low, high], the range of `values`, leaves [0, size)."""
    if low >= 0 and high < size:
        return
    position = int(((values < 0) | (values >= size)).nonzero()[0])
    found = int(values[position])
    way = "ids begin at 0" if found < 0 else f"these need {size_name}={high + 1}"
    way = "" if name == "eids" else f"; {way}"
    raise ValueError(
        f"{where}: {name}: expected values in [0, {size_name}={size}), "
        f"got {found} at position {position}{way}"
    )


def check_csr(
    where: str, indptr: Tensor, indices: Tensor, eids: Tensor | None, cols_name: str, num_cols: int
) -> bool:
    """Checks the values of a CSR, waiting for the device once. Returns whether `eids` is the identity."""
    num_edges = indices.numel()
    flags: tuple[Tensor | int, ...] = (1, 1, 0, -1)
    if eids is not None and num_edges:
        seen = torch.zeros(num_edges, dtype=torch.bool, device=eids.device)
        seen[eids.clamp(0, num_edges - 1)] = True
        flags = is_identity(eids), seen.all(), *_range(eids)
    first, last, rising, low, high, identity, permutation, eid_low, eid_high = probe(
        indptr[0], indptr[-1], is_sorted(indptr), *_range(indices), *flags
    )
    if first != 0:
        raise ValueError(f"{where}: indptr: expected indptr[0] == 0, got {first}")
    if not rising:
        position = int((indptr[1:] < indptr[:-1]).nonzero()[0])
        before, after = indptr[position : position + 2].tolist()
        raise ValueError(
            f"{where}: indptr: expected values that do not decrease, "
            f"got {before} then {after} at position {position + 1}"
        )
    if last != num_edges:
        raise ValueError(f"{where}: indptr: expected indptr[-1] == len(indices) = {num_edges}, got {last}")
    _refuse_range(where, "indices", indices, low, high, cols_name, num_cols)
    if eids is not None:
        _refuse_range(where, "eids", eids, eid_low, eid_high, "num_edges", num_edges)
        if not permutation:
            ordered = eids.sort().values
            repeated = ordered[1:][ordered[1:] == ordered[:-1]][0]
            raise ValueError(
                f"{where}: eids: expected every number in [0, num_edges={num_edges}) once, "
                f"got {int(repeated)} more than once"
            )
    return bool(identity)


class UserEdges(NamedTuple):
    """Edges as a user gave them to the function ``where``, which calls the sources and destinations
    ``names``. A size that is None is the largest id + 1; if both are None, that of both ends together."""

    where: str
    names: tuple[str, str]
    src: Tensor
    dst: Tensor
    num_src: int | None
    num_dst: int | None

    @property
    def sizes(self) -> tuple[int, int]:
        """(num_src, num_dst), where they are known."""
        assert self.num_src is not None and self.num_dst is not None
        return self.num_src, self.num_dst

    def with_sizes(self, ranges: Sequence[int], validate: bool = True) -> UserEdges:
        """These edges with sizes that are numbers. ranges: least and largest source, then destination. Raises
        ValueError if a node is outside of its size."""
        where, names, src, dst, num_src, num_dst = self
        src_low, src_high, dst_low, dst_high = ranges
        if num_src is None or num_dst is None:
            max_src = as_size(where, f"max({names[0]}) + 1", max(src_high + 1, 0))
            max_dst = as_size(where, f"max({names[1]}) + 1", max(dst_high + 1, 0))
            if num_src is None and num_dst is None:
                num_src = num_dst = max(max_src, max_dst)
            num_src = max_src if num_src is None else num_src
            num_dst = max_dst if num_dst is None else num_dst
        if validate:
            _refuse_range(where, names[0], src, src_low, src_high, "num_src", num_src)
            _refuse_range(where, names[1], dst, dst_low, dst_high, "num_dst", num_dst)
        return self._replace(num_src=num_src, num_dst=num_dst)

    def checked(self, validate: bool) -> tuple[UserEdges, bool, bool]:
        """(`with_sizes`, whether src is sorted, whether dst is); it waits for the device once. With
        validate=False and known sizes, CUDA tensors are not read at all and count as unsorted."""
        src, dst = self.src, self.dst
        if self.num_src is None or self.num_dst is None or validate:
            ends = [*_range(src), *_range(dst)]
        elif dst.device.type == "cpu":
            ends = [0, -1, 0, -1]  # the ranges of no ids: they are not needed
        else:
            return self, False, False
        *ranges, src_sorted, dst_sorted = probe(*ends, is_sorted(src), is_sorted(dst))
        return self.with_sizes(ranges, validate), bool(src_sorted), bool(dst_sorted)


class Edges(NamedTuple):
    """The result of `from_edges`: a CSR by destination, or by source."""

    num_src: int
    num_dst: int
    csr: CSR
    by_src: bool
    edge_map: Tensor | None  # with loops: int64, each edge's place among the given ones, or -1
    other: CSR | None = None  # the other direction with its edge ids, if it was made, too
    degrees: tuple[Degrees, Degrees] | None = None  # those of destinations and those of sources


def from_edges(
    given: UserEdges, validate: bool = True, sort_order: str | None = None, with_loops: bool = False
) -> Edges | PackedGraph:
    """The CSR of edges src -> dst: by destination; or by source if they are sorted so, which needs no sort.

    sort_order: "row" (by source) or "col", believed if the values are not read. with_loops: sizes are known;
    edges from a node to itself are dropped, and i -> i for i < min(num_src, num_dst) appended.

    The CPU's operator reads the values whether `validate` is set or not; its result is a PackedGraph. For
    graphs of few edges this operator and the GPU's make both directions in one call.
    """
    src, dst = given.src, given.dst
    if src.device.type == "cpu":
        return _from_edges_on_cpu(given, with_loops)
    if src.numel() <= _MOST_AT_ONCE and _ops.on_device(src) and (validate or sort_order is None):
        return _from_edges_on_gpu(given, validate, with_loops)
    given, src_sorted, dst_sorted = given.checked(validate)
    num_src, num_dst = given.sizes
    edge_map = None
    if with_loops:
        src, dst, edge_map = append_loops(src, dst, min(num_src, num_dst), remove_existing=True)
        # The order is known only where all edges are loops i -> i, which were appended in rising order.
        src_sorted = dst_sorted = edge_map.numel() == min(num_src, num_dst)
    else:
        src, dst = canonical(src, torch.int32), canonical(dst, torch.int32)
    by_src = (src_sorted or sort_order == "row") and not dst_sorted
    if by_src:
        csr = from_coo(dst, src, num_src, rows_sorted=True)
    else:
        csr = from_coo(src, dst, num_dst, rows_sorted=dst_sorted or sort_order == "col")
    return Edges(num_src, num_dst, csr, by_src, edge_map)


def _from_edges_on_cpu(given: UserEdges, with_loops: bool) -> PackedGraph:
    # Autograd refuses to save inference tensors, and a graph outlives the inference block that built it.
    src, dst = (end.clone() if end.is_inference() else end for end in (given.src, given.dst))
    num_src, num_dst = given[-2:]
    sizes = -1 if num_src is None else num_src, -1 if num_dst is None else num_dst
    made = PackedGraph(src, dst, sizes, with_loops)
    if -1 in sizes or made.num_edges < 0:
        made.sizes = given.with_sizes(made.ranges).sizes
    return made


def _from_edges_on_gpu(given: UserEdges, validate: bool, with_loops: bool) -> Edges:
    if None in given[-2:]:
        given, _, _ = given.checked(validate)
    edges = given[2:]
    if not (validate or with_loops):
        _, *csr, _, rev_indptr, rev_indices, rev_eids = structure_on_gpu(*edges, False)
        return Edges(*given.sizes, CSR(*csr), False, None, CSR(rev_indptr, rev_indices, rev_eids))
    if given.src.is_cuda and torch.cuda.get_sync_debug_mode() == 2:  # as PyTorch's own operations that wait
        raise RuntimeError("called a synchronizing CUDA operation: dfgnn sorts new edges, and waits once")
    made = structure_read(*edges, with_loops)
    return _as_read(given, validate, with_loops, made, made[0])


def from_blocks(blocks: Sequence[UserEdges]) -> list[Edges | PackedGraph]:
    """`from_edges` for several graphs with known sizes. It waits for a GPU once for all of them."""
    if not all(_ops.on_device(x.src) and x.src.numel() <= _MOST_AT_ONCE for x in blocks):
        return [from_edges(given) for given in blocks]
    built = [structure_on_gpu(*given[2:], False) for given in blocks]
    read = torch.stack([numbers for numbers, *_ in built]).tolist() if built else []
    return [_as_read(given, True, False, *made) for given, *made in zip(blocks, built, read)]


def _as_read(given: UserEdges, validate: bool, with_loops: bool, tensors, numbers) -> Edges:
    """Edges from the tensors that the operator `structure` returned, and from its numbers as a list."""
    num_src, num_dst = given.sizes
    _, *csr_made, edge_map, rev_indptr, rev_indices, rev_eids = tensors
    csr, other = CSR(*csr_made), CSR(rev_indptr, rev_indices, rev_eids)
    *ranges, num_edges, src_falls, dst_falls = numbers[:_EDGE_NUMBERS]
    if validate:
        given.with_sizes(ranges)
    if with_loops:
        num_edges += min(num_src, num_dst)
        if num_edges < given.src.numel() + min(num_src, num_dst):  # given loops were dropped
            csr, other = _first(csr, num_edges), _first(other, num_edges)
            edge_map = edge_map[:num_edges]
    else:
        csr = csr._replace(eids=csr.eids if dst_falls else None)
        other = other._replace(eids=other.eids if src_falls else None)
    middle = (len(numbers) + _EDGE_NUMBERS) // 2
    degrees = (
        degrees_from(num_dst, num_edges, numbers[_EDGE_NUMBERS:middle]),
        degrees_from(num_src, num_edges, numbers[middle:]),
    )
    return Edges(num_src, num_dst, csr, False, edge_map, other, degrees)


def _first(csr: CSR, num_edges: int) -> CSR:
    indptr, indices, eids = csr
    return CSR(indptr, indices[:num_edges], None if eids is None else eids[:num_edges])


def append_loops(
    src: Tensor, dst: Tensor, num_loops: int, remove_existing: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """int32 (src, dst) with a loop i -> i appended for every i < num_loops; and int64, each edge's position
    among the given ones, -1 for an appended loop. remove_existing: drops existing loops, waiting for the
    device."""
    if remove_existing:
        positions = (src != dst).nonzero().squeeze(1)
        src, dst = src[positions], dst[positions]
    else:
        positions = torch.arange(src.numel(), device=src.device)
    loops = torch.arange(num_loops, dtype=torch.int32, device=src.device)
    src, dst = (torch.cat([end.to(torch.int32), loops]) for end in (src, dst))
    return src, dst, torch.cat([positions, positions.new_full((num_loops,), -1)])


# ---- structure -----------------------------------------------------------------------------------


def indptr_of(rows: Tensor, num_rows: int) -> Tensor:
    """indptr of the sorted int32 row of every edge."""
    # bincount and cumsum would wait for a CUDA device.
    return torch.searchsorted(rows, torch.arange(num_rows + 1, dtype=torch.int32, device=rows.device))


def rows_of(csr: CSR) -> Tensor:
    """int32 [E]: the row of every edge of the CSR."""
    rows = torch.arange(csr.indptr.numel() - 1, dtype=torch.int32, device=csr.indptr.device)
    return torch.repeat_interleave(rows, csr.indptr.diff(), output_size=csr.indices.numel())


def from_coo(cols: Tensor, rows: Tensor, num_rows: int, rows_sorted: bool) -> CSR:
    """CSR of int32 edges cols[e] -> rows[e]; the edges of a row keep their order."""
    if rows_sorted:
        return CSR(indptr_of(rows, num_rows), cols, None)
    rows, eids = torch.sort(rows, stable=True)
    indptr = indptr_of(rows, num_rows)
    del rows
    eids = eids.to(torch.int32)
    return CSR(indptr, cols[eids], eids)


def transpose(csr: CSR, num_cols: int, need_eids: bool) -> CSR:
    """The other direction. The edges of a new row are in the order of `csr`, so that its indices ascend."""
    if csr.indptr.device.type == "cpu":
        indptr, indices, eids = _transpose_csr(*csr, num_cols, need_eids)
        return CSR(indptr, indices, eids if need_eids else None)
    return transpose_in_tensors(csr, num_cols, need_eids)


def transpose_in_tensors(csr: CSR, num_cols: int, need_eids: bool) -> CSR:
    # On a graph of 100M edges memory is the limit: keys are int32, and each tensor is freed after its use.
    keys, perm = torch.sort(csr.indices, stable=True)
    indptr = indptr_of(keys, num_cols)
    del keys
    perm = perm.to(torch.int32)
    indices = rows_of(csr)[perm]
    if not need_eids:
        return CSR(indptr, indices, None)
    return CSR(indptr, indices, perm if csr.eids is None else csr.eids[perm])


def endpoints(csr: CSR, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(row, col) of every edge in the user's order."""
    rows, cols = rows_of(csr).to(dtype), csr.indices.to(dtype)
    if csr.eids is None:
        return rows, cols
    places = csr.eids.long()
    return torch.empty_like(rows).index_copy_(0, places, rows), torch.empty_like(cols).index_copy_(
        0, places, cols
    )


def count(values: Tensor, size: int) -> Tensor:
    """int64 [size]: how often each number occurs. Unlike bincount it does not wait for the device."""
    one = torch.ones(1, dtype=torch.int64, device=values.device)
    return torch.zeros(size, dtype=torch.int64, device=values.device).index_add_(
        0, values, one.expand(values.numel())
    )


def batch(csrs: Sequence[CSR], num_cols: Sequence[int], need_eids: bool) -> CSR:
    """The block-diagonal CSR of several; in the user's order, edges of the first one come first."""
    device = csrs[0].indptr.device
    num_rows = [c.indptr.numel() - 1 for c in csrs]
    num_edges = [c.indices.numel() for c in csrs]
    total = sum(num_edges)

    def offsets(sizes: Sequence[int], repeats: Sequence[int], dtype: torch.dtype) -> Tensor:
        starts = torch.tensor([0, *accumulate(sizes)][:-1], dtype=dtype).to(device)
        times = torch.tensor(repeats).to(device)
        return torch.repeat_interleave(starts, times, output_size=sum(repeats))

    starts = torch.cat([c.indptr[:-1] for c in csrs]) + offsets(num_edges, num_rows, torch.int64)
    indptr = torch.cat([starts, starts.new_full((1,), total)])
    indices = torch.cat([c.indices for c in csrs]) + offsets(num_cols, num_edges, torch.int32)
    if not need_eids or all(c.eids is None for c in csrs):
        return CSR(indptr, indices, None)
    eids = [
        torch.arange(n, dtype=torch.int32, device=device) if c.eids is None else c.eids
        for c, n in zip(csrs, num_edges)
    ]
    return CSR(indptr, indices, torch.cat(eids) + offsets(num_edges, num_edges, torch.int32))
