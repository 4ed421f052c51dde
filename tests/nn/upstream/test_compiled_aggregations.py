"""SoftmaxAggregation and AttentionalAggregation of many rows in 16 bits, compiled: as exact as eager."""

import pytest
import torch
from of_pyg import torch_geometric  # noqa: F401  # skips without it

from dfgnn.nn import pyg

ROWS = 5000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("by", ["index", "ptr"])
@pytest.mark.parametrize("kind", ["softmax", "gate", "gates"])
def test_sums_in_16_bits(kind, by, dtype):
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
    index = torch.arange(ROWS) * 3 // ROWS
    gate = torch.nn.Linear(4, 1 if kind == "gate" else 4)
    module = pyg.SoftmaxAggregation() if kind == "softmax" else pyg.AttentionalAggregation(gate)
    module = module.to(dtype)
    x = x.to(dtype)
    options = (
        {"index": index, "dim_size": 3} if by == "index" else {"ptr": torch.tensor([0, 1667, 3334, ROWS])}
    )
    torch._dynamo.reset()
    got = torch.compile(lambda x: module(x, **options), backend="aot_eager", fullgraph=True)(x)
    score = (x if kind == "softmax" else module.gate_nn(x)).double()
    right = torch.stack([(score[index == k].softmax(0) * x[index == k].double()).sum(0) for k in range(3)])
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), right, rtol=0, atol=4 * torch.finfo(dtype).eps)
