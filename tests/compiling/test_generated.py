"""Generated code: random expressions of gathered rows and tensors of edges as scores, values and weights."""

import os

import pytest
import torch
import torch.nn.functional as F
from comparing import check, gradients, rewriting
from covering import EXHAUSTIVE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written import GATHERS, SOFTMAXES, SUMS, Inputs, inputs

# Expressions [E, H, D], as functions of the inputs and of how rows are gathered.
LEAVES = {
    "q_i": lambda x, g: g(x.query, x.dst),
    "k_j": lambda x, g: g(x.key, x.src),
    "v_j": lambda x, g: g(x.value, x.src),
    "q_j of the sources": lambda x, g: g(x.key * 2, x.src),
    "e": lambda x, g: x.feat,
    "other e": lambda x, g: x.other_feat,
    "per head": lambda x, g: x.gate.unsqueeze(-1),
    "alike for all edges": lambda x, g: x.vector,
    "projected": lambda x, g: F.linear(x.attr, x.weight).view(x.feat.shape),
}
BINARY = {"+": torch.add, "-": torch.sub, "*": torch.mul}
UNARY = {
    "leaky_relu": lambda t: F.leaky_relu(t, 0.2), "tanh": torch.tanh, "half": lambda t: t / 2,
    "there and back": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "flat and back": lambda t: (
        t.reshape(t.shape[0], -1).view(t.shape)
    ), "detached": torch.Tensor.detach, "clone": torch.clone,
}  # fmt: skip


def trees(depth: int = 3):
    leaf = st.sampled_from(sorted(LEAVES)).map(lambda name: (name,))
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(sorted(BINARY)), inner, inner),
            st.tuples(st.sampled_from(sorted(UNARY)), inner),
        ),
        max_leaves=depth,
    )


def compute(tree, x: Inputs, gather):
    name, *inner = tree
    if name in LEAVES:
        return LEAVES[name](x, gather)
    parts = [compute(part, x, gather) for part in inner]
    return BINARY[name](*parts) if name in BINARY else UNARY[name](*parts)


SCALES = {
    "sum": lambda t: t.sum(-1) / 3, "sum, kept": lambda t: t.sum(-1, keepdim=True).squeeze(-1),
    "mean": lambda t: t.mean(-1), "first": lambda t: t[..., 0],
}  # fmt: skip


@st.composite
def attentions(draw):
    """(what was drawn, a function of inputs)."""
    score, value, more = draw(trees()), draw(trees()), draw(st.none() | trees(2))
    names = [draw(st.sampled_from(sorted(table))) for table in (GATHERS, SOFTMAXES, SUMS, SCALES)]
    after = draw(st.sampled_from(["", "weights returned", "flat", "heads moved"]))

    def fn(*tensors):
        x = Inputs(*tensors)
        gather, softmax, total, scale = (
            table[name] for table, name in zip((GATHERS, SOFTMAXES, SUMS, SCALES), names)
        )
        n = len(x.query)
        scores = scale(compute(score, x, gather).expand(x.feat.shape)).clamp(-20, 20)
        weights = softmax(scores + 0 * x.bias, x.dst, n)
        messages = weights.unsqueeze(-1) * compute(value, x, gather)
        if more is not None:
            messages = messages * compute(more, x, gather)
        messages = messages.flatten(1) if after == "flat" else messages
        messages = messages.transpose(1, 2) if after == "heads moved" else messages
        out = total(messages.contiguous() if after else messages, x.dst, n)
        return (out, weights) if after == "weights returned" else out

    return (score, value, more, names, after), fn


@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=int(os.environ.get("DFGNN_GENERATED", 150 if EXHAUSTIVE else 8)),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(drawn=attentions())
def test_generated(device, drawn):
    """Against the code as it is, in float64, with gradients, static and then symbolic sizes."""
    _, fn = drawn
    torch._dynamo.reset()
    reports: list = []
    compiled = torch.compile(fn, backend=rewriting(reports))
    for k, sizes in enumerate(((6, 6, 20), (9, 9, 14))):
        x = inputs(*sizes, seed=k, device=device)
        check(gradients(compiled, x), gradients(fn, x), 1e-8)
    assert all(report.rewritten for report in reports), reports
