"""Attention among all pairs of each small graph of a batch, compared with what needs no graph."""

import functools
from typing import Any

import block_attention
import torch
from torch import Tensor

from dfgnn import functional
from dfgnn.bench.attention import Bench
from dfgnn.bench.compare import Contestant, Step, compare, significant

# The library and the way of each of ``block_attention.rivals``.
NAMES = {
    "padded SDPA": ("padded SDPA", "eager"),
    "varlen": ("PyTorch's varlen", "eager"),
    "Flex": ("FlexAttention", "compiled"),
    "Flex FLASH": ("FlexAttention", "FLASH"),
}


def measure_dense(case: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """Attention among all pairs of each small graph of a batch: dot-product attention on a graph of cliques,
    compared with what needs no graph: attention over padded rows, and FlexAttention with a mask of the
    graphs."""
    graph = bench.graph(case["graph"])
    heads, dim, device = case["heads"], case["head_dim"], bench.device
    sizes = _clique_sizes(graph.in_degrees())
    offsets = block_attention.offsets_of(sizes, device.type)
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
            ("dfgnn", "blocks"): lambda *x: functional.block_attention(*x, offsets),
        }
        others = block_attention.rivals(sizes, getattr(torch, dtype), device.type)
        ways |= {NAMES[name]: attention for name, attention in others.items()}
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
