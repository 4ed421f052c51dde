"""Attention among all pairs of each small graph of a batch, beside what needs no graph."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dfgnn import functional
from dfgnn.bench.attention import Bench
from dfgnn.bench.compare import Contestant, Step, compare, significant


def measure_dense(case: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """Attention among all pairs of each small graph of a batch: dot-product attention on a graph of cliques,
    beside what needs no graph: attention over padded rows, and FlexAttention with a mask of the graphs."""
    graph = bench.graph(case["graph"])
    heads, dim, device = case["heads"], case["head_dim"], bench.device
    sizes = _clique_sizes(graph.in_degrees())
    contestants = []
    for dtype in case["dtypes"]:
        generator = torch.Generator().manual_seed(0)
        query, key, value, grad = (
            torch.randn(graph.num_src, heads, dim, generator=generator).to(device, getattr(torch, dtype))
            for _ in range(4)
        )
        leaves = [t.requires_grad_() for t in (query, key, value)]
        ways = {
            ("dfgnn", "eager"): functools.partial(functional.dot_attention, graph),
            ("padded SDPA", "eager"): _padded(sizes, device),
        }
        if device.type == "cuda":
            ways["FlexAttention", "compiled"] = _flex(sizes, device)
        for (library, way), attention in ways.items():

            def make(attention=attention, leaves=leaves, grad=grad) -> Step:
                def call():
                    return torch.autograd.grad(attention(*leaves), leaves, grad)

                with torch.no_grad():
                    out = attention(*leaves)
                    expected = functional.dot_attention(graph, *(t.double() for t in leaves))
                    error = float((out.double() - expected).norm() / expected.norm())
                results = call()
                kept = sum(t.nbytes for t in results)
                return Step(call, 1, kept, {"error": {"out": significant(error)}})

            contestants.append(Contestant(library, way, dtype, make))
    found = compare(contestants, device, bench.seconds)
    return {"nodes": graph.num_dst, "edges": graph.num_edges, "contestants": found}


def _clique_sizes(degree: Tensor) -> list[int]:
    """The number of nodes of each clique in a batch of cliques with loops: a node's degree is that number."""
    sizes, place, values = [], 0, degree.tolist()
    while place < len(values):
        sizes.append(values[place])
        place += values[place]
    return sizes


def _padded(sizes: list[int], device) -> Callable:
    """Scaled dot-product attention of [graphs, heads, most nodes, D], with padding there and back."""
    most = max(sizes)
    row = torch.cat([torch.arange(n) + k * most for k, n in enumerate(sizes)]).to(device)
    mask = (torch.arange(most) < torch.tensor(sizes)[:, None])[:, None, None].to(device)

    def attention(query, key, value):
        def padded(x):
            wide = x.new_zeros(len(sizes) * most, *x.shape[1:]).index_copy(0, row, x)
            return wide.view(len(sizes), most, *x.shape[1:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(padded(query), padded(key), padded(value), attn_mask=mask)
        return out.transpose(1, 2).flatten(0, 1)[row]

    return attention


def _flex(sizes: list[int], device) -> Callable:
    """FlexAttention over all nodes in one sequence; pairs of different graphs are masked."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    graph_of = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)

    def same_graph(batch, head, q, k):
        return graph_of[q] == graph_of[k]

    n = len(graph_of)
    mask = create_block_mask(same_graph, None, None, n, n, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attention(query, key, value):
        batch = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        return compiled(*batch, block_mask=mask).squeeze(0).transpose(0, 1)

    return attention
