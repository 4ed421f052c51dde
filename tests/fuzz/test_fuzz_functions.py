"""Every function on drawn graphs, shapes, dtypes, options and memory layouts, against the float64 oracle."""

import pytest
from corpus import FUNCTIONS, cases
from criterion import TRANSFORMS, check
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("function", FUNCTIONS)
def test_agrees_with_the_reference(device, function):
    @settings(max_examples=settings.default.max_examples)
    @given(cases(functions=(function,)), st.sampled_from(TRANSFORMS))
    def drawn(case, transform):
        check(*case, transform, device)

    drawn()


@pytest.mark.parametrize("function", ["gat_attention", "gatv2_attention", "dot_attention", "edge_softmax"])
def test_scores_far_from_zero(device, function):
    """A softmax does not see a shift; scores masked by hand, with -inf or a large number, weigh nothing."""

    @settings(max_examples=settings.default.max_examples // 2)
    @given(cases(functions=(function,), extremes=True))
    def drawn(case):
        check(*case, device=device)

    drawn()
