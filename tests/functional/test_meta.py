"""Tensors on the device meta have shapes alone, and so have the results of every function there (of layers:
tests/nn/test_every_layer.py)."""

import pytest
import torch
from every_function import CASES
from graphs import make_graph

from dfgnn import Graph


def check(found, expected, leaves):
    """The results are on meta with these shapes and dtypes, and so are the gradients of the leaves."""
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    assert all(x.is_meta for x in found)
    gradients = torch.autograd.grad(sum(x.sum() for x in found), leaves, allow_unused=True)
    for x, grad in zip(leaves, gradients):
        assert grad is None or grad.is_meta and grad.shape == x.shape


@pytest.mark.parametrize("given", ["Graph", "Graph on meta", "edge_index"])
@pytest.mark.parametrize("name", CASES)
def test_functions(name, given, monkeypatch):
    case, graph = CASES[name], make_graph("isolated")
    case.choose(monkeypatch)
    tensors = case.tensors(graph, 4, 5, 3, batch=False)
    expected = case(graph, tensors)
    on_meta = {key: x.to("meta").requires_grad_() for key, x in tensors.items()}
    if given != "edge_index":
        found = case(graph if given == "Graph" else graph.to("meta"), on_meta)
    else:
        edges = graph.edge_index.to("meta")
        edges = Graph.cached(edges, num_src=graph.num_src, num_dst=graph.num_dst)
        found = case(edges, on_meta)
    check(found, expected, list(on_meta.values()))
