"""``dgl.sparse`` by its names: sparse matrices with tensors whose heads come last, ``[N, D, H]``.

``bsddmm``, ``softmax`` and ``bspmm`` one after the other are one attention call, forward and backward, which
makes no tensor of E × H; where somebody looks at the values in between, they are three fused pieces. Float32,
float64, float16 and bfloat16. Not here: ``SparseMatrix.sample``, ``compact``, ``index_select`` and
``range_select``.
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
