"""dfgnn.run's stand-in for x[index]: results, gradients, what is left to PyTorch."""

import pytest
import torch
from torch import Tensor

from dfgnn.capturing.padding import KnownValues, Padding
from dfgnn.run import indexing
from dfgnn.switch.pieces import served

NAME = "torch.Tensor.__getitem__"


@pytest.fixture
def installed():
    indexing.install()
    yield
    indexing.remove()
    assert "__getitem__" not in vars(Tensor)


def compare(x, index, serves):
    """Rows, and gradients in float64, by the stand-in and by PyTorch's operation."""
    before, rows = served[NAME], x[index]
    assert served[NAME] - before == serves
    want = x.detach().clone().requires_grad_(x.requires_grad)
    expected = indexing.getitem.__wrapped__(want, index)
    assert torch.equal(rows, expected)
    if x.requires_grad:
        for grad in (torch.randn_like(rows), torch.randn(1, device=x.device, dtype=x.dtype).expand_as(rows)):
            (got,) = torch.autograd.grad(rows, x, grad, retain_graph=True)
            exact = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
            exact.index_put_((index,), grad.double(), accumulate=True)
            torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(50, 33), (7, 3, 11), (900, 300), (1, 64)])
@pytest.mark.parametrize("trains", [True, False])
def test_rows(installed, dtype, shape, trains):
    x = torch.randn(shape, dtype=dtype, requires_grad=trains)
    compare(x, torch.randint(shape[0], (4000,)), 1)
    compare(x, torch.randint(shape[0], (8000,))[::2], 1)


@pytest.mark.parametrize(
    ("x", "index"),
    [
        (torch.randn(50, 64), torch.randint(50, (40,))),
        (torch.randn(50, 64), torch.randint(-50, 50, (4000,))),
        (torch.randn(64, 50).t(), torch.randint(50, (4000,))),
        (torch.randn(50, 64).half(), torch.randint(50, (4000,))),
        (torch.randint(9, (50, 64)), torch.randint(50, (4000,))),
        (torch.randn(50), torch.randint(50, (40_000,))),
        (torch.randn(50, 64), torch.randint(50, (4000, 2))),
        (torch.randn(50, 64), torch.randint(50, (4000,)).int()),
        (torch.randn(50, 64), torch.rand(50) < 0.5),
        (torch.randn(50, 64), 3),
        (torch.randn(50, 64), (slice(3), None)),
    ],
)
def test_other_calls_are_pytorchs(installed, x, index):
    compare(x, index, 0)


def test_errors_and_tools_are_pytorchs(installed):
    x, index = torch.randn(50, 64, requires_grad=True), torch.randint(50, (4000,))
    with pytest.raises(IndexError, match="index 50 is out of bounds for dimension 0 with size 50"):
        x[torch.full((4000,), 50)]
    compiled = torch.compile(lambda x: x[index].sin(), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x[index].sin())
    torch.testing.assert_close(
        torch.func.grad(lambda x: x[index].sum())(x), torch.autograd.grad(x[index].sum(), x)[0]
    )
    torch.testing.assert_close(torch.func.vmap(lambda x: x[index])(x[None]), x[index][None])


def test_a_captured_step_knows_masks(installed):
    mask, known = torch.rand(50) < 0.5, KnownValues()
    x, places = torch.randn(50, 2), known.places_of(mask)
    with Padding({}, [], known):
        assert torch.equal(x[mask], x.index_select(0, places))
        mask.logical_not_()  # known from before
        assert torch.equal(x[mask], x.index_select(0, places))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("edges", [1, 1023, 5000])
@pytest.mark.parametrize("shape", [(9, 4, 7), (1, 3), (64, 33)])
def test_sums_of_a_table(dtype, edges, shape):
    grad, index = torch.randn(edges, *shape[1:], dtype=dtype), torch.randint(-shape[0], shape[0], (edges,))
    exact = torch.zeros(shape, dtype=torch.float64).index_put_((index,), grad.double(), accumulate=True)
    got = indexing.table_sums(grad, index, shape[0])
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_stays_in_its_row(value):
    grad, index = torch.randn(5000, 3), torch.randint(7, (5000,))
    grad[17, 1] = value
    exact = torch.zeros(7, 3).index_put_((index,), grad, accumulate=True)
    got = indexing.table_sums(grad, index, 7)
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert got.isfinite().sum() == got.numel() - 1


@pytest.mark.gpu
def test_a_table_on_a_gpu(installed):
    x = torch.randn(9, 64, device="cuda", requires_grad=True)
    compare(x, torch.randint(-9, 9, (20_000,), device="cuda"), 1)
    index = torch.randint(9, (20_000,), device="cuda")
    sums = [torch.autograd.grad(x[index].sin().sum(), x)[0] for _ in range(2)]
    assert torch.equal(*sums)
    compare(x, index[:2000], 0)
    compare(torch.randn(900, 64, device="cuda", requires_grad=True), index, 0)
