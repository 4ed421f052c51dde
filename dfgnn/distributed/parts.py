"""Divides a graph among processes: which process owns which nodes, and the part that it then holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..sparse import csr as _csr

METHODS = ("contiguous", "metis")
Partition = str | Tensor | tuple[Tensor, Tensor]


class Nodes(NamedTuple):
    """The sources, or the destinations, of one part. A node's *place* is its number when the nodes of part 0
    come first, then those of part 1, and so on, each in rising order of their ids."""

    ids: Tensor  # int64, the ids of this part's nodes, rising
    offsets: list[int]  # [parts + 1]: the places of part p are offsets[p] .. offsets[p + 1] - 1


class Part(NamedTuple):
    """The part of a graph that one process holds, before any communication."""

    number: int
    src_nodes: Nodes
    dst_nodes: Nodes  # the same object where sources and destinations are the same nodes
    src: Tensor  # int32 or int64 [E]: places of the sources
    dst: Tensor  # int32 or int64 [E]: destinations, counted within the part
    edge_ids: Tensor  # int32 or int64 [E]: each edge's id in the whole graph, rising
    num_edges: int  # number of edges of the whole graph
    fingerprint: int  # a checksum of the whole graph and its partition

    @property
    def num_parts(self) -> int:
        return len(self.dst_nodes.offsets) - 1


class Places(NamedTuple):
    """The places of all sources, or of all destinations."""

    order: Tensor  # int64 [N]: ids in the order of places
    place: Tensor  # int64 [N]: the place of each id
    offsets: list[int]

    def part(self, number: int) -> Nodes:
        begin, end = self.offsets[number : number + 2]
        return Nodes(self.order[begin:end].clone(), self.offsets)


# ---- which part owns which nodes -------------------------------------------------------------------------


def owners(
    where: str, partition: Partition, edge_index: Tensor, num_src: int, num_dst: int, square: bool, count: int
) -> tuple[Tensor, Tensor]:
    """int64 [num_src] and [num_dst]: the part of each source and destination; one tensor where square."""
    if isinstance(partition, str):
        if partition not in METHODS:
            raise ValueError(
                f"{where}: partition: expected one of {', '.join(METHODS)}, or a tensor, got {partition!r}"
            )
        if partition == "metis":
            return metis(edge_index, num_src, num_dst, square, count)
        dst = contiguous(_csr.count(edge_index[1], num_dst), count)
        return (dst, dst) if square else (contiguous(_csr.count(edge_index[0], num_src), count), dst)
    tensors = (partition,) if isinstance(partition, Tensor) else partition
    sizes = (num_dst,) if square else (num_src, num_dst)
    if not isinstance(tensors, tuple) or len(tensors) != len(sizes):
        expected = "a tensor" if square else "a pair of tensors, of the sources and of the destinations"
        raise TypeError(f"{where}: partition: expected {expected} or a name, got {type(partition).__name__}")
    checked = [_checked(where, x, size, count, edge_index.device) for x, size in zip(tensors, sizes)]
    return checked[0], checked[-1]


def _checked(where: str, x: Tensor, size: int, count: int, device: torch.device) -> Tensor:
    x = _csr.as_index(where, "partition", x, (size,)).to(device, torch.int64)
    if size and not 0 <= int(x.min()) <= int(x.max()) < count:
        got = f"{int(x.min())} .. {int(x.max())}"
        raise ValueError(f"{where}: partition: expected numbers of parts in 0 .. {count - 1}, got {got}")
    return x


def contiguous(degrees: Tensor, count: int) -> Tensor:
    """Divides nodes into ranges of about the same work: the number of edges, plus one per node."""
    work = (degrees + 1).cumsum(0)
    total = int(work[-1]) if len(work) else 0
    bounds = torch.arange(1, count, device=degrees.device) * total // max(count, 1)
    return torch.searchsorted(bounds, work - (degrees + 1), right=True)


def metis(edge_index: Tensor, num_src: int, num_dst: int, square: bool, count: int) -> tuple[Tensor, Tensor]:
    """METIS's k-way partition (Karypis and Kumar, SIAM J. Sci. Comput. 1998), made on the CPU: few edges
    between parts, and about the same work in each."""
    try:
        import pymetis
    except ImportError as error:
        raise ImportError("partition='metis' needs pymetis: pip install dfgnn[distributed]") from error
    src, dst = edge_index.cpu().to(torch.int64)
    num_nodes = num_dst if square else num_src + num_dst
    work = _csr.count(dst, num_nodes) + 1
    if not square:
        src = src + num_dst  # METIS gets one graph of sources and destinations
    pairs = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])
    pairs = pairs[:, pairs[0] != pairs[1]]
    keys = (pairs[0] * num_nodes + pairs[1]).unique()
    rows, neighbours = keys // max(num_nodes, 1), keys % max(num_nodes, 1)
    indptr = _csr.count(rows, num_nodes).cumsum(0)
    indptr = torch.cat([indptr.new_zeros(1), indptr])
    if count == 1 or num_nodes == 0:
        owner = torch.zeros(num_nodes, dtype=torch.int64)
    else:
        _, parts = pymetis.part_graph(
            count, pymetis.CSRAdjacency(indptr.numpy(), neighbours.numpy()), vweights=work.numpy()
        )
        owner = torch.as_tensor(parts, dtype=torch.int64)
    owner = owner.to(edge_index.device)
    return (owner, owner) if square else (owner[num_dst:], owner[:num_dst])


def places(owner: Tensor, count: int) -> Places:
    order = torch.argsort(owner, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    sizes = torch.bincount(owner, minlength=count).tolist()
    return Places(order, place, offsets_of(sizes))


def offsets_of(sizes: Sequence[int]) -> list[int]:
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return offsets


# ---- the part of one process -----------------------------------------------------------------------------


def cut(edge_index: Tensor, owner: tuple[Tensor, Tensor], number: int, count: int) -> Part:
    """The part with this number, cut out of the whole graph."""
    src_owner, dst_owner = owner
    src_places = places(src_owner, count)
    dst_places = src_places if dst_owner is src_owner else places(dst_owner, count)
    src_nodes = src_places.part(number)
    dst_nodes = src_nodes if dst_places is src_places else dst_places.part(number)
    src, dst = edge_index
    edge_ids = (dst_owner[dst] == number).nonzero().squeeze(1)
    fingerprint = print_of(fingerprint_of(src, dst), src_places, dst_places)
    return Part(
        number, src_nodes, dst_nodes, src_places.place[src[edge_ids]],
        dst_places.place[dst[edge_ids]] - dst_nodes.offsets[number], edge_ids, edge_index.shape[1],
        fingerprint,
    )  # fmt: skip


_MIX = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)  # splitmix64's
_CHUNK = 2**24  # rows at a time, which limits the memory that a checksum takes


def fingerprint_of(a: Tensor, b: Tensor, first: int = 0) -> int:
    """A 64-bit checksum of two columns, with rows counted from ``first``. The checksums of consecutive ranges
    of rows add up to that of all rows, modulo 2**64."""
    total = 0
    for begin in range(0, len(a), _CHUNK):
        x, y = (t[begin : begin + _CHUNK].to(torch.int64) for t in (a, b))
        number = torch.arange(first + begin, first + begin + len(x), device=x.device)
        for values in (x, y):
            number = (number + values + 1) * _MIX[0]
            number = (number ^ (number >> 31)) * _MIX[1]
            number = (number ^ (number >> 29)) * _MIX[2]
        total += int(number.sum())
    return total % 2**64


def print_of(edges: int, src: Places, dst: Places) -> int:
    """The fingerprint of a graph and its partition, from that of its edges."""
    sides = (fingerprint_of(side.place, side.order) for side in (src, dst))
    return combine(edges, *sides, *src.offsets, *dst.offsets)


def combine(*numbers: int) -> int:
    total = 0
    for number in numbers:
        total = (total ^ number % 2**64) * 0x100000001B3 % 2**64
        total ^= total >> 29
    return total
