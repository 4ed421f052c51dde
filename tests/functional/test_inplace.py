"""What a function or a layer returns may be modified in place before backward, as upstream's results may."""

import gc
import weakref

import pytest
import torch
from attention import function, make_inputs
from graphs import make_graph


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
        assert node.output is None
    finally:
        gc.enable()
