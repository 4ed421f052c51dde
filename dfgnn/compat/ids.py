"""The one reader of ids of nodes and edges, and of the forms of edges that DGL's functions accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nn.dgl import DGLError

INDEX_DTYPES = torch.int32, torch.int64


def is_one(x: Any) -> bool:
    """Whether ids are given as a single number."""
    return hasattr(x, "__index__") and not isinstance(x, (Tensor, bool)) and getattr(x, "ndim", 0) == 0


def ids(
    where: str, name: str, x: Any, size: int | None, dtype: Any = torch.int64, device: Any = None
) -> Tensor:
    """The ids x, a number or a vector of int32 or int64, as a tensor.

    size: they must be less than this number and not negative; None does not check it.  dtype, device: of the
    result. Raises DGLError; masks and floats are no ids.
    """
    try:
        given = x if isinstance(x, Tensor) else torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        got = type(x).__name__
        raise DGLError(
            f"{where}: {name}: expected ids, a number or a vector of integers, got {got}"
        ) from error
    if not isinstance(x, Tensor) and given.numel() == 0:  # an empty list has no dtype
        given = given.to(dtype)
    if given.dtype not in INDEX_DTYPES:
        hint = "; of a mask, mask.nonzero().squeeze(1) are the ids" if given.dtype == torch.bool else ""
        raise DGLError(f"{where}: {name}: expected ids of int32 or int64, got {given.dtype}{hint}")
    if given.dim() > 1:
        raise DGLError(f"{where}: {name}: expected ids in one dimension, got shape {list(given.shape)}")
    given = given.reshape(-1)
    if size is not None and len(given):
        low, high = (int(end) for end in given.aminmax())
        if low < 0 or high >= size:
            wrong = low if low < 0 else high
            raise DGLError(f"{where}: {name}: expected ids from 0 to {size - 1}, got {wrong}")
    return given.to(device=device, dtype=dtype)


class Ends(NamedTuple):
    """Edges: their sources and destinations, with the numbers of nodes that they need.

    form: "csr" or "csc" if they came as that, without edge ids.  rows: the nodes of an indptr.
    """

    src: Tensor
    dst: Tensor
    num_src: int
    num_dst: int
    form: str = "coo"
    rows: int | None = None

    def sized(self, where: str, num_src: int, num_dst: int) -> Ends:
        """The edges between these numbers of nodes, which must be enough, and those of an indptr exactly."""
        for need, given, form in ((self.num_src, num_src, "csr"), (self.num_dst, num_dst, "csc")):
            if given < need:
                raise DGLError(
                    f"{where}: number of nodes: expected at least {need}, as the edges need, got {given}"
                )
            if form == self.form and given != self.rows:
                raise DGLError(
                    f"{where}: number of nodes: expected {self.rows}, those of indptr, got {given}"
                )
        return self._replace(num_src=int(num_src), num_dst=int(num_dst))


def ends_of(where: str, data: Any, idtype: Any = None, bipartite: bool = False) -> Ends:
    """Edges from (sources, destinations), a list of pairs, or ("coo", ends), ("csr", (indptr, indices, edge
    ids)), ("csc", ...). Their dtype is idtype, or that of the tensors given, or int64.

    bipartite: sources and destinations are numbered apart; otherwise both sizes are the larger.
    """
    check_idtype(where, idtype)
    form, arrays = _form(where, data)
    if idtype is None:
        idtype = next(
            (x.dtype for x in arrays if isinstance(x, Tensor) and x.dtype in INDEX_DTYPES), torch.int64
        )
    read = [ids(where, "data", x, None, idtype) for x in arrays]
    least = min((int(x.min()) for x in read if len(x)), default=0)
    if least < 0:
        raise DGLError(f"{where}: data: expected ids that are not negative, got {least}")
    sizes = [int(x.max()) + 1 if len(x) else 0 for x in read[:2]]
    if form == "coo":
        src, dst = read
        if len(src) != len(dst):
            raise DGLError(
                f"{where}: data: expected as many sources as destinations, got {len(src)} and {len(dst)}"
            )
    else:
        outer, inner = _rows(where, *read)
        src, dst = (outer, inner) if form == "csr" else (inner, outer)
        sizes = [len(read[0]) - 1, sizes[1]] if form == "csr" else [sizes[1], len(read[0]) - 1]
    if not bipartite:
        sizes = [max(sizes), max(sizes)]
    if form == "coo" or len(read[2]):
        return Ends(src, dst, sizes[0], sizes[1])
    return Ends(src, dst, sizes[0], sizes[1], form, len(read[0]) - 1).sized(where, *sizes)


def ends_of_matrix(where: str, matrix: Any, idtype: Any = None) -> Ends:
    """Edges from a SciPy matrix[source, destination]."""
    matrix = matrix.tocoo()
    rows, cols = (
        torch.as_tensor(x).to(check_idtype(where, idtype) or torch.int64) for x in (matrix.row, matrix.col)
    )
    return Ends(rows, cols, *matrix.shape)


def ends_of_networkx(where: str, graph: Any, idtype: Any = None) -> Ends:
    """Edges from a networkx graph, both directions of an undirected one. Nodes are numbered in the order of
    their sorted labels."""
    import networkx

    graph = networkx.convert_node_labels_to_integers(graph.to_directed(), ordering="sorted")
    edges, size = [edge[:2] for edge in graph.edges], graph.number_of_nodes()
    dtype = check_idtype(where, idtype) or torch.int64
    src, dst = torch.tensor(edges, dtype=dtype).reshape(-1, 2).unbind(1)
    return Ends(src, dst, size, size)


def check_idtype(where: str, idtype: Any) -> Any:
    if idtype not in (None, *INDEX_DTYPES):
        raise DGLError(f"{where}: idtype: expected torch.int32 or torch.int64, got {idtype}")
    return idtype


def _form(where: str, data: Any) -> tuple[str, Sequence[Any]]:
    form = "coo"
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], str):
        form, data = data
    elif isinstance(data, list):
        if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in data):
            raise DGLError(f"{where}: data: expected a list of pairs (source, destination)")
        data = [pair[0] for pair in data], [pair[1] for pair in data]
    lengths = {"coo": 2, "csr": 3, "csc": 3}
    if form not in lengths or not isinstance(data, (tuple, list)) or len(data) != lengths[form]:
        raise DGLError(
            f"{where}: data: expected (sources, destinations), a list of pairs, or ('csr' or 'csc', (indptr, "
            f"indices, edge ids)), got {type(data).__name__}; dgl.from_scipy and dgl.from_networkx read those"
        )
    return form, data


def _rows(where: str, indptr: Tensor, indices: Tensor, eids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of a CSR, in the order of its edge ids."""
    counts = indptr.diff()
    if (
        not len(indptr)
        or int(indptr[0])
        or int(indptr[-1]) != len(indices)
        or len(counts)
        and int(counts.min()) < 0
    ):
        raise DGLError(f"{where}: data: expected an indptr that rises from 0 to {len(indices)}, the edges")
    outer = torch.arange(len(counts), dtype=indices.dtype, device=indices.device).repeat_interleave(counts)
    if len(eids):
        if not torch.equal(
            eids.sort().values, torch.arange(len(indices), dtype=eids.dtype, device=eids.device)
        ):
            raise DGLError(
                f"{where}: data: expected edge ids that are a permutation of 0 to {len(indices) - 1}"
            )
        outer, indices = (torch.empty_like(x).index_copy(0, eids.long(), x) for x in (outer, indices))
    return outer, indices


def by_type(where: str, name: str, kinds: Sequence[Any], given: Any) -> Mapping[Any, Any]:
    """What is given by type: a dictionary; or something else, which belongs to the only one of the types."""
    if isinstance(given, Mapping):
        return given
    if len(kinds) != 1:
        raise DGLError(f"{where}: {name}: expected a dictionary by type, one of {list(kinds)}")
    return {kinds[0]: given}


def found_edges(edges: Tensor, u: Tensor, v: Tensor, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
    """The edges ``[2, E]`` between each pair (u, v): (their ids sorted by their ends, each pair's first place
    there, and the place behind its last)."""
    keys, eids = (edges[0] * num_dst + edges[1]).sort(stable=True)
    wanted = u.long() * num_dst + v.long()
    return eids, torch.searchsorted(keys, wanted), torch.searchsorted(keys, wanted, right=True)
