"""Attention within padded batches, written with torch's own operations: the compiled model compared with the
plain one."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from comparing import rewriting
from torch import nn

HEADS, WIDTH = 2, 8


def batches(sizes, longest):
    """x [B, L, E], and which rows hold something [B, L]."""
    torch.manual_seed(0)
    mask = torch.arange(longest) < torch.tensor(sizes).unsqueeze(1)
    return torch.randn(len(sizes), longest, WIDTH, dtype=torch.float64), mask


class Module(nn.Module):
    """torch's module, as GraphGPS calls it."""

    def __init__(self, batch_first=True, **options):
        super().__init__()
        self.attn = nn.MultiheadAttention(
            WIDTH, HEADS, batch_first=batch_first, dtype=torch.float64, **options
        )

    def forward(self, x, mask):
        rows = x if self.attn.batch_first else x.transpose(0, 1)
        out = self.attn(rows, rows, rows, key_padding_mask=~mask)[0]
        return out if self.attn.batch_first else out.transpose(0, 1)


class Across(Module):
    """Other keys than queries, and a mask of numbers that are learned."""

    def __init__(self):
        super().__init__(bias=False)
        self.tilt = nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, x, mask):
        seen = self.tilt.expand(mask.shape).masked_fill(~mask, -math.inf)
        return self.attn(x[:, :4].tanh(), x, x.sin(), key_padding_mask=seen, need_weights=False)[0]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.0, batch_first=True, dtype=torch.float64)

    def forward(self, x, mask):
        return self.layer(x, src_key_padding_mask=~mask)


class Heads(nn.Module):
    """Projections and heads of the model's own around the function."""

    def __init__(self, numbers=False, **options):
        super().__init__()
        self.rows, self.numbers, self.options = (
            nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64),
            numbers,
            options,
        )

    def forward(self, x, mask):
        query, key, value = self.rows(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = mask[:, None, None]
        if self.numbers:
            seen = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, -math.inf)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, **self.options)
        return out.transpose(1, 2).flatten(2)


MODELS = {
    "module": Module,
    "rows first": lambda: Module(False),
    "other keys": Across,
    "layer": Layer,
    "heads": Heads,
    "numbers, scaled": lambda: Heads(True, scale=0.3),
}


def results(model, function, x, mask):
    x = x.clone().requires_grad_()
    out = function(x, mask)
    inputs = [x, *model.parameters()]
    return [
        out.detach(),
        *torch.autograd.grad(out.sin().sum(), inputs, allow_unused=True, materialize_grads=True),
    ]


@pytest.mark.parametrize("name", MODELS)
def test_same_as_theirs(name, device):
    """Results are the same at all rows, padding included, and for another batch with symbolic sizes."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model, reports = MODELS[name]().to(device), []
    compiled = torch.compile(model, backend=rewriting(reports), fullgraph=True)
    for sizes, longest in (([3, 6, 1], 6), ([5, 2, 6, 6, 1], 6), ([2, 7], 7))[
        : 2 if name == "other keys" else 3
    ]:
        x, mask = (t.to(device) for t in batches(sizes, longest))
        torch.testing.assert_close(results(model, compiled, x, mask), results(model, model, x, mask))
    assert [f.form for report in reports for f in report.found] == ["block_attention"] * len(reports)


def test_keys_anywhere_and_none():
    """A mask that is no beginning; a sequence without keys, whose rows are 0 before the last projection."""
    torch._dynamo.reset()
    model = Module()
    x, mask = batches([4, 6, 0], 6)
    mask[0] = torch.tensor([False, True, False, False, True, False])
    found = torch.compile(model, backend=rewriting([]), fullgraph=True)(x, mask)
    torch.testing.assert_close(found[:2], model(x, mask)[:2])
    torch.testing.assert_close(found[2], model.attn.out_proj.bias.expand(6, -1))


def test_autocast():
    torch._dynamo.reset()
    for name in ("module", "heads"):
        model, reports = MODELS[name]().float(), []
        x, mask = batches([3, 6, 1], 6)
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.compile(model, backend=rewriting(reports))(x.float(), mask)
            right = model(x.float(), mask)
        assert found.dtype == right.dtype and reports[-1].rewritten
        torch.testing.assert_close(found, right, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Module(dropout=0.5), "its weights have dropout"),
        (Module(add_bias_kv=True), "it has bias_k"),
        (Module(add_zero_attn=True), "it has add_zero_attn"),
        (Module(kdim=WIDTH, vdim=4), "it has use_separate_proj_weight"),
        (Heads(dropout_p=0.5), "its weights have dropout"),
    ],
)
def test_what_is_left(model, reason):
    torch._dynamo.reset()
    reports = []
    x, mask = batches([3, 6], 6)
    if model.__class__ is Module and model.attn.vdim == 4:
        attn = model.attn
        model = lambda x, mask: attn(x, x, x[..., :4], key_padding_mask=~mask)[0]  # noqa: E731
    torch.compile(model, backend=rewriting(reports))(x, mask)
    assert [f.reason for report in reports for f in report.refused] == [reason]
    assert not any(report.rewritten for report in reports)


def test_weights_and_masks_of_pairs_are_left():
    torch._dynamo.reset()
    attn, reports = Module().attn, []
    x, mask = batches([3, 6], 6)
    for call, reason in (
        (lambda x, mask: attn(x, x, x, key_padding_mask=~mask), "its weights are asked for"),
        (
            lambda x, mask: attn(x, x, x, key_padding_mask=~mask, attn_mask=torch.eye(6, dtype=torch.bool))[
                0
            ],
            "it has a mask of pairs",
        ),
    ):
        reports.clear()
        found = torch.compile(call, backend=rewriting(reports))(x, mask)
        torch.testing.assert_close(found, copy.copy(call)(x, mask))
        assert [f.reason for report in reports for f in report.refused] == [reason]
    reports.clear()
    torch.compile(lambda x, mask: attn(x, x, x)[0], backend=rewriting(reports))(x, mask)
    assert not any(report.found for report in reports)  # without a mask there is nothing to gain
