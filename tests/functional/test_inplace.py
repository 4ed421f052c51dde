"""What a function or a layer returns may be modified in place before backward, as upstream's results may."""

import gc
import weakref

import pytest
import torch
from attention import SCORES, function, make_inputs
from graphs import make_graph


def gradients(attention, graph, inputs, modify, options, wrap=lambda f, *args: f(*args)):
    torch.manual_seed(0)
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}

    def forward(*tensors):
        results = attention(graph, **dict(zip(leaves, tensors)), **options)
        results = results if isinstance(results, tuple) else (results,)
        return [modify(x) for x in results]

    results = wrap(forward, *leaves.values())
    loss = sum((x * torch.linspace(-1, 1, x.numel(), device=x.device).view_as(x)).sum() for x in results)
    loss.backward()
    return [x.detach() for x in results] + [x.grad for x in leaves.values()]


def saved_as_they_are(forward, *tensors):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return forward(*tensors)


def saved_on_cpu(forward, *tensors):
    with torch.autograd.graph.save_on_cpu():
        return forward(*tensors)


@pytest.mark.parametrize("modify", [lambda x: x.relu_(), lambda x: x], ids=["relu_", "unchanged"])
@pytest.mark.parametrize("wrap", [saved_as_they_are, saved_on_cpu])
@pytest.mark.parametrize("score", SCORES)
def test_hooks_for_saved_tensors(device, score, wrap, modify):
    graph = make_graph("random", device)
    inputs = make_inputs(score, graph, 2, 4, torch.float64)
    options = {"dropout_p": 0.5, "return_attention": True}
    expected = gradients(function(score), graph, inputs, lambda x: modify(x.clone()), options)
    found = gradients(function(score), graph, inputs, modify, options, wrap)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_hooks_see_the_result(device):
    """saved_tensors_hooks, as offloading uses them, get everything that backward needs, also the result."""
    graph = make_graph("random", device)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.data_ptr()) or x, lambda x: x):
        out = function("gat")(graph, **{n: x.requires_grad_() for n, x in inputs_of(graph).items()})
    assert out.data_ptr() in seen


def inputs_of(graph):
    return make_inputs("gat", graph, 2, 4)


def test_a_modified_input_is_refused(device):
    graph = make_graph("random", device)
    inputs = {n: x.requires_grad_() for n, x in inputs_of(graph).items()}
    feat = inputs["value"] * 1
    out = function("gat")(graph, **{**inputs, "value": feat})
    feat.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_results_are_freed(device):
    """No cycle keeps a result alive, and backward lets go of it while the loss lives on."""
    graph = make_graph("random", device)
    gc.collect()
    gc.disable()
    try:
        out = function("gat")(graph, **{n: x.requires_grad_() for n, x in inputs_of(graph).items()})
        node = out.grad_fn
        loss, alive = out.sum(), weakref.ref(out)
        del out
        assert alive() is None
        loss.backward()
        assert node.kept is None
    finally:
        gc.enable()
