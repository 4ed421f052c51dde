"""Sums of rows by an index in PyTorch's place."""

import pytest
import torch
from torch import nn

import dfgnn
from dfgnn.run import index_sums
from dfgnn.run.index_sums import OnCpu, OnGpu

N = 30
INDICES = {
    "random": lambda e: torch.randint(0, N, (e,)),
    "from_the_end": lambda e: torch.randint(-N, N, (e,)),
    "super_node": lambda e: torch.where(torch.rand(e) < 0.9, 7, torch.arange(e) % N),
    "every_second": lambda e: torch.randint(0, N, (2 * e,))[::2],
}
# Operations of x [N, ...] and rows [E, ...].
OPERATIONS = {
    "getitem": lambda x, rows, index: x[index] * rows,
    "index_select": lambda x, rows, index: x.index_select(0, index) * rows,
    "gather": lambda x, rows, index: x.gather(0, _columns(index, rows)) * rows,
    "index_add": lambda x, rows, index: x.index_add(0, index, rows),
    "index_add_": lambda x, rows, index: x.clone().index_add_(-x.dim(), index, rows),
    "scaled": lambda x, rows, index: x.index_add(0, index, rows, alpha=3),
    "scatter_add": lambda x, rows, index: x.scatter_add(0, _columns(index, rows), rows),
    "scatter_add_": lambda x, rows, index: x.clone().scatter_add_(0, _columns(index, rows), rows),
    "index_put": lambda x, rows, index: x.index_put((index,), rows, accumulate=True),
    "second_index": lambda x, rows, index: x[:, index % x.shape[1]] if x.dim() > 1 else x[index],
}
FROM_THE_END = ("getitem", "index_put", "second_index")


def _columns(index, rows):
    return index.view(-1, *[1] * (rows.dim() - 1)).expand(rows.shape)


def made(kind, device="cpu"):
    """Sums of which none is too small."""
    sums = kind()
    sums.device_type = device
    sums.least = sums.least_of_constant = dict.fromkeys(sums.least, (1, 1))
    return sums


KINDS = {"cpu": [OnCpu, OnGpu], "cuda": [OnGpu]}


@pytest.fixture(params=[0, 1], ids=["first", "second"])
def sums(request, device):
    """What is for a GPU is tried on the CPU, too."""
    if request.param >= len(KINDS[device]):
        pytest.skip("on the CPU alone")
    return made(KINDS[device][request.param], device)


def results(operation, index, shape, dtype, device, times=18):
    torch.manual_seed(0)
    x = torch.randn(N, *shape).to(device, dtype).requires_grad_()
    rows = torch.randn(len(index), *shape).to(device, dtype).requires_grad_()
    found = []
    for _ in range(times):
        out = OPERATIONS[operation](x, rows, index)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        found += [out, grad, *torch.autograd.grad(grad.square().sum(), (x, rows), allow_unused=True)]
    return [torch.zeros(1) if y is None else y.detach() for y in found]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5)], ids=str)
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_sums_are_pytorchs(sums, device, operation, index, shape):
    """Also gradients, twice, and in place."""
    if index == "from_the_end" and operation not in FROM_THE_END:
        pytest.skip("PyTorch does not count from the end here")
    torch.manual_seed(1)
    index = INDICES[index](200).to(device)
    wanted = results(operation, index, shape, torch.float64, device)
    with sums.installed():
        found = results(operation, index, shape, torch.float64, device)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_precision(sums, device, dtype):
    """Each sum is rounded once, where sums in 16 bits stop at 256 and 2,048 otherwise."""
    index = torch.zeros(5000, dtype=torch.int64, device=device)
    rows = torch.ones(5000, 4, dtype=dtype, device=device)
    with sums.installed():
        for _ in range(18):
            out = torch.zeros(3, 4, dtype=dtype, device=device).index_add_(0, index, rows)
    if dtype in sums.dtypes:
        assert sums.count
        torch.testing.assert_close(out[0], torch.full_like(out[0], 5000), rtol=4e-3, atol=0)
    assert not out[1:].any()


@pytest.mark.parametrize("rows", [1, 9, 64])
def test_gradients_of_tables_whose_index_is_new(device, rows):
    sums = made(OnGpu, device)
    sums.rows_of_table = 3
    x = torch.randn(rows, 5, dtype=torch.float64).to(device).requires_grad_()
    index = torch.randint(-rows, rows, (1000,)).to(device)
    factors = torch.randn(1000, 5, dtype=torch.float64).to(device)
    (wanted,) = torch.autograd.grad((x[index] * factors).sum(), x)
    with sums.installed():
        (found,) = torch.autograd.grad((x[index] * factors).sum(), x)
        assert sums.count == 1
        for bad in (rows, -rows - 1) if device == "cpu" else ():
            index[17] = bad
            with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
                x.detach().index_put((index,), factors, accumulate=True)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_row(sums, device, value):
    index, rows = torch.randint(N, (5000,)).to(device), torch.randn(5000, 3, device=device)
    rows[17, 1] = value
    wanted = torch.zeros(N, 3, device=device).index_add(0, index, rows)
    with sums.installed():
        for _ in range(18):
            found = torch.zeros(N, 3, device=device).index_add(0, index, rows)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert found.isfinite().sum() == found.numel() - 1


def test_are_computed_here(sums, device):
    index = torch.arange(200, device=device) % N
    with sums.installed():
        for _ in range(18):
            torch.ones(N, 4, device=device).index_add_(0, index, torch.ones(200, 4, device=device))
    assert sums.count >= 2
    count = sums.count
    torch.ones(N, 4, device=device).index_add_(0, index, torch.ones(200, 4, device=device))
    assert sums.count == count


def test_an_index_that_is_modified(sums, device):
    index = torch.arange(200, device=device) % N
    rows = torch.randn(200, 4, dtype=torch.float64, device=device)
    with sums.installed():
        for k in range(100):
            if k % 40 == 39:
                index.copy_(torch.randint(0, N, (200,)))
            wanted = nn.functional.one_hot(index, N).to(rows).T @ rows
            found = rows.new_zeros(N, 4).index_add_(0, index, rows)
            torch.testing.assert_close(found, wanted)


def test_new_indices_at_the_same_address(sums, device):
    """Of an index nothing is left when its memory is used again."""
    rows = torch.randn(200, 4, dtype=torch.float64, device=device)
    with sums.installed():
        for _ in range(100):
            index = torch.randint(0, N, (200,)).to(device)
            wanted = nn.functional.one_hot(index, N).to(rows).T @ rows
            for _ in range(18):
                found = rows.new_zeros(N, 4).index_add_(0, index, rows)
            torch.testing.assert_close(found, wanted)
            del index
    assert sums.count >= 100


@pytest.mark.parametrize("bad", [N, -N - 1], ids=["too_large", "too_small"])
def test_an_index_out_of_range(bad):
    """PyTorch's own error."""
    index = torch.arange(200) % N
    index[100] = bad
    x = torch.randn(N, 4)
    with made(OnCpu).installed():
        for _ in range(18):
            with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
                x.index_put((index,), torch.ones(200, 4), accumulate=True)


def test_of_empty_tensors(sums, device):
    index = torch.zeros(0, dtype=torch.int64, device=device)
    with sums.installed():
        for _ in range(18):
            out = torch.ones(0, 4, device=device).index_add_(0, index, torch.ones(0, 4, device=device))
            assert out.shape == (0, 4)


def test_only_what_can_run_is_installed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for cpu, gpu in ((True, True), (True, False), (False, False)):
        monkeypatch.setattr(index_sums.library, "compiled", cpu)
        monkeypatch.setattr(index_sums.library, "has_cuda_library", lambda gpu=gpu: gpu)
        assert index_sums.of_this_machine() == [index_sums.on_cpu] * cpu + [index_sums.on_gpu] * gpu
    monkeypatch.setattr(index_sums.library, "has_cuda_library", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert index_sums.on_gpu not in index_sums.of_this_machine()


@pytest.mark.gpu
def test_captured_steps_take_constant_indices_alone():
    """One that the step computes from its parameters is summed by PyTorch. Losses are those of eager
    steps."""
    sums = made(OnGpu, "cuda")
    sums.before = 1000
    for varies in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(N, 8).cuda()
        given = torch.randint(0, N, (500,), device="cuda")

        def loss(varies=varies, table=table, given=given):
            index = given
            if varies:
                index = (given + (table.weight[0, 0] * 100).long()).remainder(N)
            return (table.weight[index] - 1).square().sum() + table.weight.sin()[index].sum()

        losses = []
        for how in ("eager", "captured"):
            torch.manual_seed(1)
            nn.init.normal_(table.weight)
            optimizer = torch.optim.SGD(table.parameters(), lr=0.05)
            step = dfgnn.capture(loss, table, optimizer) if how == "captured" else None
            count = sums.count
            for _ in range(12):
                if step is not None:
                    with sums.installed():
                        losses.append(step().item())
                    continue
                optimizer.zero_grad()
                out = loss()
                out.backward()
                optimizer.step()
                losses.append(out.item())
            assert (sums.count > count) == (how == "captured" and not varies)
        torch.testing.assert_close(losses[12:], losses[:12], rtol=1e-4, atol=1e-4)
