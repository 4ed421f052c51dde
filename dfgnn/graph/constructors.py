"""The constructors of Graph. Each states the order of the edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..runtime.wrong_call import says_calls
from ..sparse import csr as _csr
from . import build, convert

if TYPE_CHECKING:
    from typing_extensions import Self


def _not_there(edge_index: Any, num_src: Any, num_dst: Any) -> Any:
    raise AssertionError("engine/argument_checks.py comes with every import of dfgnn")


#: Makes `Graph.cached`. engine/argument_checks.py, which knows compilers and imports this module, sets it.
make_cached: Callable[[Any, Any, Any], Any] = _not_there


class Constructors:
    """The constructors of `Graph`."""

    __slots__ = ()

    @classmethod
    def from_csr(
        cls,
        indptr: Tensor,
        indices: Tensor,
        num_src: int | None = None,
        *,
        eids: Tensor | None = None,
        validate: bool = True,
    ) -> Self:
        """Rows are destinations: the sources of the edges into i are ``indices[indptr[i]:indptr[i + 1]]``.

        indptr: int32 or int64 [num_dst + 1].  indices: int32 or int64 [E].  num_src: default num_dst.  eids:
        int32 or int64 [E], the place of each CSR edge in the user's order, a permutation; without it that
        order is the CSR's own.

        Raises TypeError (not an int32 or int64 tensor) and ValueError (shape, device, 2**31 nodes, or edges
        into one, indptr that does not rise from 0 to E, indices or eids out of range, repeated eids).
        """
        return build.from_csr(cls, "Graph.from_csr", indptr, indices, num_src, eids, validate)

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        num_nodes: int | None = None,
        num_src: int | None = None,
        num_dst: int | None = None,
        validate: bool = True,
    ) -> Self:
        """PyG's convention: edge_index int32 or int64 [2, E], [0] the sources and [1] the destinations.

        num_nodes: num_src = num_dst = num_nodes. A size that is not given is the largest id + 1: of both rows
        if neither is given (a square graph), else of its own row. The user's order is that of the columns. A
        sort by destination is skipped where the edges are sorted already.

        Raises TypeError (not an int32 or int64 tensor, num_nodes together with num_src or num_dst) and
        ValueError (shape, 2**31 nodes, or edges into one, ids out of range).
        """
        where = "Graph.from_edge_index"
        src, dst = _csr.ends_of(where, edge_index)
        given = _csr.UserEdges(where, _csr.EDGE_INDEX, src, dst, num_src, num_dst)
        return build.from_coo(cls, given, num_nodes, validate)

    @classmethod
    def from_coo(
        cls,
        src: Tensor,
        dst: Tensor,
        num_nodes: int | None = None,
        num_src: int | None = None,
        num_dst: int | None = None,
        validate: bool = True,
    ) -> Self:
        """Edges src[e] -> dst[e], int32 or int64 [E]; the rest is as in `from_edge_index`."""
        where = "Graph.from_coo"
        src = _csr.as_index(where, "src", src)
        dst = _csr.as_index(where, "dst", dst)
        if src.numel() != dst.numel():
            raise ValueError(f"{where}: dst: expected {src.numel()} values like src, got {dst.numel()}")
        given = _csr.UserEdges(where, ("src", "dst"), src, dst, num_src, num_dst)
        return build.from_coo(cls, given, num_nodes, validate)

    @classmethod
    def from_scipy(cls, matrix, rows: str = "src", validate: bool = True) -> Self:
        """scipy.sparse matrix or array, any format. Its values are ignored: every stored element is an edge.

        rows="src": matrix[src, dst], of shape [num_src, num_dst], the convention of DGL's from_scipy and of
        PyG. rows="dst": matrix[dst, src]. The user's order is that of matrix.data for CSR, CSC and COO, and
        that of ``matrix.tocoo()`` for other formats. Copies, because scipy sorts its matrices in place.
        """
        return convert.from_scipy(cls, matrix, rows, validate)

    @classmethod
    def from_torch_sparse(cls, matrix: Tensor, validate: bool = True) -> Self:
        """torch.sparse tensor [num_dst, num_src], rows are destinations: the transposed adjacency, as PyG's
        adj_t.

        CSR, CSC or COO layout, coalesced or not. Its values are ignored: every stored element is an edge. The
        user's order is that of its values.

        Raises TypeError (no sparse tensor, or block layouts) and ValueError (not exactly two sparse
        dimensions).
        """
        return convert.from_torch_sparse(cls, "Graph.from_torch_sparse", matrix, validate)

    @classmethod
    def from_dgl(cls, graph, validate: bool = True) -> Self:
        """DGLGraph with one edge type, or a sampled block of one edge type; the user's order is DGL's edge
        ids.

        The structure is DGL's own CSC (int32 indices are shared). Raises TypeError (no DGLGraph) and
        ValueError (several edge types: take one of them, ``graph[etype]``).
        """
        return convert.from_dgl(cls, graph, validate)

    @classmethod
    def from_pyg(
        cls,
        data,
        num_nodes: int | None = None,
        num_src: int | None = None,
        num_dst: int | None = None,
        validate: bool = True,
    ) -> Self:
        """What PyG's layers and loaders take for edges; sizes that are given win over those found in it.

        edge_index [2, E] tensor or EdgeIndex: the user's order is that of the columns.  SparseTensor or
        torch.sparse tensor (transposed: rows are destinations, sizes are its own): that of its values.  Data,
        or one edge type of a HeteroData, ``data[edge_type]``: its edge_index, else its adj_t, with its
        numbers of nodes.

        Raises TypeError (none of these) and ValueError (a HeteroData, no edges in it, sizes in addition to a
        sparse tensor).
        """
        return convert.from_pyg(cls, data, num_nodes, num_src, num_dst, validate)

    @classmethod
    def cached(
        cls,
        edge_index,
        num_nodes: int | None = None,
        num_src: int | None = None,
        num_dst: int | None = None,
    ) -> Self:
        """The graph of an ``edge_index``, made at the first call, and found again as long as that tensor
        lives.

        A second call with the same tensor gives the same graph, with all that it has derived. It is made anew
        when the tensor was rewritten: on the CPU in any way, elsewhere by PyTorch's in-place operations. The
        functions do this themselves where they are given the tensor, and the layers with PyG's contract share
        what it keeps.

        edge_index: int32 or int64 [2, E] tensor or EdgeIndex; or a SparseTensor or torch.sparse tensor,
        transposed as in `from_pyg`. The sizes are as in `from_edge_index`; of a sparse tensor or EdgeIndex
        its own, if none is given. Edges are in the order of the columns. The first call waits for the device.
        While a compiler records, both sizes have to be given.

        Raises TypeError (none of these, no sizes) and ValueError (shape, ids out of range, other sizes than a
        sparse tensor has).
        """
        return make_cached(edge_index, *build.given_sizes("Graph.cached", num_nodes, num_src, num_dst))


for _name, _method in list(vars(Constructors).items()):
    if isinstance(_method, classmethod):  # as Python's own errors name it
        _method.__func__.__qualname__ = f"Graph.{_name}"
        setattr(Constructors, _name, classmethod(says_calls(_method.__func__, f"Graph.{_name}")))
