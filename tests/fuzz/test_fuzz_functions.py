"""Every function on drawn graphs, shapes, dtypes, options and memory layouts, against the float64 oracle."""

import pytest
import torch
from corpus import FUNCTIONS, Call, GraphSpec, cases
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


@pytest.mark.parametrize("seed", range(3))
def test_equal_edges(device, seed):
    """4,500 equal edges from one node to itself: by theory their scores have the gradient 0. A rounding error
    is left even in the float64 oracle, and the criterion must allow for it."""
    shapes = {"key": (1, 1, 300), "query": (1, 1, 300), "att": (1, 300)}
    tensors = {name: (shape, "contiguous") for name, shape in shapes.items()}
    call = Call("gatv2_attention", torch.float64, tensors, seed=seed)
    check(GraphSpec("super_row", 1, 1), call, device=device)


def test_a_bias_beside_small_weights(device):
    """All edges have the weight -0.009, and the bias is most of the output: found on a GPU."""
    shapes = {name: (10, 8, 7) for name in ("key", "query")} | {name: (8, 7) for name in ("att", "out_bias")}
    shapes |= {"bias": (120, 8), "gate": (120,), "edge_key": (120, 8, 7)}
    tensors = {name: (shape, "contiguous") for name, shape in shapes.items()}
    tensors["weight"] = (120,), "expanded"
    options = {"negative_slope": 0.2, "return_attention": True}
    call = Call("gatv2_attention", torch.float32, tensors, options=options, seed=39)
    check(GraphSpec("power_law", 10, 10), call, device=device)


@pytest.mark.parametrize("function", ["gat_attention", "gatv2_attention", "dot_attention", "edge_softmax"])
def test_scores_far_from_zero(device, function):
    """A softmax does not see a shift; scores masked by hand, with -inf or a large number, weigh nothing."""

    @settings(max_examples=settings.default.max_examples // 2)
    @given(cases(functions=(function,), extremes=True))
    def drawn(case):
        check(*case, device=device)

    drawn()
