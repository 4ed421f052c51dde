"""Options are stated once, in `dfgnn.runtime.attention_options`: signatures, documentation and errors come of
it."""

import inspect
from typing import Annotated

import pytest
import torch
from graphs import make_graph

from dfgnn import functional, reference
from dfgnn.runtime.attention_options import EdgeOptions, Option, public, table

FUNCTIONS = [name for name in functional.__all__ if name[0].islower()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures(name):
    """The reference has the same parameters and defaults; there are at most 14."""
    ours, plain = (inspect.signature(getattr(m, name)).parameters for m in (functional, reference))
    assert ours.keys() == plain.keys() and len(ours) <= 14
    assert all(ours[n].default == plain[n].default for n in ours)


def test_documentation_says_what_each_option_means():
    for name in ("gat_attention", "gatv2_attention", "dot_attention"):
        text = getattr(functional, name).__doc__
        assert "{options}" not in text
        assert all(f"\n        {option}: " in text for option in table(EdgeOptions))


def test_an_option_is_added_in_one_place():
    class More(EdgeOptions, total=False):
        tilt: Annotated[float, Option(0.5, "a number that tilts the scores.")]

    @public(More)
    def attention(graph, query, **options):
        """Attention.

        Args:
        {options}
        """
        return options

    parameters = inspect.signature(attention).parameters
    assert parameters["tilt"].default == 0.5 and {*table(EdgeOptions)} < {*parameters}
    assert "        tilt: a number that tilts the scores." in attention.__doc__
    assert attention(None, None, tilt=2.0) == {"tilt": 2.0}
    with pytest.raises(TypeError, match="attention: tild: expected one of .*; did you mean tilt?"):
        attention(None, None, tild=2.0)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("gat_attention", "edge_attr", "edge=EdgeTerm"),
        ("agnn_attention", "edge_attr", "dot_attention has"),
        ("dot_attention", "attn_mask", "mask= takes bools"),
        ("dot_attention", "dropout", "did you mean dropout_p"),
        ("gatv2_attention", "edge_weight", "did you mean weight"),
        # What only layers pass would give other numbers.
        ("gat_attention", "gate", "got gate"),
        ("score_attention", "out_bias", "got out_bias"),
        ("dot_attention", "negative_slope", "got negative_slope"),
        ("gat_attention", "function", "got function"),
    ],
)
def test_names_that_are_no_options(name, given, says):
    function = getattr(functional, name)
    tensors = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    with pytest.raises(TypeError, match=f"{name}: {given}: expected one of .*{says}") as raised:
        function(*[torch.ones(2, 1, 4)] * len(tensors), **{given: 0.5})
    assert "out_bias" not in str(raised.value).replace("got out_bias", "").replace(": out_bias:", "")


def test_generators(device):
    """A generator, or the seed itself, decides which weights are dropped."""
    graph = make_graph("random", device)
    x = torch.ones(graph.num_src, 2, 4, device=device)

    def call(generator):
        return functional.dot_attention(graph, x, x, x, dropout_p=0.5, generator=generator)

    one, two = (call(torch.Generator(device).manual_seed(s)) for s in (3, 3))
    assert torch.equal(one, two) and not torch.equal(one, call(torch.Generator(device).manual_seed(4)))
    seed = torch.tensor([7], device=device)
    assert torch.equal(call(seed), call(seed))
