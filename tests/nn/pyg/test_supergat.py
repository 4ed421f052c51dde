"""pyg.SuperGATConv beside torch_geometric's: outputs, samples, logits, the auxiliary loss, all gradients."""

import pytest
import torch
from pyg_compare import assert_same, compare, edges, pair, sparse_forms, torch_geometric
from pyg_layers import SuperGATConv as Subject
from pyg_layers import WithLoss

from dfgnn import reference
from dfgnn.nn.pyg import SuperGATConv

PyGConv = torch_geometric.nn.SuperGATConv
N = 50  # nodes of the graph "random"
TYPES = pytest.mark.parametrize("attention_type", ["MX", "SD"])


def compare_training(theirs, ours, *args, our_args=None, **kwargs):
    Subject().check_training((theirs, ours), args, our_args, **kwargs)


@TYPES
def test_all_pairs_are_positive(attention_type):
    """A complete graph has no negative samples."""
    theirs, ours = pair(PyGConv, SuperGATConv, 9, 5, 2, attention_type=attention_type)
    compare_training(theirs, ours, torch.randn(24, 9, dtype=torch.float64), edges("complete"))
    assert len(ours.att_x) == 24**2


@TYPES
def test_no_loss_in_evaluation(attention_type):
    theirs, ours = pair(PyGConv, SuperGATConv, 9, 5, 2, attention_type=attention_type)
    x = torch.randn(N, 9, dtype=torch.float64)
    compare(theirs.eval(), ours.eval(), x, edges())
    assert torch.equal(ours.get_attention_loss(), theirs.get_attention_loss())


@TYPES
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_given_negatives_and_batches(attention_type, ratio):
    edge_index, batch = edges("duplicates"), torch.arange(12) // 6
    edge_index = torch.cat([edge_index, edge_index + 6], 1)
    theirs, ours = pair(
        PyGConv, SuperGATConv, 9, 5, 2, attention_type=attention_type, edge_sample_ratio=ratio,
        add_self_loops=False,
    )  # fmt: skip
    x = torch.randn(12, 9, dtype=torch.float64)
    negatives = torch.tensor([[0, 3, 3, 11], [2, 5, 5, 0]])
    compare_training(theirs, ours, x, edge_index, negatives)
    compare_training(theirs, ours, x, edge_index, batch=batch)
    compare_training(theirs, ours, x, edge_index, neg_edge_index=torch.zeros(2, 0, dtype=torch.long))
    batched = torch.randperm(edge_index.shape[1])[:20]
    compare_training(theirs, ours, x, edge_index[:, batched], batch=batch)
    assert len(ours.att_x) > ours.att_y.sum() > 0


def test_overridden_sampling_counts():
    class Doubled(SuperGATConv):
        def positive_sampling(self, edge_index):
            return edge_index.repeat(1, 2)

    layer = Doubled(9, 5, 2, add_self_loops=False)
    layer(torch.randn(N, 9), edges(), torch.zeros(2, 3, dtype=torch.long))
    assert len(layer.att_x) == 803 and torch.equal(layer.att_x[:400], layer.att_x[400:800])


@TYPES
@pytest.mark.parametrize("add_self_loops", [True, False])
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_samples_of_a_sparse_adjacency(attention_type, add_self_loops, layout):
    edge_index = torch.unique(edges(), dim=1)
    theirs, ours = pair(
        PyGConv, SuperGATConv, 9, 5, 2, attention_type=attention_type, add_self_loops=add_self_loops
    )
    x, adjacency = torch.randn(N, 9, dtype=torch.float64), sparse_forms(edge_index, N, N)[layout]
    # torch_geometric cannot sample from a sparse matrix: its layer gets the edge_index. The positive samples
    # are all edges, with a matrix in its order.
    found = []
    for layer, edges_ in ((theirs, edge_index), (ours, adjacency)):
        out, loss, logits, labels = WithLoss(layer.train())(x, edges_, torch.tensor([[1], [2]]))
        gradients = torch.autograd.grad(out.square().sum() + loss, list(layer.parameters()))
        found.append(dict(enumerate((out, loss, logits.sort(0).values, labels, *gradients))))
    assert_same(*found, 1e-10)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda x, e: (x, e, e + 1), ValueError, r"neg_edge_index\[.\]: expected values in"),
        (lambda x, e: (x, e, e[0]), ValueError, r"neg_edge_index: expected shape \[2, \*\]"),
    ],
)
def test_errors(change, error, match):
    with pytest.raises(error, match=match):
        SuperGATConv(9, 5, 2)(*change(torch.randn(N, 9), edges()))


def test_attention_can_be_replaced():
    _, ours = pair(PyGConv, SuperGATConv, 9, 5, 2)
    x = torch.randn(N, 9, dtype=torch.float64)
    expected = ours.eval()(x, edges())
    ours.attention = reference.gat_attention
    torch.testing.assert_close(ours(x, edges()), expected)
