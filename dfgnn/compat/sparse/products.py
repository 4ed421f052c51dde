"""Products of sparse matrices with dense ones, reductions, and arithmetic by name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import functional
from ...engine.argument_checks import DTYPES
from ...functional.ops import copy_e_sum
from .lazy import Scores, Weights, can_wait
from .matrix import SparseMatrix, diag, from_coo, val_like
from .structure import pairs

_REDUCTIONS = {"sum": "sum", "smin": "amin", "smax": "amax", "smean": "mean", "sprod": "prod"}


def sddmm(A: SparseMatrix, X1: Tensor, X2: Tensor) -> SparseMatrix:
    r"""(X1 @ X2) * A at the entries of A, with ``X1 [L, M]`` and ``X2 [M, N]``, or ``[L]`` and ``[N]``, or
    both with a last dimension of K, for K matrices (:func:`bsddmm`).

    The values are computed when they are read; with ``.softmax()`` and a product with a dense matrix it
    becomes one attention call, if the values in between are not read.
    """
    _check("sddmm", A, X1=X1, X2=X2)
    if X1.dim() == 1 and X2.dim() == 1:
        X1, X2 = X1.unsqueeze(1), X2.unsqueeze(0)
    L, N = A.shape
    if X1.dim() != X2.dim() or X1.dim() not in (2, 3):
        raise ValueError(
            f"dgl.sparse.sddmm: expected X1 [{L}, M] and X2 [M, {N}], or [{L}, M, K] and [M, {N}, K], "
            f"got {list(X1.shape)} and {list(X2.shape)}"
        )
    if (X1.shape[0], X2.shape[1]) != (L, N) or X1.shape[1] != X2.shape[0] or X1.shape[2:] != X2.shape[2:]:
        raise ValueError(
            f"dgl.sparse.sddmm: expected X1 [{L}, M{', K' * (X1.dim() == 3)}] and X2 [M, {N}"
            f"{', K' * (X1.dim() == 3)}] for a matrix {A.shape}, got {list(X1.shape)} and {list(X2.shape)}"
        )
    single = X1.dim() == 2
    query, key = (
        (X1.unsqueeze(1), X2.t().unsqueeze(1)) if single else (X1.transpose(1, 2), X2.permute(1, 2, 0))
    )
    gate = A._given
    if gate is not None:
        if gate.dim() == 2 and (single or gate.shape[1] != query.shape[1]):
            expected = f"[{A.nnz}]" if single else f"[{A.nnz}] or [{A.nnz}, {query.shape[1]}]"
            raise ValueError(f"dgl.sparse.sddmm: A: expected values {expected}, got {list(gate.shape)}")
        gate = gate.to(X1.dtype)
    scores = Scores(A._structure.graph, query, key, gate, single)
    if not can_wait(query, key, gate):
        return SparseMatrix(A._structure, scores.compute())
    return SparseMatrix(A._structure, None, scores)


def bsddmm(A: SparseMatrix, X1: Tensor, X2: Tensor) -> SparseMatrix:
    """:func:`sddmm` of ``X1 [L, M, K]`` and ``X2 [M, N, K]``: values ``[nnz, K]``."""
    return sddmm(A, X1, X2)


def spmm(A: SparseMatrix, X: Tensor) -> Tensor:
    """A @ X for ``X [M]`` or ``[M, N]``, or with values ``[nnz, K]`` for ``X [M, N, K]`` (:func:`bspmm`)."""
    _check("spmm", A, X=X)
    batched = X.dim() == 3
    if X.dim() not in (1, 2, 3) or len(X) != A.shape[1]:
        raise ValueError(
            f"dgl.sparse.spmm: X: expected shape [{A.shape[1]}], [{A.shape[1]}, N] or [{A.shape[1]}, N, K], "
            f"got {list(X.shape)}"
        )
    feat = X.transpose(1, 2) if batched else X.view(len(X), 1, 1) if X.dim() == 1 else X.unsqueeze(1)
    out = _times(A, feat, batched)
    return out.transpose(1, 2) if batched else out.view(-1) if X.dim() == 1 else out.squeeze(1)


def bspmm(A: SparseMatrix, X: Tensor) -> Tensor:
    """A @ X by the last dimension: values ``[nnz, K]`` and ``X [M, N, K]`` give ``[L, N, K]``."""
    return spmm(A, X)


def _times(A: SparseMatrix, feat: Tensor, batched: bool) -> Tensor:
    """A @ feat for each head: [L, H, N] from feat [M, H, N]. batched: feat has heads in the user's call."""
    graph = A._structure.graph
    if isinstance(A._lazy, Weights) and A._lazy.single != batched:
        out = A._lazy.times(feat)
        if out is not None:
            return out
    val = A._given
    if val is None:
        return functional.spmm(graph, feat.new_ones(A.nnz), feat)
    if val.dim() == 2 and (not batched or val.shape[1] != feat.shape[1]):
        raise ValueError(
            f"dgl.sparse.spmm: X: expected a last dimension of {val.shape[1]}, as values have "
            f"({list(val.shape)}), got {feat.shape[1] if batched else 'none'}"
        )
    return functional.spmm(graph, val.to(feat.dtype), feat)


def spspmm(A: SparseMatrix, B: SparseMatrix) -> SparseMatrix:
    """A @ B of two sparse matrices with values ``[nnz]``; entries are sorted by position. Differentiable."""
    for name, matrix in (("A", A), ("B", B)):
        if not isinstance(matrix, SparseMatrix) or matrix.val.dim() != 1:
            raise ValueError(f"dgl.sparse.spspmm: {name}: expected a SparseMatrix with values [nnz]")
    if A.shape[1] != B.shape[0]:
        raise ValueError(
            f"dgl.sparse.spspmm: expected as many rows of B as columns of A, got {A.shape}, {B.shape}"
        )
    for name, matrix in (("A", A), ("B", B)):
        if matrix.has_duplicate():
            raise ValueError(f"dgl.sparse.spspmm: {name}: expected no entries at the same place: coalesce()")
    # An entry of A in column k is multiplied with the entries of B's row k.
    left, right = pairs(A.col.long(), B._structure.graph)
    keys = A.row.long()[left] * B.shape[1] + B.col.long()[right]
    keys, place = keys.unique(return_inverse=True)
    product = A.val[left] * B.val[right]
    val = product.new_zeros(len(keys)).index_add(0, place, product)
    columns = max(B.shape[1], 1)
    return from_coo(keys // columns, keys % columns, val, (A.shape[0], B.shape[1]))


def matmul(A: Any, B: Any) -> Any:
    """A @ B of dense and sparse matrices; a dense one times a sparse one is not supported, as in DGL."""
    if isinstance(A, Tensor) and isinstance(B, Tensor):
        return torch.matmul(A, B)
    if not isinstance(A, SparseMatrix):
        raise TypeError(f"dgl.sparse.matmul: expected a SparseMatrix before @, got {type(A).__name__}")
    return spmm(A, B) if isinstance(B, Tensor) else spspmm(A, B)


def _check(where: str, A: Any, **dense: Any) -> None:
    where = f"dgl.sparse.{where}"
    if not isinstance(A, SparseMatrix):
        raise TypeError(f"{where}: A: expected a SparseMatrix, got {type(A).__name__}")
    first = None
    for name, x in dense.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{where}: {name}: expected a tensor, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{where}: {name}: expected float32, float64, float16 or bfloat16, got {x.dtype}")
        if x.device != A.device:
            raise ValueError(f"{where}: {name}: expected device {A.device} (the matrix's), got {x.device}")
        first = x if first is None else first
        if x.dtype != first.dtype:
            raise TypeError(f"{where}: {name}: expected {first.dtype} like the first, got {x.dtype}")


# ---- reductions -------------------------------------------------------------------------------------------


def reduce(input: SparseMatrix, dim: int | None = None, rtype: str = "sum") -> Tensor:
    """Reduces entries: all of them, by column (dim 0) or by row (dim 1); 0 where there are none.

    rtype: "sum", "smin", "smax", "smean" or "sprod".
    """
    if rtype not in _REDUCTIONS:
        raise ValueError(f"dgl.sparse.reduce: rtype: expected one of {list(_REDUCTIONS)}, got {rtype!r}")
    if dim not in (None, 0, 1):
        raise ValueError(f"dgl.sparse.reduce: dim: expected None, 0 or 1, got {dim!r}")
    val, structure = input.val, input._structure
    if dim is None:
        index, size = torch.zeros(input.nnz, dtype=torch.int64, device=input.device), 1
    else:
        index, size = (structure.col, structure.row)[dim].long(), input.shape[1 - dim]
        if rtype == "sum" and val.dtype in DTYPES:
            graph = structure.graph
            return copy_e_sum(graph if dim == 1 else graph.reverse(), val)
    out = val.new_zeros(size, *val.shape[1:])
    index = index.view(-1, *[1] * (val.dim() - 1)).expand_as(val)
    out = out.scatter_reduce(0, index, val, _REDUCTIONS[rtype], include_self=False)
    return out.squeeze(0) if dim is None else out


def _reduction(rtype: str) -> Callable[..., Tensor]:
    def reduction(input: SparseMatrix, dim: int | None = None) -> Tensor:
        return reduce(input, dim, rtype)

    reduction.__name__ = reduction.__qualname__ = rtype
    return reduction


sum, smin, smax, smean, sprod = map(_reduction, _REDUCTIONS)


# ---- arithmetic by name -----------------------------------------------------------------------------------


add, sub, mul, div = operator.add, operator.sub, operator.mul, operator.truediv
power, neg = operator.pow, operator.neg


def inv(A: SparseMatrix) -> SparseMatrix:
    """The inverse of a square diagonal matrix."""
    if A.shape[0] != A.shape[1] or not A.is_diag():
        raise ValueError("dgl.sparse.inv: A: expected a square diagonal matrix")
    return diag(1.0 / A.coalesce().val, A.shape)


def sp_broadcast_v(A: SparseMatrix, v: Tensor, op: str) -> SparseMatrix:
    """op of each entry and an element of v: of its row, for v ``[rows, 1]``, or of its column, for
    ``[columns]`` or ``[1, columns]``."""
    if op not in ("add", "sub", "mul", "truediv"):
        raise ValueError(f"dgl.sparse.sp_broadcast_v: op: expected add, sub, mul or truediv, got {op!r}")
    v = v.view(1, -1) if v.dim() == 1 else v
    rows, cols = A.shape
    if tuple(v.shape) == (1, cols) and not (tuple(v.shape) == (rows, 1) and cols == 1 and rows != 1):
        factor = v.view(-1)[A.col.long()]
    elif tuple(v.shape) == (rows, 1):
        factor = v.view(-1)[A.row.long()]
    else:
        raise ValueError(
            f"dgl.sparse.sp_broadcast_v: v: expected shape [{cols}], [1, {cols}] or [{rows}, 1], "
            f"got {list(v.shape)}"
        )
    return val_like(A, getattr(operator, op)(A.val, factor if A.val.dim() == 1 else factor.unsqueeze(1)))


sp_add_v, sp_sub_v, sp_mul_v, sp_div_v = (
    partial(sp_broadcast_v, op=op) for op in ("add", "sub", "mul", "truediv")
)
SparseMatrix.__matmul__ = matmul  # type: ignore
for _name in _REDUCTIONS:
    setattr(SparseMatrix, _name, globals()[_name])
SparseMatrix.reduce = reduce  # type: ignore[attr-defined]
SparseMatrix.inv = inv  # type: ignore[attr-defined]
