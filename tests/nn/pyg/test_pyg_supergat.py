"""pyg.SuperGATConv beside torch_geometric's: outputs, samples, logits, the auxiliary loss, all gradients."""

import copy
import itertools
import pickle
import random

import pytest
import torch
from pyg_compare import (
    TOLERANCE,
    assert_same,
    assert_same_dropout_distribution,
    compare,
    compare_low_precision,
    edges,
    inject_dropout,
    pair,
    run,
    sparse_forms,
    torch_geometric,
)
from torch.nn.utils import parametrizations

from dfgnn import functional, reference
from dfgnn.nn import _fallback
from dfgnn.nn.pyg import FallbackWarning, SuperGATConv
from dfgnn.nn.pyg._base import fusable

PyGConv = torch_geometric.nn.SuperGATConv
N = 50  # nodes of the graph "random"
TYPES = pytest.mark.parametrize("attention_type", ["MX", "SD"])


class WithLoss(torch.nn.Module):
    """A layer in training: gives what it keeps beside its output, for the same random samples each time."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        torch.manual_seed(1)
        random.seed(1)
        out = self.layer(*args, **kwargs)
        return out, self.layer.get_attention_loss(), self.layer.att_x, self.layer.att_y


def compare_training(theirs, ours, *args, our_args=None, tolerance=None, **kwargs):
    assert theirs.training and ours.training and fusable(ours) is None
    tolerance = TOLERANCE[theirs.lin.weight.dtype] if tolerance is None else tolerance
    expected = run(WithLoss(theirs), *args, **kwargs)
    assert_same(run(WithLoss(ours), *(our_args or args), **kwargs), expected, tolerance)


OPTIONS = [
    dict(zip(("attention_type", "concat", "add_self_loops", "bias", "edge_sample_ratio"), values))
    for values in itertools.product(("MX", "SD"), (True, False), (True, False), (True, False), (1.0, 0.6))
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_constructor_options(options, dtype):
    turn = OPTIONS.index(options)
    heads, in_channels = (1, 3, 2)[turn % 3], (6, 40)[turn // 4 % 2]
    options = options | {
        "negative_slope": (0.2, 0.05)[turn // 2 % 2],
        "neg_sample_ratio": (0.5, 1.5)[turn // 8 % 2],
        "is_undirected": turn % 5 == 0,
    }
    theirs, ours = pair(PyGConv, SuperGATConv, in_channels, 5, heads, dtype=dtype, **options)
    x = torch.randn(N, in_channels, dtype=dtype)
    compare_training(theirs, ours, x, edges())
    compare(theirs.eval(), ours.eval(), x, edges())
    assert torch.equal(ours.get_attention_loss(), theirs.get_attention_loss())


@TYPES
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "name", ["duplicates", "self_loops", "isolated", "mixed_degrees", "power_law", "complete", "sorted"]
)
def test_graphs(attention_type, name, index_dtype):
    edge_index = edges(name)
    n = int(edge_index.max()) + (1 if name == "complete" else 3)  # a complete graph has no negative samples
    dtype = torch.float32 if index_dtype == torch.int32 else torch.float64
    theirs, ours = pair(PyGConv, SuperGATConv, 9, 5, 2, attention_type=attention_type, dtype=dtype)
    x = torch.randn(n, 9, dtype=dtype)
    compare_training(theirs, ours, x, edge_index, our_args=(x, edge_index.to(index_dtype)))
    assert (len(ours.att_x) == n**2) == (name == "complete")


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
def test_sparse_adjacency(attention_type, add_self_loops, layout):
    edge_index = torch.unique(edges(), dim=1)
    theirs, ours = pair(
        PyGConv, SuperGATConv, 9, 5, 2, attention_type=attention_type, add_self_loops=add_self_loops
    )
    x, adjacency = torch.randn(N, 9, dtype=torch.float64), sparse_forms(edge_index, N, N)[layout]
    compare(theirs.eval(), ours.eval(), x, adjacency)
    # torch_geometric cannot sample from it. The positive samples are all edges, but in the matrix's order.
    found = []
    for layer, edges_ in ((theirs, edge_index), (ours, adjacency)):
        out, loss, logits, labels = WithLoss(layer.train())(x, edges_, torch.tensor([[1], [2]]))
        gradients = torch.autograd.grad(out.square().sum() + loss, list(layer.parameters()))
        found.append(dict(enumerate((out, loss, logits.sort(0).values, labels, *gradients))))
    assert_same(*found, 1e-10)


@pytest.mark.parametrize("sort_order", [None, "row", "col"])
def test_edge_index_class(sort_order):
    edge_index = torch_geometric.EdgeIndex(edges(), sparse_size=(N, N))
    if sort_order is not None:
        edge_index = edge_index.sort_by(sort_order).values
    theirs, ours = pair(PyGConv, SuperGATConv, 9, 5, 2)
    x = torch.randn(N, 9, dtype=torch.float64)
    # torch_geometric cannot sample from its own class
    compare_training(theirs, ours, x, edge_index.as_tensor(), our_args=(x, edge_index))


@TYPES
@pytest.mark.parametrize("add_self_loops", [True, False])
@pytest.mark.parametrize("num_nodes", [0, 4])
def test_no_edges(attention_type, add_self_loops, num_nodes):
    theirs, ours = pair(
        PyGConv, SuperGATConv, 9, 5, 2, attention_type=attention_type, add_self_loops=add_self_loops
    )
    x, edge_index = torch.randn(num_nodes, 9, dtype=torch.float64), torch.zeros(2, 0, dtype=torch.long)
    compare(theirs.eval(), ours.eval(), x, edge_index)
    ours.train()(x, edge_index)
    assert ours.att_x.shape == (len(ours.att_y), 2)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda x, e: (x[:, None], e), ValueError, r"x: expected shape \[N, F\]"),
        (lambda x, e: (None, e), TypeError, "x: expected a tensor"),
        (lambda x, e: (x, e[:1]), ValueError, r"edge_index: expected shape \[2, \*\]"),
        (lambda x, e: (x, e.double()), TypeError, "edge_index: expected dtype"),
        (lambda x, e: (x, e.tolist()), TypeError, "edge_index: expected a .* got list"),
        (lambda x, e: (x[:10], e), ValueError, r"edge_index\[0\]: expected values in"),
        (lambda x, e: (x, e, e + 1), ValueError, r"neg_edge_index\[.\]: expected values in"),
        (lambda x, e: (x, e, e[0]), ValueError, r"neg_edge_index: expected shape \[2, \*\]"),
    ],
)
def test_errors(change, error, match):
    with pytest.raises(error, match=match):
        SuperGATConv(9, 5, 2)(*change(torch.randn(N, 9), edges()))


# State


@TYPES
def test_state_and_initialisation(attention_type):
    layers = []
    for cls in (PyGConv, SuperGATConv):
        torch.manual_seed(5)
        layers.append(cls(9, 5, 2, attention_type=attention_type))
    theirs, ours = layers
    assert repr(ours) == repr(theirs) and isinstance(ours, PyGConv)
    assert theirs.__dict__.keys() == ours.__dict__.keys()
    expected, actual = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    theirs.load_state_dict(actual)


def test_lazy():
    layers = []
    x = torch.randn(N, 9)
    for cls in (PyGConv, SuperGATConv):
        torch.manual_seed(5)
        layers.append(cls(-1, 5, 2))
        layers[-1](x, edges())
    compare_training(*layers, x, edges())


def test_assigning_the_class():
    theirs, _ = pair(PyGConv, SuperGATConv, 9, 5, 2)
    layer, x = copy.deepcopy(theirs), torch.randn(N, 9, dtype=torch.float64)
    layer.__class__ = SuperGATConv
    compare_training(theirs, layer, x, edges())
    layer.att_x = None  # not a leaf, which cannot be pickled
    assert type(pickle.loads(pickle.dumps(layer))) is SuperGATConv
    layer.__class__ = PyGConv
    assert torch.equal(layer.eval()(x, edges()), theirs.eval()(x, edges()))


@TYPES
def test_pickle_and_deepcopy(attention_type):
    layer = SuperGATConv(9, 5, 2, dropout=0.5, attention_type=attention_type).eval()
    x = torch.randn(N, 9)
    expected = layer(x, edges())
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert type(other) is SuperGATConv and torch.equal(other(x, edges()), expected)


def test_fallback(monkeypatch):
    monkeypatch.setattr(_fallback, "_warned", set())
    theirs, ours = pair(PyGConv, SuperGATConv, 9, 5, 2, aggr="max")
    x = torch.randn(N, 9, dtype=torch.float64)
    with pytest.warns(FallbackWarning, match="SuperGATConv .* aggr='max'"):
        found = run(WithLoss(ours), x, edges())
    assert_same(found, run(WithLoss(theirs), x, edges()), 0)


# Dropout


@TYPES
@pytest.mark.parametrize("concat", [True, False])
def test_injected_mask(monkeypatch, attention_type, concat):
    edge_index = edges()
    theirs, ours = pair(
        PyGConv, SuperGATConv, 9, 5, 2, dropout=0.4, concat=concat, attention_type=attention_type
    )
    num_edges = int((edge_index[0] != edge_index[1]).sum()) + N
    inject_dropout(monkeypatch, ours, num_edges, 2)
    seed = torch.tensor([21])
    ours.dot_attention = lambda *args, **kwargs: functional.dot_attention(*args, **kwargs, _seed=seed)
    compare_training(theirs, ours, torch.randn(N, 9, dtype=torch.float64), edge_index)


def test_dropout_distribution(monkeypatch):
    theirs, ours = pair(PyGConv, SuperGATConv, 9, 5, 2, dropout=0.4)
    for layer in (theirs, ours):  # samples do not count here, and take their time
        monkeypatch.setattr(layer, "negative_sampling", lambda edge_index, *args: edge_index[:, :1])
    x = torch.randn(6, 9, dtype=torch.float64)
    assert_same_dropout_distribution(theirs, ours, x, edges("duplicates"))
    compare(theirs.eval(), ours.eval(), x, edges("duplicates"))


# Projection and precision


@pytest.mark.parametrize(
    "change",
    [
        lambda lin: lin.register_forward_hook(lambda module, args, out: 2 * out),
        lambda lin: lin.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        parametrizations.weight_norm,
    ],
    ids=["forward hook", "forward pre-hook", "parametrization"],
)
def test_changes_of_the_projection_take_effect(change):
    theirs, ours = pair(PyGConv, SuperGATConv, 9, 5, 2)
    for layer in (theirs, ours):
        change(layer.lin)
    compare(theirs.eval(), ours.eval(), torch.randn(N, 9, dtype=torch.float64), edges())


@TYPES
@pytest.mark.parametrize("concat", [True, False])
def test_autocast(attention_type, concat):
    theirs, ours = pair(
        PyGConv, SuperGATConv, 9, 8, 2, attention_type=attention_type, concat=concat, dtype=torch.float32
    )
    compare_low_precision(WithLoss(theirs), WithLoss(ours), torch.randn(N, 9), edges(), autocast=True)


@TYPES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision(attention_type, dtype):
    theirs, ours = pair(PyGConv, SuperGATConv, 9, 8, 2, attention_type=attention_type, dtype=torch.float32)
    compare_low_precision(WithLoss(theirs), WithLoss(ours), torch.randn(N, 9), edges(), dtype=dtype)


@TYPES
def test_no_tensor_of_edges_and_features(attention_type):
    layer = SuperGATConv(16, 32, heads=8, attention_type=attention_type)
    x, edge_index = torch.randn(300, 16, requires_grad=True), edges("super_row")
    with torch.profiler.profile(profile_memory=True) as profile:
        out = layer(x, edge_index, edge_index.flip(0))
        (out.sum() + layer.get_attention_loss()).backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < 9000 * 8 * 32 * 4 / 2


def test_attention_can_be_replaced():
    _, ours = pair(PyGConv, SuperGATConv, 9, 5, 2)
    x = torch.randn(N, 9, dtype=torch.float64)
    expected = ours.eval()(x, edges())
    ours.attention = reference.gat_attention
    torch.testing.assert_close(ours(x, edges()), expected)
