"""dfgnn.compat.sparse compared with dense matrices in float64."""

import pytest
import torch

import dfgnn.compat.sparse as dglsp
from dfgnn import functional

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
GRAPHS = {
    "random": (9, 7, 30), "no entries": (4, 3, 0), "no rows": (0, 3, 0), "one row": (1, 40, 25),
    "tall": (50, 2, 60),
}  # fmt: skip


def places(name, device="cpu"):
    rows, cols, count = GRAPHS[name]
    if not count:
        return torch.zeros(2, 0, dtype=torch.int64, device=device), (rows, cols)
    ends = torch.stack([torch.randint(rows, (count,)), torch.randint(cols, (count,))])
    ends[:, -1] = ends[:, 0]  # two entries at the same place
    return ends.to(device), (rows, cols)


def features(shape, heads, size, dtype, device="cpu"):
    """q [L, D, H], k and v [N, D, H], in float64 with the values that dtype has."""
    made = [torch.randn(n, size, heads).to(dtype).double() for n in (shape[0], shape[1], shape[1])]
    return [x.to(device).requires_grad_() for x in made]


def dense_attention(ends, shape, q, k, v, val=None, scale=1.0):
    """The reference in float64, entry by entry: a softmax over each row of scale * val_ij * (q_i . k_j)."""
    row, col = ends
    score = scale * (q[row] * k[col]).sum(1)
    if val is not None:
        score = score * (val if val.dim() == 2 else val[:, None])
    high = score.detach().new_full((shape[0], score.shape[1]), -1e30)
    high = high.scatter_reduce(0, row[:, None].expand_as(score), score.detach(), "amax")
    exp = (score - high[row]).exp()
    weight = exp / exp.new_zeros(high.shape).index_add(0, row, exp)[row]
    return weight, v.new_zeros(shape[0], *v.shape[1:]).index_add(0, row, weight[:, None] * v[col])


def counted(monkeypatch):
    """A list to which each call of one of dfgnn's functions appends the function's name."""
    calls = []
    for name in ("dot_attention", "score_attention", "sddmm", "edge_softmax", "spmm"):
        function = getattr(functional, name)
        monkeypatch.setattr(
            functional, name, lambda *a, _f=function, _n=name, **k: calls.append(_n) or _f(*a, **k)
        )
    return calls


LOOKS = ["at nothing", "at scores", "at weights"]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("heads, size", [(1, 1), (3, 7), (8, 33)])
def test_attention(device, dtype, look, heads, size, monkeypatch):
    ends, shape = places("random", device)
    q, k, v = features(shape, heads, size, dtype, device)
    adj = dglsp.spmatrix(ends, shape=shape)
    calls = counted(monkeypatch)
    scores = dglsp.bsddmm(adj, q.to(dtype), k.to(dtype).transpose(1, 0)) * 0.5
    if look == "at scores":
        assert scores.val.shape == (30, heads) and scores.val.dtype == dtype
    weights = scores.softmax()
    if look == "at weights":
        assert weights.val.shape == (30, heads)
    out = dglsp.bspmm(weights, v.to(dtype))
    one_call = {"at nothing": ["dot_attention"], "at scores": ["sddmm", "score_attention"]}
    assert [name for name in calls if name != "spmm"] == one_call.get(look, ["sddmm", "edge_softmax"])
    expected_weight, expected = dense_attention(ends, shape, q, k, v, scale=0.5)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * max(1, size**0.5)}
    assert out.dtype == dtype and out.shape == (shape[0], size, heads)
    torch.testing.assert_close(out.double(), expected, **tolerance)
    torch.testing.assert_close(weights.val.double(), expected_weight, **tolerance)
    direction = torch.randn_like(expected)
    found = torch.autograd.grad((out.double() * direction).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * direction).sum(), (q, k, v))
    for x, y in zip(found, wanted):
        torch.testing.assert_close(
            x, y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * float(y.abs().max() + 1)
        )


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("values", ["ones", "one each", "one for each head"])
def test_values_of_the_mask_and_hard_graphs(device, name, values):
    ends, shape = places(name, device)
    q, k, v = features(shape, 2, 5, torch.float64, device)
    size = {"ones": None, "one each": (ends.shape[1],), "one for each head": (ends.shape[1], 2)}[values]
    val = None if size is None else torch.rand(size, dtype=torch.float64, device=device).requires_grad_()
    inputs = (q, k, v) if val is None else (q, k, v, val)
    for index in (ends, ends.int()):
        adj = dglsp.from_coo(*index, val, shape=shape)
        out = dglsp.bspmm(dglsp.softmax(dglsp.bsddmm(adj, q, k.transpose(1, 0))), v)
        _, expected = dense_attention(ends, shape, q, k, v, val)
        torch.testing.assert_close(out, expected)
        found, wanted = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected))
        torch.testing.assert_close(found, wanted)


def test_single_heads_and_vectors(device):
    ends, shape = places("random", device)
    q, k, v = (x.squeeze(2) for x in features(shape, 1, 6, torch.float64, device))
    adj = dglsp.spmatrix(ends, shape=shape)
    weights = dglsp.sddmm(adj, q, k.T).softmax()
    _, expected = dense_attention(ends, shape, *(x.unsqueeze(2) for x in (q, k, v)))
    torch.testing.assert_close(weights @ v, expected.squeeze(2))
    assert weights.val.shape == (30,)
    torch.testing.assert_close(dglsp.spmm(weights, v[:, 0]), expected[:, 0, 0])
    outer = dglsp.sddmm(adj, q[:, 0], k[:, 0])
    torch.testing.assert_close(outer.val, q[ends[0], 0] * k[ends[1], 0])


def test_gradcheck():
    ends, shape = places("random")
    q, k, v = features(shape, 2, 3, torch.float64)

    def attention(q, k, v):
        return dglsp.bspmm(dglsp.bsddmm(dglsp.spmatrix(ends, shape=shape), q, k.transpose(1, 0)).softmax(), v)

    assert torch.autograd.gradcheck(attention, (q, k, v))
    assert torch.autograd.gradgradcheck(attention, (q, k, v), fast_mode=True)


def test_values_are_those_of_the_call():
    """A lazy matrix is computed in the grad mode in which it was made, and raises if its inputs were modified
    meanwhile."""
    ends, shape = places("random")
    q, k, v = features(shape, 2, 3, torch.float64)
    adj, x = dglsp.spmatrix(ends, shape=shape), torch.randn(9, 3, 2, dtype=torch.float64)
    scores = dglsp.bsddmm(adj, q, k.transpose(1, 0))
    with torch.no_grad():
        assert scores.val.requires_grad
        silent = dglsp.bsddmm(adj, q, k.transpose(1, 0)).softmax()
    out = dglsp.bspmm(silent, v)
    q_grad, _ = torch.autograd.grad(out.sum(), (q, v), allow_unused=True)
    assert q_grad is None and not silent.val.requires_grad
    scores = dglsp.bsddmm(adj, x, k.detach().transpose(1, 0))
    x += 1
    with pytest.raises(RuntimeError, match="the first dense matrix was modified in place"):
        scores.softmax().val.sum()
    with torch.inference_mode():  # it has no version counters, so that values are computed at once
        y = torch.randn(9, 3, 2, dtype=torch.float64)
        scores = dglsp.bsddmm(adj, y, k.transpose(1, 0))
        before = (y[ends[0]] * k[ends[1]]).sum(1)
        y += 1
        torch.testing.assert_close(scores.val, before)


def test_transforms_and_compilers():
    ends, shape = places("random")
    q, k, v = (x.detach() for x in features(shape, 2, 3, torch.float64))
    adj = dglsp.spmatrix(ends, shape=shape)

    def attention(q):
        return dglsp.bspmm(dglsp.bsddmm(adj, q, k.transpose(1, 0)).softmax(), v).square().sum()

    wanted = torch.autograd.grad(dense_attention(ends, shape, q.requires_grad_(), k, v)[1].square().sum(), q)[
        0
    ]
    torch.testing.assert_close(torch.func.grad(attention)(q.detach()), wanted)
    compiled = torch.compile(attention, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(q), q)[0], wanted)


def test_a_matrix_made_in_every_step_has_one_graph():
    ends, shape = places("random")
    assert (
        dglsp.spmatrix(ends, shape=shape)._structure.graph
        is dglsp.spmatrix(ends, shape=shape)._structure.graph
    )
    before = dglsp.spmatrix(ends, shape=shape)
    ends[0, 0] = (ends[0, 0] + 1) % 9
    after = dglsp.spmatrix(ends, shape=shape)
    assert after._structure.graph is not before._structure.graph
    torch.testing.assert_close(after._structure.graph.edge_index.flip(0), ends)


def matrix(name="random", width=None, dtype=torch.float64):
    ends, shape = places(name)
    size = (ends.shape[1],) if width is None else (ends.shape[1], width)
    return dglsp.spmatrix(ends, torch.rand(size, dtype=dtype) + 0.5, shape=shape)


@pytest.mark.parametrize("width", [None, 3])
def test_arithmetic(width):
    a, same = matrix(width=width), matrix(width=width).coalesce()
    b = dglsp.val_like(a, torch.rand_like(a.val))
    dense, other = a.to_dense(), same.to_dense()
    torch.testing.assert_close((a + b).to_dense(), dense + b.to_dense())
    torch.testing.assert_close((a - same).to_dense(), dense - other)
    torch.testing.assert_close((a.coalesce() * same).to_dense(), dense * other)
    torch.testing.assert_close((2 * a / 4).to_dense(), dense / 2)
    torch.testing.assert_close((-a).to_dense(), -dense)
    torch.testing.assert_close((a * b).val, a.val * b.val)
    torch.testing.assert_close((a / b).val, a.val / b.val)
    torch.testing.assert_close((a**2).val, a.val**2)
    torch.testing.assert_close(a.T.to_dense(), dense.transpose(0, 1))
    torch.testing.assert_close(a.softmax(0).val, a.T.softmax(1).val)
    torch.testing.assert_close(
        a.softmax(1).sum(1)[a.row.unique()], torch.ones_like(a.val[: len(a.row.unique())])
    )
    row, col = torch.rand(9, 1).double(), torch.rand(7).double()
    spread = (lambda x: x) if width is None else (lambda x: x.unsqueeze(-1))
    torch.testing.assert_close(dglsp.sp_mul_v(a, col).to_dense(), dense * spread(col.view(1, -1)))
    torch.testing.assert_close(dglsp.sp_div_v(a, row).to_dense(), dense / spread(row))
    assert a.has_duplicate() and not same.has_duplicate() and same.nnz < a.nnz


@pytest.mark.parametrize("width", [None, 3])
def test_reductions(width):
    a = matrix("tall", width).coalesce()
    dense = a.to_dense()
    there = dglsp.val_like(a, torch.ones_like(a.val)).to_dense() > 0
    for dim in (0, 1):
        torch.testing.assert_close(a.sum(dim), dense.sum(dim))
        torch.testing.assert_close(a.smax(dim), dense.masked_fill(~there, -1).amax(dim).clamp(min=0))
        torch.testing.assert_close(a.smean(dim), dense.sum(dim) / there.sum(dim).clamp(min=1))
        assert dglsp.smin(a, dim).shape == a.smax(dim).shape == dglsp.sprod(a, dim).shape
    torch.testing.assert_close(dglsp.reduce(a), dense.sum((0, 1)))


def test_products_with_matrices():
    a, b = matrix(), matrix().T
    val = a.val.requires_grad_()
    a = dglsp.val_like(a, val)
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(a @ x, a.to_dense() @ x)
    assert torch.autograd.gradcheck(lambda val, x: dglsp.val_like(a, val) @ x, (val, x))
    with pytest.raises(ValueError, match="expected no entries at the same place"):
        a @ b
    dense = a.to_dense() @ b.to_dense()  # of the matrices as they were: coalesce() is differentiated, too
    product = a.coalesce() @ b.coalesce()
    torch.testing.assert_close(product.to_dense(), dense)
    found, wanted = (torch.autograd.grad(y.square().sum(), val)[0] for y in (product.val, dense))
    torch.testing.assert_close(found, wanted)
    ones = dglsp.spmatrix(places("random")[0], shape=(9, 7))
    torch.testing.assert_close(ones @ x.half(), (ones.to_dense().double() @ x).half(), rtol=2e-3, atol=2e-2)
    wide = matrix(width=2)
    y = torch.randn(7, 4, 2, dtype=torch.float64)
    torch.testing.assert_close(dglsp.bspmm(wide, y), torch.einsum("ijk,jnk->ink", wide.to_dense(), y))


def test_forms_of_matrices():
    a = matrix()
    dense = a.to_dense()
    indptr, indices, places_of = a.csr()
    torch.testing.assert_close(dglsp.from_csr(indptr, indices, a.val[places_of], a.shape).to_dense(), dense)
    indptr, indices, places_of = a.csc()
    torch.testing.assert_close(dglsp.from_csc(indptr, indices, a.val[places_of], a.shape).to_dense(), dense)
    torch.testing.assert_close(dglsp.to_torch_sparse_coo(a).to_dense(), dense)
    assert dglsp.identity((3, 4)).is_diag() and dglsp.diag(torch.ones(3, 2)).to_dense().shape == (3, 3, 2)
    torch.testing.assert_close(dglsp.inv(dglsp.diag(torch.tensor([2.0, 4]))).val, torch.tensor([0.5, 0.25]))
    assert a.float().dtype == torch.float32 and a.to(dtype=a.dtype) is a and a.nnz == 30
    assert "nnz=30" in repr(a) and torch.equal(torch.stack(a.coo()), a.indices())


@pytest.mark.parametrize("call, error, message", [
    (lambda a: dglsp.spmatrix(torch.tensor([[0, 9], [0, 0]]), shape=(9, 7)), ValueError, "shape is"),
    (lambda a: dglsp.spmatrix(torch.zeros(3, 2)), ValueError, r"indices: expected a tensor \[2, nnz\]"),
    (lambda a: dglsp.spmatrix(torch.zeros(2, 2)), TypeError, "indices of int32 or int64"),
    (lambda a: dglsp.from_coo(torch.tensor([0]), torch.tensor([0, 1])), ValueError, "col: expected 1 "),
    (lambda a: dglsp.from_csr(torch.tensor([0, 3, 2]), torch.tensor([0, 1])), ValueError, "indptr: "),
    (lambda a: dglsp.val_like(a, torch.ones(4)), ValueError, r"val: expected a tensor \[30\]"),
    (lambda a: dglsp.bsddmm(a, torch.ones(9, 3, 2), torch.ones(3, 6, 2)), ValueError, r"X2 \[M, 7, K\]"),
    (lambda a: dglsp.bsddmm(a, torch.ones(9, 3), torch.ones(3, 7, 2)), ValueError, "expected X1"),
    (lambda a: dglsp.sddmm(a, torch.ones(9, 3), torch.ones(3, 7).half()), TypeError, "like the first"),
    (lambda a: dglsp.sddmm(a, torch.ones(9, 3).long(), torch.ones(3, 7)), TypeError, "X1: expected float32"),
    (lambda a: dglsp.spmm(a, torch.ones(9, 3)), ValueError, r"X: expected shape \[7\]"),
    (lambda a: dglsp.spmm(torch.ones(3, 3), torch.ones(3)), TypeError, "A: expected a SparseMatrix"),
    (lambda a: dglsp.bspmm(matrix(width=2), torch.ones(7, 3, 4)), ValueError, "a last dimension of 2"),
    (lambda a: a.softmax(2), ValueError, "dim: expected 0 or 1"),
    (lambda a: a + matrix("tall"), ValueError, "two matrices of one shape"),
    (lambda a: a * matrix(), ValueError, "without entries at the same place"),
    (lambda a: dglsp.reduce(a, 0, "median"), ValueError, "rtype: expected one of"),
    (lambda a: a.compact(0), AttributeError, "no attribute 'compact' in dfgnn"),
])  # fmt: skip
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call(matrix())
