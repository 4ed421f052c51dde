"""``dgl.sparse`` by its names: sparse matrices with tensors whose heads come last, ``[N, D, H]``.

``bsddmm``, ``softmax`` and ``bspmm`` in turn become one attention call, forward and backward, without a value
per entry and head in memory; if the values in between are read, they are three fused calls. Dtypes are
float32, float64, float16 and bfloat16. ``SparseMatrix.sample``, ``compact``, ``index_select`` and
``range_select`` are missing.
"""

from .matrix import (
    SparseMatrix,
    diag,
    from_coo,
    from_csc,
    from_csr,
    from_torch_sparse,
    identity,
    softmax,
    spmatrix,
    to_torch_sparse_coo,
    to_torch_sparse_csc,
    to_torch_sparse_csr,
    val_like,
)
from .products import (
    add,
    bsddmm,
    bspmm,
    div,
    inv,
    matmul,
    mul,
    neg,
    power,
    reduce,
    sddmm,
    smax,
    smean,
    smin,
    sp_add_v,
    sp_broadcast_v,
    sp_div_v,
    sp_mul_v,
    sp_sub_v,
    spmm,
    sprod,
    spspmm,
    sub,
    sum,
)

__all__ = [
    "SparseMatrix", "add", "bsddmm", "bspmm", "diag", "div", "from_coo", "from_csc", "from_csr",
    "from_torch_sparse", "identity", "inv", "matmul", "mul", "neg", "power", "reduce", "sddmm", "smax",
    "smean", "smin", "softmax", "sp_add_v", "sp_broadcast_v", "sp_div_v", "sp_mul_v", "sp_sub_v", "spmatrix",
    "spmm", "sprod", "spspmm", "sub", "sum", "to_torch_sparse_coo", "to_torch_sparse_csc",
    "to_torch_sparse_csr", "val_like",
]  # fmt: skip
