"""Heterogeneous graphs as dictionaries: against dgl.heterograph and dgl.to_homogeneous."""

import pytest
import torch

from dfgnn import Graph
from dfgnn.graph import heterograph, to_homogeneous

EDGES = {
    ("paper", "written by", "author"): (torch.tensor([0, 1, 1, 4]), torch.tensor([2, 0, 1, 1])),
    ("author", "writes", "paper"): (torch.tensor([2, 0, 1, 1]), torch.tensor([0, 1, 1, 4])),
    ("paper", "cites", "paper"): (torch.tensor([3, 3]), torch.tensor([3, 0])),
}


def test_sizes_and_edges(device):
    edges = {k: tuple(x.to(device) for x in ends) for k, ends in EDGES.items()}
    graphs = heterograph(edges)
    assert list(graphs) == list(EDGES)
    for relation, graph in graphs.items():
        assert (graph.num_src, graph.num_dst) == tuple({"paper": 5, "author": 3}[relation[k]] for k in (0, 2))
        assert torch.equal(graph.edge_index.cpu(), torch.stack(EDGES[relation]))
    larger = heterograph(edges, {"paper": 9, "author": 3})
    assert larger["paper", "cites", "paper"].num_nodes == 9


def test_homogeneous_is_dgls(device):
    dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
    names = {relation: (relation[0], f"r{k}", relation[2]) for k, relation in enumerate(EDGES)}
    theirs = dgl.to_homogeneous(dgl.heterograph({names[k]: ends for k, ends in EDGES.items()}))
    found = to_homogeneous(heterograph({k: tuple(x.to(device) for x in e) for k, e in EDGES.items()}))
    assert found.node_types == ("author", "paper") and found.first == {"author": 0, "paper": 3}
    assert torch.equal(found.ntype.cpu(), theirs.ndata[dgl.NTYPE])
    # DGL sorts the relations by name, too.
    ours = sorted(zip(*found.graph.edge_index.tolist(), [found.relations[k] for k in found.etype.tolist()]))
    by_name = sorted(names.values())
    want = sorted(
        (s, d, next(k for k, v in names.items() if v == by_name[t]))
        for s, d, t in zip(*(x.tolist() for x in theirs.edges()), theirs.edata[dgl.ETYPE].tolist())
    )
    assert ours == want


@pytest.mark.parametrize("call, error, message", [
    (lambda: heterograph([1]), TypeError, "edges: expected a dictionary, got list"),
    (lambda: heterograph({"cites": EDGES["paper", "cites", "paper"]}), TypeError, "expected keys"),
    (lambda: heterograph({("a", "b", "c"): torch.zeros(3)}), TypeError, "expected a pair"),
    (lambda: heterograph(EDGES, {"paper": 5}), ValueError, "num_nodes: expected a number for 'author'"),
    (lambda: to_homogeneous({}), ValueError, "expected at least one relation"),
    (lambda: to_homogeneous({("a", "x", "a"): square(3), ("a", "y", "a"): square(4)}), ValueError,
     "got 3 and 4"),
])  # fmt: skip
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def square(n):
    return Graph.from_coo(torch.tensor([0]), torch.tensor([0]), num_nodes=n)
