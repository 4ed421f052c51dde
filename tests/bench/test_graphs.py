"""The benchmark's graphs: synthetic ones against published figures, and data sets of other libraries."""

import math
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

np = pytest.importorskip("numpy", reason="the benchmarks need numpy")

from dfgnn.bench import datasets, graphs, twins  # noqa: E402


def _degrees(src, dst, n):
    return torch.bincount(torch.cat([src, dst]).long(), minlength=n)


def _check_simple(src, dst, n):
    """Every undirected edge once, no loops."""
    low, high = torch.minimum(src, dst).long(), torch.maximum(src, dst).long()
    assert low.min() >= 0 and high.max() < n and bool((low < high).all())
    assert len(torch.unique(low * n + high)) == len(src)


# ---- twins of batches ------------------------------------------------------------------------------


def _components(src, dst, n):
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.coo_array((np.ones(len(src)), (src.numpy(), dst.numpy())), shape=(n, n))
    return sparse.csgraph.connected_components(matrix, directed=False)[1]


@pytest.mark.parametrize(
    "twin, count, nodes, edges, tolerance",
    [
        (twins.cluster, 400, 117.2, 4303.9 / 2, 0.03),
        (twins.molhiv, 2000, 25.51, 27.47, 0.03),
        (twins.collab, 1500, 74.49, 2457.2, 0.08),  # half of the edges are in one graph of twenty
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_batches_have_the_published_averages(twin, count, nodes, edges, tolerance):
    src, dst, n = twin(count)
    _check_simple(src, dst, n)
    assert n / count == pytest.approx(nodes, rel=tolerance)
    assert len(src) / count == pytest.approx(edges, rel=tolerance)
    # The graphs are connected, and apart from each other.
    assert len(np.unique(_components(src, dst, n))) == count
    again = twin(count)
    assert torch.equal(src, again[0]) and torch.equal(dst, again[1])


def test_superpixels_have_eight_neighbours():
    count = 400
    src, dst, n = twins.mnist(count)
    _check_simple(src, dst, n)
    assert n / count == pytest.approx(70.6, rel=0.01)
    assert 8 * n / count == pytest.approx(564.5, rel=0.01)  # directed edges, as published
    degree = _degrees(src, dst, n)
    assert degree.min() == 8
    # Each point has edges to its 8 nearest, and is among the 8 nearest of few others, so that degrees stay
    # low. Two in three such edges go both ways, and are one undirected edge.
    assert degree.max() <= 24
    assert 0.55 < len(src) / (8 * n) < 0.65
    sizes = np.bincount(_components(src, dst, n))
    assert sizes.max() <= 75


def test_molecules_have_the_degrees_of_molhiv():
    src, dst, n = twins.molhiv(2000)
    share = (torch.bincount(_degrees(src, dst, n), minlength=5) / n).tolist()
    # Of all 41,127 molecules: 0.2 % without a bond, 0.04 % with more than 4.
    for found, expected in zip(share[1:], (0.197, 0.470, 0.307, 0.024), strict=True):
        assert found == pytest.approx(expected, abs=0.07)


def test_collaborations_are_cliques_around_an_author():
    count = 1500
    src, dst, n = twins.collab(count)
    graph = _components(src, dst, n)
    sizes, degree = np.bincount(graph), _degrees(src, dst, n).numpy()
    assert sizes.min() >= 32 and sizes.max() == 492
    assert np.median(sizes) == pytest.approx(52, rel=0.05)
    author = np.unique(graph, return_index=True)[1]
    assert np.array_equal(degree[author], sizes[graph[author]] - 1)
    # Without the author, who is joined to all, a graph falls into cliques: the number of members of a node's
    # clique (itself included) is the node's degree (the author included).
    keep = ~np.isin(src.numpy(), author)
    group = _components(src[keep], dst[keep], n)
    members = np.bincount(group)[group]
    others = np.setdiff1d(np.arange(n), author)
    assert np.array_equal(degree[others], members[others])
    # Published density: a tenth of the graphs below 0.16, half below 0.46, a tenth complete.
    density = np.bincount(graph, degree) / (sizes * (sizes - 1))
    assert np.median(density) == pytest.approx(0.46, abs=0.06)


# ---- extreme shapes --------------------------------------------------------------------------------


def test_star_and_chain():
    degree = _degrees(*twins.star(50))
    assert degree[0] == 50 and bool((degree[1:] == 1).all()) and len(degree) == 51
    degree = _degrees(*twins.chain(50))
    assert degree.tolist() == [1, *[2] * 48, 1]


@pytest.mark.parametrize("n, mean", [(20_000, 8), (300, 60), (60, 50), (10, 9), (7, 0)])
def test_erdos_renyi_has_the_edges_that_were_asked_for(n, mean):
    src, dst, nodes = twins.erdos_renyi(n, mean)
    assert (nodes, len(src)) == (n, n * mean // 2)
    if mean == 0:
        return
    _check_simple(src, dst, n)
    degree = _degrees(src, dst, n).double()
    # Binomial degrees; the variance of n samples is known to a factor of 1 +- 6 sqrt(2 / n).
    expected = mean * (1 - mean / (n - 1))
    slack = 6 * math.sqrt(2 / n)
    assert (1 - slack) * expected <= float(degree.var(correction=0)) <= (1 + slack) * expected
    assert torch.equal(twins.erdos_renyi(n, mean)[0], src)


def test_names_of_erdos_renyi():
    sweep = twins.expand("er")
    sizes = [tuple(map(int, name.split("-")[1:])) for name in sweep]
    assert [mean for _, mean in sizes] == [2, 8, 32, 128, 512]
    assert all(abs(n * mean - 4_000_000) < mean for n, mean in sizes)
    assert twins.expand("cora~") == ("cora~",)
    graph, count = graphs.read("er-500-4")
    assert (graph.num_dst, graph.num_edges, count) == (500, 500 * 5, 1)
    with pytest.raises(ValueError, match="at most 9, got 20"):
        graphs.read("er-10-20")
    for name in ("er", "er-10", "er-0-4", "er-a-4"):
        with pytest.raises(ValueError, match=f"er-N-D or one of .* got '{name}'"):
            graphs.read(name)


def test_number_of_graphs_is_known(tmp_path):
    assert graphs.read("collab~")[1] == 256
    assert graphs.read("molhiv~")[1] == 1024
    batch = {"node_ptr": [0, 2, 4, 5], "edge_ptr": [0, 1, 2, 2], "src": [0, 0], "dst": [1, 1]}
    np.savez(tmp_path / "batch.npz", **batch)
    graph, count = graphs.read(str(tmp_path / "batch.npz"))
    assert (count, graph.num_dst, graph.num_edges) == (3, 5, 4 + 5)


# ---- data sets by name -----------------------------------------------------------------------------


def test_planetoid_through_pyg(tmp_path):
    pytest.importorskip("torch_geometric")
    folder = graphs.data_folder()
    if folder is None or not (folder / "planetoid" / "Cora").is_dir():
        pytest.skip("set DFGNN_DATA to a folder with planetoid/Cora (docs/benchmarks.md)")
    shutil.copytree(folder / "planetoid" / "Cora", tmp_path / "Cora")
    graph, count = graphs.read("pyg:Planetoid/Cora", root=tmp_path)
    assert (graph.num_dst, graph.num_edges, count) == (2708, 10556 + 2708, 1)
    assert graph.degree_stats().max == 168 + 1


@pytest.mark.parametrize(
    "name, module", [("pyg:KarateClub", "torch_geometric"), ("dgl:KarateClubDataset", "dgl")]
)
def test_classes_without_a_folder(name, module, tmp_path, monkeypatch):
    monkeypatch.setenv("DGLBACKEND", "pytorch")
    pytest.importorskip(module)
    if module == "dgl":
        pytest.importorskip("networkx")
    graph, count = graphs.read(name, root=tmp_path)
    assert (graph.num_dst, graph.num_edges, count) == (34, 2 * 78 + 34, 1)


def _ogb(monkeypatch, kind, items):
    """Puts a stand-in for ogb 1.3 with this data set into sys.modules. Returns the list of the names that it
    downloads."""

    class Dataset:
        def __init__(self, name, root):
            if name.endswith("-missing"):
                raise RuntimeError("cannot download")
            if not Path(root, name).exists():
                Path(root, name).mkdir()
                downloads.append(name)

        def __len__(self):
            return len(items)

        def __getitem__(self, i):
            return items[i]

    downloads = []
    module = ModuleType(f"ogb.{kind.lower()}")
    setattr(module, f"{kind}Dataset", Dataset)
    monkeypatch.setitem(sys.modules, "ogb", ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return downloads


def _item(n, *edges):
    return {"edge_index": np.array(edges, dtype=np.int64).reshape(-1, 2).T, "num_nodes": n}


def test_graphs_of_ogb_become_a_batch(tmp_path, monkeypatch):
    label = np.zeros(1)
    items = [(_item(3, (0, 1), (1, 0), (1, 2)), label), (_item(1), label), (_item(2, (1, 0)), label)]
    downloads = _ogb(monkeypatch, "GraphPropPred", items)
    graph, count = graphs.read("ogb:ogbg-some", root=tmp_path)
    assert (tmp_path / "ogbg-some").is_dir()
    assert count == 3
    loops = [(i, i) for i in range(6)]
    edges = [(0, 1), (1, 0), (1, 2), (2, 1), (4, 5), (5, 4)]
    assert sorted(zip(*graph.edge_index.tolist())) == sorted(edges + loops)
    graph, count = graphs.read("ogb:ogbg-some@2", root=tmp_path)
    assert (count, graph.num_dst, graph.num_edges) == (2, 4, 4 + 4)
    assert downloads == ["ogbg-some"]  # once: the second call reads what the first left in root


def test_other_kinds_of_ogb(monkeypatch, tmp_path):
    _ogb(monkeypatch, "LinkPropPred", [_item(3, (0, 2))])
    assert graphs.read("ogb:ogbl-some", root=tmp_path)[0].num_edges == 2 + 3
    _ogb(monkeypatch, "NodePropPred", [({"edge_index_dict": {}}, None)])
    with pytest.raises(ValueError, match=r"ogb:ogbn-some: expected graphs of one kind .*'edge_index'"):
        graphs.read("ogb:ogbn-some", root=tmp_path)
    with pytest.raises(OSError, match="ogb:ogbn-missing: RuntimeError: cannot download"):
        graphs.read("ogb:ogbn-missing", root=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ogbl-some"]
    with pytest.raises(ValueError, match="starts with ogbn-, ogbl-, ogbg-"):
        graphs.read("ogb:arxiv")
    with pytest.raises(ValueError, match="number of graphs behind @, got 'ogb:ogbg-some@0'"):
        graphs.read("ogb:ogbg-some@0")


def test_graphs_of_several_kinds_are_refused():
    pytest.importorskip("torch_geometric")
    with pytest.raises(ValueError, match="pyg:FakeHeteroDataset: expected graphs of one kind"):
        graphs.read("pyg:FakeHeteroDataset")
    with pytest.raises(ValueError, match=r"expected a class of torch_geometric.datasets, got 'Corra'"):
        graphs.read("pyg:Corra")


@pytest.mark.parametrize("name, module", [("ogb:ogbn-arxiv", "ogb"), ("pyg:Reddit", "torch_geometric")])
def test_missing_library_is_named(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"{name} needs {module}: pip install {module}"):
        datasets.load(name, graphs.ROOT)
