"""The options of attention within blocks that need a number per pair: they go over a graph of the pairs."""

import copy
import math

import pytest
import torch
from test_block_attention import LEAST, compared, error, make, results

from dfgnn import functional
from dfgnn.runtime.cuda_graphs import capturing

PAIRS = [3, 0, 1, 64, 5], [0, 4, 1, 33, 7]
BLOCKS = [3, 0, 1, 40, 5], None
OPTIONS = {
    "a bias of pairs": dict(pair_bias=True),
    "a softcap": dict(softcap=1.5),
    "dropout": dict(dropout_p=0.4, generator=7),
    "weights": dict(return_attention=True, key_bias=True),
    "all but softcap": dict(pair_bias=True, dropout_p=0.2, generator=3, key_bias=True, sink=True),
}
OPTIONS["all"] = dict(OPTIONS["all but softcap"], softcap=2.0, return_attention=True)


def inputs(sizes, dtype, device, given, heads=3, dim=7, value_dim=4):
    """(tensors by name, options, offsets)"""
    every, offsets = make(*sizes, heads, dim, value_dim, dtype, device, True)
    options = dict(given)
    pairs = sum(n * m for n, m in zip(sizes[0], sizes[1] or sizes[0]))
    pair_bias = torch.randn(pairs, heads, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    pair_bias[pairs // 2 : pairs // 2 + 9] = -math.inf
    every["pair_bias"] = pair_bias.to(every["key_bias"])
    rows = "query", "key", "value"
    tensors = {name: x for name, x in every.items() if name in rows or options.pop(name, False)}
    if "generator" in options:
        options["generator"] = torch.tensor([options["generator"]], device=device)
    return tensors, options, offsets


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", LEAST)
def test_numbers_and_two_derivatives(device, dtype, name):
    sizes = BLOCKS if "all" in name else PAIRS
    tensors, options, offsets = inputs(sizes, dtype, device, OPTIONS[name])
    for k, (x, whole, rough) in enumerate(compared(tensors, {**options, **offsets})):
        assert error(x, whole) <= max(
            4 * error(rough, whole), (16 if whole.dim() == 1 else 4) * LEAST[dtype]
        ), k


@pytest.mark.parametrize("dim", [1, 33, 300])
@pytest.mark.parametrize("heads", [1, 8])
def test_weights_are_those_of_the_call_without_them(device, dim, heads):
    """The call by blocks and that over pairs; on a GPU heads of 300 columns always take pairs."""
    tensors, options, offsets = inputs(PAIRS, torch.float64, device, OPTIONS["weights"], heads, dim, 5)
    plain = functional.block_attention(**tensors, **offsets)
    out, weights = functional.block_attention(**tensors, **offsets, **options)
    torch.testing.assert_close(out, plain)
    begin = 0
    for n, m, row, first in zip(*PAIRS, offsets["offsets"].tolist(), offsets["key_offsets"].tolist()):
        block = weights[begin : begin + n * m].view(n, m, heads)
        some = torch.einsum("ijh,jhd->ihd", block, tensors["value"][first : first + m])
        torch.testing.assert_close(out[row : row + n], some)
        begin += n * m
    assert begin == len(weights)


@pytest.mark.parametrize("name", ["a bias of pairs", "all"])
def test_rows_outside_of_blocks_get_zero(device, name):
    tensors, options, _ = inputs(([12], None), torch.float64, device, OPTIONS[name])
    tensors["pair_bias"] = torch.randn(16 + 25, 3, dtype=torch.float64, device=device)
    given = functional.block_attention(
        **tensors, offsets=torch.tensor([2, 6, 11], device=device), **options | dict(return_attention=False)
    )
    assert not given[:2].any() and not given[11:].any()
    assert options.get("dropout_p") or given[2:11].any(-1).all()


@pytest.mark.parametrize("given", [dict(key_bias=True, sink=True), OPTIONS["all"]], ids=["blocks", "pairs"])
@pytest.mark.parametrize(("sizes", "keys"), [([], None), ([0, 0], [0, 3]), ([2, 1], [0, 0])])
def test_without_rows_or_keys(device, sizes, keys, given):
    tensors, options, offsets = inputs((sizes, keys), torch.float32, device, given)
    assert not any(x.any() for x in results(functional, tensors, {**options, **offsets}))


def test_the_pairs_are_kept():
    """The pairs are made once for given offsets, and again when the offsets change in place."""
    tensors, _, offsets = inputs(([3, 4], None), torch.float32, "cpu", {})
    rows, given = len(tensors["query"]), offsets["offsets"]

    def pairs():
        return functional.block_pairs.graph_of_pairs(given, given, rows, rows)

    before = pairs()
    assert before is pairs() and before.num_edges == 25
    given[1] = 1
    assert pairs().num_edges == 37


@pytest.mark.gpu
def test_in_cuda_graphs():
    """A captured call uses the pairs that were made for these offsets before capture; offsets without pairs
    are an error."""
    tensors, options, offsets = inputs(BLOCKS, torch.float32, "cuda", OPTIONS["a bias of pairs"])
    right = functional.block_attention(**tensors, **offsets, **options)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with capturing(graph, stream=stream):
        out = functional.block_attention(**tensors, **offsets, **options)
        with pytest.raises(NotImplementedError, match="before a CUDA graph is captured"):
            functional.block_attention(**tensors, offsets=copy.copy(offsets["offsets"]).clone(), **options)
    graph.replay()
    torch.testing.assert_close(out, right)
