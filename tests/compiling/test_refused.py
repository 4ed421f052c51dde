"""What looks like attention and is not, or not only: never another number, and it is told."""

import pytest
import torch
import torch.nn.functional as F
from comparing import check, gradients, rewriting
from written import GATHERS, SCORES, Inputs, inputs, of_tensors

_g = GATHERS["x[i]"]
_dot = SCORES["dot"][0]


def _sum(x, i, n):
    return x.new_zeros(n, *x.shape[1:]).index_add(0, i, x)


def _softmax(s, i, n, eps=0.0, denominator=None):
    most = s.new_full((n, s.shape[1]), float("-inf")).scatter_reduce(
        0, i[:, None].expand_as(s), s.detach(), "amax"
    )
    e = (s - most[i]).exp()
    return e / (_sum(e if denominator is None else denominator(e), i, n) + eps)[i]


def _messages(a, x):
    return a.unsqueeze(-1) * x.value[x.src]


def _out(a, x):
    return _sum(_messages(a, x), x.dst, len(x.query))


def denominator_without_gradient(x):
    return _out(_softmax(_dot(x, _g), x.dst, len(x.query), denominator=torch.Tensor.detach), x)


def masked_denominator(x):
    return _out(_softmax(_dot(x, _g), x.dst, len(x.query), denominator=lambda e: e * x.gate.sigmoid()), x)


def large_eps(x):
    return _out(_softmax(_dot(x, _g), x.dst, len(x.query), eps=1e-3), x)


def clamped_sum(x):
    n, e = len(x.query), x.bias.exp()
    return _out(e / _sum(e, x.dst, n).clamp(min=3)[x.dst], x)


def clamped_behind_the_maximum(x):
    n = len(x.query)
    most = x.bias.new_full((n, x.bias.shape[1]), float("-inf")).scatter_reduce(
        0, x.dst[:, None].expand_as(x.bias), x.bias, "amax"
    )
    e = (x.bias - most[x.dst]).exp()
    return _out(e / _sum(e, x.dst, n).clamp_min(1e-6)[x.dst], x)


def by_another_index(x):
    """The softmax over what leaves a node, the sum over what enters one."""
    return _out(_softmax(_dot(x, _g), x.src, len(x.key)), x)


def more_rows_than_segments(x):
    n = len(x.query)
    return _sum(_messages(_softmax(_dot(x, _g), x.dst, n), x), x.dst, n + 3)


def scores_under_no_grad(x):
    with torch.no_grad():
        score = _dot(x, _g)
    return _out(_softmax(score, x.dst, len(x.query)), x)


def terms_under_no_grad(x):
    with torch.no_grad():
        product = x.query[x.dst] * x.key[x.src]
    return _out(_softmax(product.sum(-1), x.dst, len(x.query)), x)


def softmax_under_no_grad(x):
    with torch.no_grad():
        a = _softmax(_dot(x, _g), x.dst, len(x.query))
    return _out(a, x)


def exponentials_under_no_grad(x):
    score = _dot(x, _g)
    with torch.no_grad():
        total = _sum(score.exp(), x.dst, len(x.query))
    return _out(score.exp() / total[x.dst], x)


def weights_detached(x):
    return _out(_softmax(_dot(x, _g), x.dst, len(x.query)).detach(), x)


def values_detached(x):
    a = _softmax(_dot(x, _g), x.dst, len(x.query))
    return _sum(a.unsqueeze(-1) * x.value.detach()[x.src], x.dst, len(x.query))


def gathered_detached(x):
    a = _softmax(_dot(x, _g), x.dst, len(x.query))
    return _sum(a.unsqueeze(-1) * x.value[x.src].detach(), x.dst, len(x.query))


def score_changed_afterwards(x):
    score = _dot(x, _g) + 0
    a = _softmax(score.detach(), x.dst, len(x.query))
    score.detach().mul_(3)
    return _out(a, x), score.detach() * 1


def values_changed_between(x):
    value = x.value.detach().clone()
    view = value[:, 0]
    gathered = value[x.src]
    view.mul_(2)
    a = _softmax(_dot(x, _g), x.dst, len(x.query))
    return _sum(a.unsqueeze(-1) * gathered, x.dst, len(x.query)), value * 1


def sum_changed_through_a_view(x):
    out = _out(_softmax(_dot(x, _g), x.dst, len(x.query)), x)
    first, rest = out[:, :1], out[:, 1:]
    first += x.vector[:, :1]
    rest.mul_(2)
    return out * 1, first


def index_changed_between(x):
    index, given = x.dst.clone(), x.query * 1
    x = Inputs(*(t.detach() for t in x))
    first = index[:]
    a = _softmax(_dot(x, _g), first, len(x.query))
    index.zero_()
    return _sum(_messages(a, x), first, len(x.query)) + given


def weights_changed(x):
    a = _softmax(_dot(x, _g), x.dst, len(x.query)).detach().clone()
    a[0] = 0
    return _out(a, x)


def weights_in_place(x):
    a = _softmax(x.bias * 2, x.dst, len(x.query))
    b = a * 1
    b *= x.gate.detach()
    b += 1
    return _out(b, x)


def nonlinear_weights(x):
    return _out(_softmax(_dot(x, _g), x.dst, len(x.query)).square(), x)


def entropy(x):
    a = _softmax(_dot(x, _g), x.dst, len(x.query))
    return _out(a, x), -(a * (a + 1e-12).log()).sum()


def maximum_of_another_score(x):
    """Any number that is alike for a segment cancels."""
    n = len(x.query)
    most = x.gate.new_zeros(n, x.gate.shape[1]).index_add(0, x.dst, x.gate)
    e = (x.bias - most[x.dst]).exp()
    return _out(e / _sum(e, x.dst, n)[x.dst], x)


def not_the_maximum_with_eps(x):
    n = len(x.query)
    most = x.gate.new_zeros(n, x.gate.shape[1]).index_add(0, x.dst, x.gate)
    e = (x.bias - most[x.dst]).exp()
    return _out(e / (_sum(e, x.dst, n) + 0.1)[x.dst], x)


def exponentials_gated(x):
    n = len(x.query)
    e = x.bias.exp() * x.gate.sigmoid()
    return _out(e / _sum(e, x.dst, n)[x.dst], x)


def of_both_ends_alike(x):
    """Rows of destinations as values."""
    a = _softmax(x.bias, x.dst, len(x.query))
    return _sum(a.unsqueeze(-1) * x.query[x.dst], x.dst, len(x.query))


def activation_in_place_of_softmax(x):
    weights = F.silu(_dot(x, _g)) * x.gate
    return _out(weights, x)


def squared_weights(x):
    a = _softmax(_dot(x, _g), x.dst, len(x.query)).unsqueeze(-1)
    return _sum(a * a * x.value[x.src], x.dst, len(x.query))


def fewer_keys_than_values(x):
    key, src = x.key[: len(x.key) // 2 + 1], x.src % (len(x.key) // 2 + 1)
    score = (x.query[x.dst] * key[src]).sum(-1)
    return _sum(_softmax(score, x.dst, len(x.query)).unsqueeze(-1) * x.value[src], x.dst, len(x.query))


#: What is refused, with a part of the reason, or None where something is rewritten or nothing is found.
FUNCTIONS = {
    denominator_without_gradient: "what divides", masked_denominator: "what divides",
    large_eps: "0.001 is added", clamped_sum: "clamped to 3",
    by_another_index: None, more_rows_than_segments: None, scores_under_no_grad: None,
    terms_under_no_grad: None, softmax_under_no_grad: None, exponentials_under_no_grad: "under no_grad",
    weights_detached: None, values_detached: None, gathered_detached: None, score_changed_afterwards: None,
    values_changed_between: None, index_changed_between: None,
    sum_changed_through_a_view: None, weights_changed: None, weights_in_place: None,
    nonlinear_weights: None, entropy: None, maximum_of_another_score: None, not_the_maximum_with_eps: None,
    exponentials_gated: None, squared_weights: None, fewer_keys_than_values: None,
    clamped_behind_the_maximum: None,
    of_both_ends_alike: None, activation_in_place_of_softmax: None,
}  # fmt: skip


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_same_numbers(fn, device):
    torch._dynamo.reset()
    reports: list = []
    call = of_tensors(fn)
    compiled = torch.compile(call, backend=rewriting(reports), dynamic=False)
    x = inputs(9, 9, 40, device=device)
    check(gradients(compiled, x), gradients(call, x))
    reason = FUNCTIONS[fn]
    if reason is not None:
        assert any(reason in found.reason for report in reports for found in report.refused), reports
        assert all(found.place.file == __file__ for report in reports for found in report.refused)
