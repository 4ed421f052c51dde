"""Graphs of DGL inside the layers: converted once, as long as DGL keeps them, whatever happens to them."""

import copy
import gc
import multiprocessing
import pickle
import weakref

import pytest
import torch
from covering import some
from graph_checks import in_threads

from dfgnn import Graph
from dfgnn.graph import of_dgl
from dfgnn.nn.dgl import GATConv

dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")


def random_graph(num_nodes=30, num_edges=120, **options):
    ends = torch.randint(num_nodes, (2, num_edges))
    return dgl.add_self_loop(dgl.graph(tuple(ends), num_nodes=num_nodes, **options))


def heterograph(**options):
    relations = {("a", "x", "b"): (5, 7, 20), ("b", "y", "b"): (7, 7, 15), ("b", "z", "a"): (7, 5, 9)}
    edges = {
        key: (torch.randint(src, (n,)), torch.randint(dst, (n,))) for key, (src, dst, n) in relations.items()
    }
    return dgl.heterograph(edges, num_nodes_dict={"a": 5, "b": 7}, **options)


def relation(g, etype):
    return g if etype is None else g[etype]


def assert_same_edges(graph, g, etype=None):
    g = relation(g, etype)
    assert torch.equal(graph.edge_index, torch.stack(g.edges(order="eid")).long())
    assert (graph.num_src, graph.num_dst) == (g.num_src_nodes(), g.num_dst_nodes())


@pytest.fixture
def conversions(monkeypatch):
    """A list that gets the number of edges of every DGL graph that is converted."""
    made = []
    convert = Graph.from_dgl

    def from_dgl(g):
        made.append(g.num_edges())
        return convert(g)

    monkeypatch.setattr(Graph, "from_dgl", from_dgl)
    return made


@pytest.fixture(autouse=True)
def _nothing_stays():
    """No test leaves an entry behind."""
    gc.collect()
    before = len(of_dgl._from_dgl), len(of_dgl._of_frame)
    yield
    gc.collect()
    assert (len(of_dgl._from_dgl), len(of_dgl._of_frame)) == before


# ---- identity --------------------------------------------------------------------------------------------


def test_views_of_one_graph_share_it(conversions):
    g = random_graph()
    first = of_dgl.of_dgl(g)
    with g.local_scope():
        assert of_dgl.of_dgl(g) is first
    assert of_dgl.of_dgl(g.local_var()) is first and of_dgl.of_dgl(copy.copy(g)) is first
    g.ndata["x"] = torch.zeros(30, 2)
    g.create_formats_()
    assert of_dgl.of_dgl(g) is first and len(conversions) == 1
    assert_same_edges(first, g)


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.add_edges([0, 1], [2, 3]),
        lambda g: g.remove_edges([3, 1]),
        lambda g: g.add_nodes(4),
        lambda g: g.remove_nodes([0]),
    ],
    ids=["add_edges", "remove_edges", "add_nodes", "remove_nodes"],
)
def test_changes_in_place_are_seen(change):
    g = random_graph()
    first = of_dgl.of_dgl(g)
    change(g)
    second = of_dgl.of_dgl(g)
    assert second is not first
    assert_same_edges(second, g)


@pytest.mark.parametrize(
    "derive",
    [
        lambda g: g.int(),
        lambda g: g.long(),
        lambda g: g.to("cpu"),
        lambda g: dgl.reverse(g, copy_edata=True),
        lambda g: g.formats(["coo"]),
        lambda g: g.formats(["csr"]),
        lambda g: g.formats(["csc"]),
        lambda g: g.clone(),
        copy.deepcopy,
        lambda g: pickle.loads(pickle.dumps(g)),
    ],
    ids=["int", "long", "to", "reverse", "coo", "csr", "csc", "clone", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("warm", [False, True], ids=["first", "after the original"])
def test_derived_graphs(derive, warm):
    """Some of them share frames, arrays or the index with the graph that they come from."""
    g = random_graph(idtype=torch.int32)
    g.create_formats_()
    if warm:
        of_dgl.of_dgl(g)
    derived = derive(g)
    for one in (derived, g, derived):
        reference = dgl.graph(one.formats(["coo", "csr", "csc"]).edges(order="eid"), num_nodes=30)
        assert_same_edges(of_dgl.of_dgl(one), reference)


def test_the_same_arrays_the_other_way_round():
    """A graph and its reverse share arrays that are a CSR by source in one and by destination in the
    other."""
    g = dgl.graph(("csr", (torch.tensor([0, 2, 2, 3]), torch.tensor([1, 2, 0]), [])), num_nodes=3)
    g = g.formats(["csr"])
    turned = copy.copy(g)  # shares the frames
    turned._graph = g._graph.reverse()
    assert turned.formats()["created"] == ["csc"]
    edges = of_dgl.of_dgl(g).edge_index
    assert torch.equal(of_dgl.of_dgl(turned).edge_index, edges.flip(0)) and edges[1].tolist() == [1, 2, 0]


def test_nothing_of_ours_is_pickled():
    g = random_graph()
    before = pickle.dumps(g)
    of_dgl.of_dgl(g)
    assert len(pickle.dumps(g)) == len(before) and b"dfgnn" not in pickle.dumps(g)


# ---- relations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("form", ["coo", "csr", "csc", None])
def test_relations_are_converted_once(conversions, index_dtype, form):
    g = heterograph(idtype=index_dtype)
    if form:
        g = g.formats([form])
        g.create_formats_()
    graphs = {etype: of_dgl.of_dgl(g[etype]) for etype in "xyz"}
    for etype in "xyzxyz":
        assert of_dgl.of_dgl(g[etype]) is graphs[etype]
        assert of_dgl.of_dgl(g[g.to_canonical_etype(etype)]) is graphs[etype]
    assert len(conversions) == 3
    plain = g.formats(["coo", "csr", "csc"])
    for etype in "xyz":
        assert_same_edges(graphs[etype], plain, etype)


def test_relations_of_a_changed_graph():
    g = heterograph()
    first = {etype: of_dgl.of_dgl(g[etype]) for etype in "xyz"}
    g.add_edges([0, 1], [2, 3], etype="x")
    assert_same_edges(of_dgl.of_dgl(g["x"]), g, "x")
    assert of_dgl.of_dgl(g["x"]) is not first["x"]
    g.add_nodes(3, ntype="a")
    for etype in "xyz":
        assert_same_edges(of_dgl.of_dgl(g[etype]), g, etype)


def test_relations_without_edges_of_a_changed_graph():
    """Relations without edges differ only in their numbers of nodes; the cache must not mix them up."""
    g = dgl.heterograph({("a", "x", "b"): ([], [])}, num_nodes_dict={"a": 2, "b": 3})
    assert (of_dgl.of_dgl(g["x"]).num_src, of_dgl.of_dgl(g["x"]).num_dst) == (2, 3)
    g.add_nodes(4, ntype="a")
    assert (of_dgl.of_dgl(g["x"]).num_src, of_dgl.of_dgl(g["x"]).num_dst) == (6, 3)


def test_hetero_graph_conv_converts_once(conversions):
    g = heterograph()
    layers = {
        etype: GATConv((4, 4), 3, 2, residual=etype == "x", allow_zero_in_degree=True) for etype in "xyz"
    }
    model = dgl.nn.pytorch.HeteroGraphConv(layers)
    feats = {"a": torch.randn(5, 4), "b": torch.randn(7, 4)}
    outs = [model(g, feats) for _ in range(3)]
    assert len(conversions) == 3 and torch.equal(outs[0]["b"], outs[2]["b"])
    block = dgl.to_block(g, {"a": torch.arange(5), "b": torch.arange(7)})
    sources = {key: feats[key][block.srcnodes[key].data[dgl.NID]] for key in feats}
    destinations = {key: feats[key][block.dstnodes[key].data[dgl.NID]] for key in feats}
    torch.testing.assert_close(model(block, (sources, destinations)), outs[0])


# ---- lifetime --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("etype", [None, "y"], ids=["graph", "relation"])
def test_a_conversion_dies_with_its_graph(etype):
    g = random_graph() if etype is None else heterograph()
    converted = weakref.ref(of_dgl.of_dgl(relation(g, etype)))
    gc.collect()
    assert converted() is not None
    del g
    gc.collect()
    assert converted() is None


def test_an_entry_is_gone_before_its_address_is_given_again():
    """Python gives the address of a dead object to the next one: neither may leave anything to be found."""
    graphs, frames = len(of_dgl._from_dgl), len(of_dgl._of_frame)  # of graphs that other tests keep
    for num_nodes in range(2, 30):
        g = dgl.graph((torch.arange(num_nodes), torch.arange(num_nodes).flip(0)))
        assert of_dgl.of_dgl(g).num_src == num_nodes
        assert torch.equal(of_dgl.of_dgl(g).edge_index, torch.stack(g.edges()))
        assert (len(of_dgl._from_dgl), len(of_dgl._of_frame)) == (graphs + 1, frames + 1)
        del g
        assert (len(of_dgl._from_dgl), len(of_dgl._of_frame)) == (graphs, frames)


@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
def test_a_loop_over_sampled_blocks_does_not_leak():
    g = random_graph(200, 2000)
    layers = [GATConv(6, 4, 2), GATConv(8, 3, 1)]
    loader = dgl.dataloading.DataLoader(
        g, torch.arange(200), dgl.dataloading.NeighborSampler([4, 4]), batch_size=20
    )
    feat, converted, sizes = torch.randn(200, 6), [], []
    for _ in range(2):
        for inputs, _, blocks in loader:
            h = layers[0](blocks[0], feat[inputs]).flatten(1)
            layers[1](blocks[1], h).sum().backward()
            converted += [weakref.ref(of_dgl.of_dgl(block)) for block in blocks]
            sizes.append(len(of_dgl._from_dgl))
            del inputs, blocks, h
    gc.collect()
    assert len(converted) == 40 and sum(ref() is not None for ref in converted) <= 2
    assert max(sizes) - min(sizes) <= 4


def test_threads():
    g = heterograph()
    relations = {etype: g[etype] for etype in "xyz"}

    def work(number):
        for _ in range(50):
            for etype in "xyz":
                assert of_dgl.of_dgl(relations[etype]).num_edges == g.num_edges(etype)
                assert of_dgl.of_dgl(g[etype]).num_edges == g.num_edges(etype)
            one = dgl.graph((torch.arange(5), torch.arange(5)))
            assert of_dgl.of_dgl(one).num_edges == 5

    in_threads(work)


def _edges_in_child(g, queue):
    queue.put(of_dgl.of_dgl(g).edge_index.tolist())


@some(["fork"], ["fork", "spawn"], "method")
def test_other_processes(method):
    """A forked one has the conversion already; a spawned one gets the pickled graph."""
    g = random_graph()
    expected = of_dgl.of_dgl(g).edge_index.tolist()
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=_edges_in_child, args=(g, queue))
    process.start()
    actual = queue.get()
    process.join()
    assert actual == expected and process.exitcode == 0


# ---- malformed structure, on which DGL reads out of bounds -----------------------------------------------


NO_IDS = torch.tensor([], dtype=torch.int64)
FAR = 50_000_000


@pytest.mark.parametrize(
    "data, message",
    [
        ((torch.tensor([-FAR, 1]), torch.tensor([0, 1])), "expected values in"),
        ((torch.tensor([0, 1]), torch.tensor([-FAR, 1])), "expected values in"),
        (("csc", (torch.tensor([0, FAR, 2]), torch.tensor([0, 1]), NO_IDS)), "do not decrease"),
        (("csc", (torch.tensor([0, 1, 2]), torch.tensor([-FAR, 1]), NO_IDS)), "expected values in"),
        (("csc", (torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.tensor([FAR, 0]))), "eids"),
        (("csr", (torch.tensor([0, FAR, 2]), torch.tensor([0, 1]), NO_IDS)), "do not decrease"),
        (("csr", (torch.tensor([0, 1, 2]), torch.tensor([0, -FAR]), NO_IDS)), "expected values in"),
        (("csr", (torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.tensor([0, 0]))), "eids"),
    ],
    ids=[
        "coo src",
        "coo dst",
        "csc indptr",
        "csc indices",
        "csc eids",
        "csr indptr",
        "csr indices",
        "csr eids",
    ],
)
def test_malformed_blocks_are_refused(data, message):
    block = dgl.create_block(data, 2, 2)
    with pytest.raises(ValueError, match=message):
        GATConv(3, 2, 1)(block, torch.randn(2, 3))


def test_blocks_that_lack_destinations_are_refused():
    """dgl.to_block makes such a block if nodes other than the given destinations have in-edges."""
    block = dgl.to_block(random_graph(), torch.arange(5))
    with pytest.raises(ValueError, match="expected values in"):
        GATConv(3, 2, 1)(block, torch.randn(block.num_src_nodes(), 3))
