"""EGATConv beside dgl.nn.EGATConv."""

import pytest
import torch
from dgl_compare import Contract, compare, dgl, dgl_bipartite, dgl_graph

from dfgnn.nn.dgl import EGATConv


class TestEGATConv(Contract):
    layer = EGATConv
    allows = False, True
    block_as_one = False

    def arguments(self, in_feats):
        return in_feats, 4, 5, 3, 2

    def more_inputs(self, g, dtype, prefix=()):
        return torch.randn(g.num_edges(), *prefix, 4, dtype=dtype), torch.rand(g.num_edges(), dtype=dtype)


def without_bias(in_feats=9, dtype=torch.float32):
    """DGL's constructor fails with bias=False, its forward does not."""
    theirs = dgl.nn.pytorch.EGATConv(in_feats, 4, 5, 3, 2).to(dtype)
    del theirs.bias
    theirs.bias = None
    ours = EGATConv(in_feats, 4, 5, 3, 2, bias=False).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_bias(dtype):
    contract = TestEGATConv()
    contract.compare(without_bias(dtype=dtype), dgl_graph())
    contract.compare(without_bias((9, 6), dtype), dgl_bipartite(), (9, 6))


@pytest.mark.parametrize("change", ["weight", "no weight", "no gradients"])
def test_inputs(change):
    g = dgl_graph()
    layers = TestEGATConv().pair(dtype=torch.float64)
    feat, efeats, weight = TestEGATConv().inputs(g, dtype=torch.float64)
    if change == "no gradients":
        for layer in layers:
            layer.requires_grad_(False)
            layer.attn.requires_grad_()
    compare(*layers, g, feat, efeats, weight if change == "weight" else None)


@pytest.mark.parametrize("bias", [False, True])
def test_a_replaced_edge_projection_takes_effect(bias):
    """What a replaced projection of edges returns is used and not modified, even if it is its input."""
    g = dgl_graph()
    theirs, ours = TestEGATConv().pair() if bias else without_bias()
    efeats = torch.randn(g.num_edges(), 6)
    before = efeats.clone()
    for replacement in (torch.nn.Identity(), torch.nn.Linear(6, 6, bias=True)):
        theirs.fc_fij = ours.fc_fij = replacement
        compare(theirs, ours, g, torch.randn(g.num_nodes(), 9), efeats)
        with torch.no_grad():
            ours(g, torch.randn(g.num_nodes(), 9), efeats)
    assert torch.equal(efeats, before)


@pytest.mark.parametrize("step", [1, 40])
def test_edges_are_summed_in_chunks(step, monkeypatch):
    monkeypatch.setattr("dfgnn.nn.dgl.egat._STEP", {"cpu": step})
    for g in (dgl_graph("duplicates"), dgl_bipartite()):
        pair = g.num_src_nodes() != g.num_dst_nodes()
        contract, sizes = TestEGATConv(), (9, 6) if pair else 9
        contract.compare(contract.pair(sizes, torch.float64), g, sizes)
