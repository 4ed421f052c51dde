"""Graph.reorder: the relabelled graph is the same graph, every order is what it says, and attention on it is
what it was, in the user's order."""

import copy
import itertools
import pickle
import sys

import pytest
import torch
from attention import SCORES, function, make_inputs, run
from covering import covered
from graph_checks import check_graph, small
from graphs import GRAPHS, make_graph

from dfgnn import Graph, functional, nn
from dfgnn.graph import METHODS

NODES = {
    "gat": ("value", "score_src", "score_dst"),
    "gatv2": ("query", "key"),
    "dot": ("query", "key", "value"),
}
LIBRARIES = {"rcm": "scipy", "community": "sknetwork"}
BIPARTITE = ("fewer_destinations", "fewer_sources", "super_row", "super_source", "no_edges")


def reorder(graph, method):
    """graph.reorder by name; "given" is a random permutation that the caller found."""
    if method in LIBRARIES:
        pytest.importorskip(LIBRARIES[method], reason=f"{LIBRARIES[method]} is not installed")
    if method != "given":
        return graph.reorder(method)
    src = torch.randperm(graph.num_src).to(graph.device)
    if graph.num_src == graph.num_dst:
        return graph.reorder(src)
    return graph.reorder((src, torch.randperm(graph.num_dst).int().to(graph.device)))


def undirected(src, dst, n):
    """A graph of both directions of these edges with nodes in random order, and the new id of each node."""
    place = torch.randperm(n)
    src, dst = place[src], place[dst]
    return Graph.from_coo(torch.cat([src, dst]), torch.cat([dst, src]), num_nodes=n), place


EVERY = [*METHODS, "given"]


# ---- the graph -------------------------------------------------------------------------------------


@covered(method=EVERY, name=list(GRAPHS), index_dtype=[torch.int32, torch.int64])
def test_same_graph_under_new_labels(method, index_dtype, name, device):
    src, dst, num_src, num_dst = GRAPHS[name]()
    graph = make_graph(name, device, index_dtype)
    r = reorder(graph, method)
    for side, size in ((r.src, num_src), (r.dst, num_dst)):
        for tensor in side:
            assert tensor.dtype == torch.int64 and tensor.device == graph.device
        assert side.order.sort().values.tolist() == list(range(size))
        assert side.rank[side.order].tolist() == list(range(size))
    assert (r.src is r.dst) == (num_src == num_dst)
    # Edge e is still edge e, and the old graph is as it was: scipy sorts in place.
    check_graph(r.graph, r.src.rank.cpu()[src], r.dst.rank.cpu()[dst], num_src, num_dst, device)
    check_graph(graph, src, dst, num_src, num_dst, device)
    if method == "given":
        assert torch.equal(reorder(r.graph, "given").graph.in_degrees().sort().values,
                           graph.in_degrees().sort().values)  # fmt: skip


def test_neighbours_rise(device):
    for name in ("duplicates", "mixed_degrees", "fewer_sources"):
        csr = reorder(make_graph(name, device), "given").graph.csr()
        for begin, end in itertools.pairwise(csr.indptr.tolist()):
            row = csr.indices[begin:end].tolist()
            assert row == sorted(row)


@pytest.mark.parametrize("method", METHODS)
def test_deterministic_and_no_random_numbers(method, device):
    np = pytest.importorskip("numpy")
    graph = make_graph("power_law", device)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, second = reorder(graph, method), reorder(graph, method)
    assert torch.equal(first.src.order, second.src.order)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


# ---- attention -------------------------------------------------------------------------------------


def on_new_labels(r, score):
    """The function of the score on the new graph, nodes and results in the user's order."""

    def attention(graph, **arguments):
        nodes = [arguments.pop(name) for name in NODES[score]]
        return r(function(score), *nodes, **arguments)

    return attention


@covered(method=EVERY, name=list(GRAPHS), score=SCORES)
def test_attention_and_gradients_in_the_users_order(method, score, name, device):
    graph = make_graph(name, device)
    r = reorder(graph, method)
    inputs = make_inputs(score, graph, 2, 4, torch.float64, term=True, weight=1, gate="H", edge=True)
    # Dropout's mask depends on edge ids, which reordering keeps: both graphs drop the same edges.
    options = dict(return_attention=True, dropout_p=0.3, generator=torch.tensor([5], device=device))
    expected = run(function(score), graph, inputs, **options)
    actual = run(on_new_labels(r, score), graph, inputs, **options)
    assert actual.keys() == expected.keys()
    for key, x in expected.items():
        assert actual[key].shape == x.shape
        torch.testing.assert_close(actual[key], x, rtol=1e-10, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}")


def test_around_a_model(device):
    """Two layers and a residual in the new order: one permute and one restore."""
    graph = make_graph("isolated", device)
    r = reorder(graph, "given")
    layers = [nn.dgl.GATConv(6, 5, 2, residual=True, allow_zero_in_degree=True).to(device, torch.float64)]
    layers += [nn.dgl.DotGatConv(10, 3, 1, allow_zero_in_degree=True).to(device, torch.float64)]

    def model(graph, x):
        return layers[1](graph, layers[0](graph, x).flatten(1))

    x = torch.randn(graph.num_src, 6, dtype=torch.float64, device=device)
    expected = model(graph, x)
    torch.testing.assert_close(r.restore(model(r.graph, r.permute(x))), expected)
    torch.testing.assert_close(r(model, x), expected)


def test_a_layer_on_a_block(device):
    """The destinations of a block are its first sources: after reordering they are given beside them."""
    graph = make_graph("fewer_destinations", device)
    layer = nn.dgl.GATConv(6, 4, 2, residual=True, allow_zero_in_degree=True).to(device)
    x = torch.randn(graph.num_src, 6, device=device)
    expected, attention = layer(graph, x, get_attention=True)
    r = reorder(graph, "given")
    out, new_attention = r(layer, (x, x[: graph.num_dst]), get_attention=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(new_attention, attention)


def test_a_node_tensor_may_be_none(device):
    graph = make_graph("random", device)
    inputs = make_inputs("gat", graph, 2, 4)
    nodes = inputs["value"], inputs["score_src"], None
    torch.testing.assert_close(
        reorder(graph, "given")(functional.gat_attention, *nodes), functional.gat_attention(graph, *nodes)
    )


# ---- permute and restore ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["random", *BIPARTITE])
def test_permute_and_restore(name, device):
    graph = make_graph(name, device)
    r = reorder(graph, "given")
    for side, size in ((r.src, graph.num_src), (r.dst, graph.num_dst)):
        for shape in ((), (3,), (2, 3)):
            x = torch.randint(100, (size, *shape), device=device)
            for value in (x, x.double(), x % 2 == 0):
                moved = r.permute(value)
                assert torch.equal(moved, value[side.order]) and moved.dtype == value.dtype
                assert torch.equal(r.restore(moved), value)
                assert torch.equal(r.permute(r.restore(value)), value)


def test_gradients_of_permute_and_restore(device):
    r = reorder(make_graph("random", device), "given")
    x = torch.randn(50, 2, dtype=torch.float64, device=device, requires_grad=True)
    for move in (r.permute, r.restore):
        assert torch.autograd.gradcheck(move, x)
        assert torch.autograd.gradgradcheck(lambda x, move=move: move(x**2), x)
    weight = torch.randn(50, 2, dtype=torch.float64, device=device)
    (grad,) = torch.autograd.grad(r.permute(x), x, weight)
    assert torch.equal(grad, r.restore(weight))


def test_compiled_and_vmapped():
    r = reorder(make_graph("random"), "given")
    x = torch.randn(50, 3, requires_grad=True)
    compiled = torch.compile(r.permute, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), r.permute(x))
    (grad,) = torch.autograd.grad(compiled(x).sin().sum(), x)
    assert torch.equal(grad, x.cos())
    assert torch.equal(torch.vmap(r.permute, in_dims=1, out_dims=1)(x), r.permute(x))


def test_made_in_inference_mode_then_trained():
    with torch.inference_mode():
        r = make_graph("random").reorder("degree")
    x = torch.randn(50, 1, 4, requires_grad=True)
    r(lambda graph, x: functional.dot_attention(graph, x, x, x), x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_pickle_and_copy():
    r = reorder(make_graph("fewer_sources"), "given")
    for other in (pickle.loads(pickle.dumps(r)), copy.deepcopy(r)):
        x = torch.randn(80, 3)
        assert torch.equal(other.permute(x), r.permute(x))
        assert torch.equal(other.graph.edge_index, r.graph.edge_index)


# ---- the orders ------------------------------------------------------------------------------------


def test_degree_is_descending_and_stable(device):
    graph = make_graph("mixed_degrees", device)
    order = reorder(graph, "degree").src.order.tolist()
    degree = (graph.in_degrees() + graph.out_degrees()).tolist()
    assert order == sorted(range(72), key=lambda node: -degree[node])


def test_degree_of_each_side_of_a_bipartite_graph(device):
    for name in ("fewer_destinations", "fewer_sources", "super_row"):
        graph = make_graph(name, device)
        r = reorder(graph, "degree")
        for side, degrees in ((r.src, graph.out_degrees()), (r.dst, graph.in_degrees())):
            degree = degrees.tolist()
            assert side.order.tolist() == sorted(range(len(degree)), key=lambda node: -degree[node])


def bandwidth(graph):
    src, dst = graph.edge_index
    return int((src - dst).abs().max())


def test_rcm_finds_the_band():
    i = torch.arange(199)
    chain, _ = undirected(i, i + 1, 200)
    assert bandwidth(chain) > 100
    assert bandwidth(reorder(chain, "rcm").graph) == 1

    node = torch.arange(900).view(30, 30)
    pairs = (node[1:], node[:-1]), (node[:, 1:], node[:, :-1])
    src, dst = (torch.cat([ends.flatten() for ends in side]) for side in zip(*pairs))
    grid, _ = undirected(src, dst, 900)
    assert bandwidth(grid) > 600
    assert bandwidth(reorder(grid, "rcm").graph) <= 32


def test_rcm_of_one_direction_only():
    """Reverse Cuthill-McKee of a chain whose edges lead in one direction only."""
    place = torch.randperm(200)
    chain = Graph.from_coo(place[:-1], place[1:], num_nodes=200)
    assert bandwidth(reorder(chain, "rcm").graph) == 1


def test_rcm_of_a_bipartite_graph():
    """Sources i and i + 1 lead to destination i: in the new order both kinds of nodes must follow the
    chain."""
    i = torch.arange(150)
    sources, destinations = torch.randperm(151), torch.randperm(150)
    graph = Graph.from_coo(
        torch.cat([sources[i], sources[i + 1]]), destinations.repeat(2), num_src=151, num_dst=150
    )
    assert bandwidth(graph) > 100
    assert bandwidth(reorder(graph, "rcm").graph) <= 2


def changes(labels):
    """How often neighbours in a row of labels differ."""
    return int((labels[1:] != labels[:-1]).sum())


def test_community_follows_the_tree():
    """20 rings of three cliques of 8 nodes: cliques and rings both are contiguous."""
    clique = torch.arange(60)
    pairs = torch.cat([torch.combinations(torch.arange(8)) + 8 * c for c in clique])
    next_one = clique // 3 * 3 + (clique + 1) % 3
    bridges = torch.stack([8 * clique, 8 * next_one + 1], dim=1)
    graph, place = undirected(*torch.cat([pairs, bridges]).T, 480)
    label = torch.empty(480, dtype=torch.int64)
    label[place] = torch.arange(480) // 8
    label = reorder(graph, "community").permute(label)
    assert changes(label) == 59
    assert changes(label // 3) == 19


def test_community_of_a_bipartite_graph():
    """Ten groups of 7 sources and 5 destinations, all pairs of a group."""
    src = torch.arange(70).repeat_interleave(5)
    dst = torch.arange(70).repeat_interleave(5) // 7 * 5 + torch.arange(5).repeat(70)
    sources, destinations = torch.randperm(70), torch.randperm(50)
    graph = Graph.from_coo(sources[src], destinations[dst], num_src=70, num_dst=50)
    r = reorder(graph, "community")
    groups = []
    for side, place, size in ((r.src, sources, 7), (r.dst, destinations, 5)):
        label = torch.empty_like(place)
        label[place] = torch.arange(len(place)) // size
        groups.append(label[side.order])
        assert changes(groups[-1]) == 9
    assert torch.equal(groups[0][::7], groups[1][::5])


def test_community_puts_the_highest_degree_first():
    """Stars of 3, 4, … 12 leaves: each centre before its leaves, the larger stars first."""
    centre, src, dst = [], [], []
    for leaves in range(3, 13):
        centre.append(sum(centre[-1:]) + leaves if centre else 0)
        src += [centre[-1]] * leaves
        dst += range(centre[-1] + 1, centre[-1] + 1 + leaves)
    n = dst[-1] + 1
    graph, place = undirected(torch.tensor(src), torch.tensor(dst), n)
    r = reorder(graph, "community")
    degree = (r.graph.in_degrees()).tolist()
    assert degree == [d for leaves in range(12, 2, -1) for d in [leaves] + [1] * leaves]


# ---- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, module, package",
    [("rcm", "scipy.sparse.csgraph", "scipy"), ("community", "sknetwork.clustering", "scikit-network")],
)
def test_missing_library_is_named(method, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    message = f"Graph.reorder: method '{method}' needs {package}, .* pip install {package}"
    with pytest.raises(ImportError, match=message):
        small().reorder(method)
