"""A part of a graph drops attention by the edges' ids in the whole graph, which are in no order: the same as
with the dropout mask given as edge weights."""

import pytest
import torch
from attention import SCORES, make_inputs, run
from ranks import function

from dfgnn.distributed import DistributedGraph


@pytest.mark.parametrize("score", SCORES)
def test_ids_beyond_the_edges(score, device):
    torch.manual_seed(1)
    edge_index = torch.randint(300, (2, 9000), device=device)
    part = DistributedGraph.from_edge_index(edge_index, 300)
    part._edge_ids = (part._edge_ids * 7919 + 12_345_678).to(torch.int32)
    inputs = make_inputs(score, part, 4, 32)
    options = {"dropout_p": 0.4, "generator": torch.tensor([9], device=device)}
    by_id = run(function(score), part, inputs, **options)
    ones = torch.ones(part.num_edges, device=device)
    by_place = run(function(score), part, {**inputs, "weight": ones}, **options)
    for name, x in by_id.items():
        torch.testing.assert_close(x, by_place[name], rtol=1e-4, atol=1e-4)
    without = run(function(score), part, inputs)
    assert not torch.allclose(by_id["out"], without["out"], atol=0.1)
