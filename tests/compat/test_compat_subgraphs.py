"""Where dfgnn.compat's subgraphs are, and which edges they have."""

import pytest
import torch

import dfgnn.compat as dgl

CALLS = {
    "node_subgraph": lambda g, **given: dgl.node_subgraph(g, [0, 2], **given),
    "edge_subgraph": lambda g, **given: dgl.edge_subgraph(g, [0, 2], **given),
    "edge_subgraph, all nodes": lambda g, **given: dgl.edge_subgraph(g, [0, 2], relabel_nodes=False, **given),
    "in_subgraph": lambda g, **given: dgl.in_subgraph(g, [2], **given),
    "out_subgraph": lambda g, **given: dgl.out_subgraph(g, [2], **given),
}


def drawn():
    g = dgl.graph(([0, 1, 2, 2], [2, 2, 0, 1]), num_nodes=3)
    g.ndata["x"], g.edata["w"] = torch.arange(3.0), torch.arange(4.0)
    return g


@pytest.mark.parametrize("name", CALLS)
def test_output_device(name):
    part = CALLS[name](drawn(), output_device="meta")
    assert {part.device.type, part.ndata["x"].device.type, part.edata["w"].device.type} == {"meta"}
    assert CALLS[name](drawn()).device.type == "cpu"


def test_edges_into_and_out_of_nodes():
    into, out = dgl.in_subgraph(drawn(), [2]), dgl.out_subgraph(drawn(), [2], store_ids=False)
    assert into.edata["w"].tolist() == [0, 1] and into.edata["_ID"].tolist() == [0, 1]
    assert out.edata["w"].tolist() == [2, 3] and "_ID" not in out.edata
    small = dgl.in_subgraph(drawn(), [2], relabel_nodes=True)
    assert small.num_nodes() == 3 and dgl.out_subgraph(drawn(), [0], relabel_nodes=True).num_nodes() == 2
