"""SparseMatrix: entries with a value, or a vector of values, for each; and functions that make matrices."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from ..as_dgl import PAGE
from .lazy import Lazy, Scores, Weights, can_wait
from .structure import Structure, of_compressed, of_coo, of_indices


class SparseMatrix:
    """A sparse matrix with the name and the methods of ``dgl.sparse.SparseMatrix``.

    It is made by :func:`spmatrix`, :func:`from_coo`, :func:`from_csr`, ... Values are ``[nnz]``, or ``[nnz,
    K]`` for K matrices with the same entries, in the user's order. Without values all are 1, in the dtype of
    the other operand.
    """

    def __init__(self, structure: Structure, val: Tensor | None = None, lazy: Lazy | None = None):
        self._structure, self._val, self._lazy = structure, val, lazy

    # ---- values and positions ---------------------------------------------------------------------------

    @property
    def val(self) -> Tensor:
        """The values, ``[nnz]`` or ``[nnz, K]``."""
        if self._val is None:
            if self._lazy is None:
                self._val = torch.ones(self.nnz, device=self.device)
            else:
                self._val = self._lazy.values()
                self._lazy = None
        return self._val

    @property
    def _given(self) -> Tensor | None:
        """The values, or None if all are 1."""
        return None if self._val is None and self._lazy is None else self.val

    def __getstate__(self) -> tuple[Structure, Tensor | None]:
        """The state of copies and pickles, with computed values: lazy ones refer to operands of this
        process."""
        return self._structure, self._given

    def __setstate__(self, state: tuple[Structure, Tensor | None]) -> None:
        self._structure, self._val = state
        self._lazy = None

    @property
    def shape(self) -> tuple[int, int]:
        return self._structure.shape

    @property
    def nnz(self) -> int:
        return self._structure.nnz

    @property
    def dtype(self) -> torch.dtype:
        return self.val.dtype

    @property
    def device(self) -> torch.device:
        return self._structure.graph.device

    @property
    def row(self) -> Tensor:
        return self._structure.row

    @property
    def col(self) -> Tensor:
        return self._structure.col

    def coo(self) -> tuple[Tensor, Tensor]:
        return self.row, self.col

    def indices(self) -> Tensor:
        given = self._structure.indices
        return torch.stack(self.coo()) if given is None else given

    def csr(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(indptr, columns, index of each entry's value; None of a matrix made from these)."""
        if self._structure.compressed is not None:
            return *self._structure.compressed, None
        csr = self._structure.graph.csr()
        places = torch.arange(self.nnz, device=self.device) if csr.eids is None else csr.eids.long()
        return csr.indptr.long(), csr.indices.long(), places

    def csc(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(indptr, rows, index of each entry's value; None of a matrix made from these)."""
        return self.T.csr()

    def to_dense(self) -> Tensor:
        """``[rows, columns]`` or ``[rows, columns, K]``; entries at the same position are added."""
        flat = self.val.new_zeros(self.shape[0] * self.shape[1], *self.val.shape[1:])
        flat = flat.index_add(0, self._structure.keys(), self.val)
        return flat.view(*self.shape, *self.val.shape[1:])

    def __repr__(self) -> str:
        size = f", val_size={tuple(self.val.shape[1:])}" if self.val.dim() > 1 else ""
        indices = str(self.indices()).replace("\n", "\n" + " " * 21)
        values = str(self.val).replace("\n", "\n" + " " * 20)
        return (
            f"SparseMatrix(indices={indices},\n             values={values},\n"
            f"             shape={self.shape}, nnz={self.nnz}{size})"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"dgl.sparse.SparseMatrix has no attribute {name!r} in dfgnn, which stands for DGL here; "
            f"{PAGE} says what there is"
        )

    # ---- other matrices ---------------------------------------------------------------------------------

    def transpose(self) -> SparseMatrix:
        structure = self._structure.transposed()
        return SparseMatrix(structure, self._given)

    def t(self) -> SparseMatrix:
        return self.transpose()

    @property
    def T(self) -> SparseMatrix:
        return self.transpose()

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> SparseMatrix:
        val = self._given
        if device is not None and torch.device(device) != self.device:
            s = self._structure
            graph = s.graph.to(device)
            structure = Structure(s.row.to(device), s.col.to(device), s.shape, graph)
            return SparseMatrix(structure, None if val is None else val.to(device, dtype))
        if dtype is None or val is not None and val.dtype == dtype:
            return self
        return SparseMatrix(self._structure, self.val.to(dtype))

    def cuda(self) -> SparseMatrix:
        return self.to("cuda")

    def cpu(self) -> SparseMatrix:
        return self.to("cpu")

    def float(self) -> SparseMatrix:
        return self.to(dtype=torch.float32)

    def double(self) -> SparseMatrix:
        return self.to(dtype=torch.float64)

    def has_duplicate(self) -> bool:
        return len(self._structure.keys().unique()) < self.nnz

    def is_diag(self) -> bool:
        return bool((self.row == self.col).all()) and not self.has_duplicate()

    def coalesce(self) -> SparseMatrix:
        """The matrix with entries sorted by position, and those at the same position added."""
        keys, place = self._structure.keys().unique(return_inverse=True)
        val = self.val.new_zeros(len(keys), *self.val.shape[1:]).index_add(0, place, self.val)
        return _of_keys("SparseMatrix.coalesce", keys, self.shape, val)

    # ---- arithmetic -------------------------------------------------------------------------------------

    def softmax(self, dim: int = 1) -> SparseMatrix:
        return softmax(self, dim)

    def neg(self) -> SparseMatrix:
        return -self

    def __neg__(self) -> SparseMatrix:
        return self * -1

    def __mul__(self, other: Any) -> SparseMatrix:
        if isinstance(other, SparseMatrix):
            return _joined("mul", self, other, torch.mul)
        if not _is_scalar(other):
            return NotImplemented
        if isinstance(self._lazy, Scores) and not isinstance(other, (Tensor, complex)):
            return SparseMatrix(self._structure, None, self._lazy.times(float(other)))
        return val_like(self, self.val * other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> SparseMatrix:
        if isinstance(other, SparseMatrix):
            return _joined("div", self, other, torch.div)
        return val_like(self, self.val / other) if _is_scalar(other) else NotImplemented

    def __pow__(self, other: Any) -> SparseMatrix:
        return val_like(self, self.val**other) if _is_scalar(other) else NotImplemented

    def __add__(self, other: Any) -> SparseMatrix:
        return _added("add", self, other) if isinstance(other, SparseMatrix) else NotImplemented

    def __sub__(self, other: Any) -> SparseMatrix:
        return _added("sub", self, -other) if isinstance(other, SparseMatrix) else NotImplemented

    def int(self) -> SparseMatrix:
        return self.to(dtype=torch.int32)

    def long(self) -> SparseMatrix:
        return self.to(dtype=torch.int64)


# ---- making matrices --------------------------------------------------------------------------------------


def spmatrix(indices: Tensor, val: Tensor | None = None, shape: Any = None) -> SparseMatrix:
    """A matrix from ``[2, nnz]`` rows and columns; by default with the least shape that contains them."""
    structure = of_indices("dgl.sparse.spmatrix", indices, shape)
    return SparseMatrix(structure, _values("dgl.sparse.spmatrix", structure, val))


def from_coo(row: Tensor, col: Tensor, val: Tensor | None = None, shape: Any = None) -> SparseMatrix:
    structure = of_coo("dgl.sparse.from_coo", row, col, shape)
    return SparseMatrix(structure, _values("dgl.sparse.from_coo", structure, val))


def from_csr(indptr: Tensor, indices: Tensor, val: Tensor | None = None, shape: Any = None) -> SparseMatrix:
    """A matrix from indptr of rows, and columns."""
    structure = of_compressed("dgl.sparse.from_csr", indptr, indices, shape, by_row=True)
    return SparseMatrix(structure, _values("dgl.sparse.from_csr", structure, val))


def from_csc(indptr: Tensor, indices: Tensor, val: Tensor | None = None, shape: Any = None) -> SparseMatrix:
    """A matrix from indptr of columns, and rows."""
    structure = of_compressed("dgl.sparse.from_csc", indptr, indices, shape, by_row=False)
    return SparseMatrix(structure, _values("dgl.sparse.from_csc", structure, val))


def val_like(mat: SparseMatrix, val: Tensor) -> SparseMatrix:
    """A matrix with the entries of ``mat`` and other values."""
    return SparseMatrix(mat._structure, _values("dgl.sparse.val_like", mat._structure, val))


def diag(val: Tensor, shape: Any = None) -> SparseMatrix:
    """val ``[N]`` or ``[N, K]`` on the diagonal."""
    shape = (len(val), len(val)) if shape is None else shape
    if len(val) != min(shape):
        raise ValueError(f"dgl.sparse.diag: val: expected {min(shape)} values for {shape}, got {len(val)}")
    places = torch.arange(len(val), device=val.device)
    return from_coo(places, places, val, shape)


def identity(shape: Any, d: int | None = None, dtype: Any = None, device: Any = None) -> SparseMatrix:
    """The matrix with 1 on the diagonal; with d, values are ``[nnz, d]``."""
    size = (min(shape),) if d is None else (min(shape), d)
    return diag(torch.ones(size, dtype=dtype, device=device), shape)


def from_torch_sparse(torch_sparse_tensor: Tensor) -> SparseMatrix:
    x = torch_sparse_tensor
    if x.layout == torch.sparse_coo:
        return spmatrix(x._indices(), x._values(), x.shape[:2])
    if x.layout == torch.sparse_csr:
        return from_csr(x.crow_indices(), x.col_indices(), x.values(), x.shape[:2])
    if x.layout == torch.sparse_csc:
        return from_csc(x.ccol_indices(), x.row_indices(), x.values(), x.shape[:2])
    raise TypeError(f"dgl.sparse.from_torch_sparse: expected a COO, CSR or CSC tensor, got {x.layout}")


def to_torch_sparse_coo(spmat: SparseMatrix) -> Tensor:
    shape = spmat.shape + tuple(spmat.val.shape[1:])
    return torch.sparse_coo_tensor(spmat.indices(), spmat.val, shape)


def to_torch_sparse_csr(spmat: SparseMatrix) -> Tensor:
    indptr, indices, places = spmat.csr()
    return torch.sparse_csr_tensor(indptr, indices, _in_order(spmat, places), spmat.shape)


def to_torch_sparse_csc(spmat: SparseMatrix) -> Tensor:
    indptr, indices, places = spmat.csc()
    return torch.sparse_csc_tensor(indptr, indices, _in_order(spmat, places), spmat.shape)


def _in_order(spmat: SparseMatrix, places: Tensor | None) -> Tensor:
    return spmat.val if places is None else spmat.val[places]


def _values(where: str, structure: Structure, val: Any) -> Tensor | None:
    if val is None:
        return None
    if not isinstance(val, Tensor) or val.dim() not in (1, 2) or len(val) != structure.nnz:
        got = list(val.shape) if isinstance(val, Tensor) else type(val).__name__
        raise ValueError(
            f"{where}: val: expected a tensor [{structure.nnz}] or [{structure.nnz}, K], got {got}"
        )
    if val.device != structure.graph.device:
        raise ValueError(f"{where}: val: expected device {structure.graph.device}, got {val.device}")
    return val


# ---- arithmetic -------------------------------------------------------------------------------------------


def softmax(input: SparseMatrix, dim: int = 1) -> SparseMatrix:
    """Softmax over the entries of each row (dim 1) or each column (dim 0)."""
    if dim not in (0, 1):
        raise ValueError(f"dgl.sparse.softmax: dim: expected 0 or 1, got {dim!r}")
    if dim == 0:
        return softmax(input.T).T
    scores = input._lazy if isinstance(input._lazy, Scores) else input.val
    weights = Weights(input._structure.graph, scores)
    if isinstance(scores, Tensor) and not can_wait(scores):
        return SparseMatrix(input._structure, weights.compute())
    return SparseMatrix(input._structure, None, weights)


def _is_scalar(x: Any) -> bool:
    return isinstance(x, numbers.Number) or isinstance(x, Tensor) and x.dim() == 0


def _of_keys(where: str, keys: Tensor, shape: tuple[int, int], val: Tensor) -> SparseMatrix:
    return SparseMatrix(of_coo(where, keys // max(shape[1], 1), keys % max(shape[1], 1), shape), val)


def _same_shape(name: str, a: SparseMatrix, b: SparseMatrix) -> None:
    if a.shape != b.shape:
        raise ValueError(
            f"dgl.sparse.{name}: expected two matrices of one shape, got {a.shape} and {b.shape}"
        )


def _added(name: str, a: SparseMatrix, b: SparseMatrix) -> SparseMatrix:
    """The sum of two matrices: entries of either, sorted if their positions differ."""
    _same_shape(name, a, b)
    if a._structure.same_as(b._structure):
        return val_like(a, a.val + b.val)
    keys = torch.cat([a._structure.keys(), b._structure.keys()])
    return _of_keys(f"dgl.sparse.{name}", keys, a.shape, torch.cat([a.val, b.val])).coalesce()


def _joined(name: str, a: SparseMatrix, b: SparseMatrix, op: Any) -> SparseMatrix:
    """op of the entries that both have; a quotient needs matrices with the same positions."""
    _same_shape(name, a, b)
    if a._structure.same_as(b._structure):
        return val_like(a, op(a.val, b.val))
    if a.has_duplicate() or b.has_duplicate():
        raise ValueError(
            f"dgl.sparse.{name}: expected matrices without entries at the same place: coalesce()"
        )
    (ours, mine), (theirs, other) = (m._structure.keys().sort() for m in (a, b))
    if name == "div":
        if not torch.equal(ours, theirs):
            raise ValueError("dgl.sparse.div: expected two matrices with entries at the same places")
        return val_like(a, op(a.val, b.val[torch.empty_like(other).index_copy(0, mine, other)]))
    common = torch.isin(ours, theirs)
    at = torch.searchsorted(theirs, ours[common])
    return _of_keys("dgl.sparse.mul", ours[common], a.shape, op(a.val[mine[common]], b.val[other[at]]))
