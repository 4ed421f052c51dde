"""Graphs of a weather model and sampled mini-batches: sizes, degrees, and where the ends are."""

import pytest
import torch
from covering import some

np = pytest.importorskip("numpy", reason="the benchmarks need numpy")

from dfgnn.bench import blocks, graphs  # noqa: E402


def test_icosahedra_keep_the_edges_of_all_levels():
    points, edges = blocks.icosahedra(2)
    assert len(points) == 162 and len(edges) == 30 + 120 + 480
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1)
    assert len(np.unique(np.sort(edges, 1), axis=0)) == len(edges)
    length = np.linalg.norm(points[edges[:, 0]] - points[edges[:, 1]], axis=1)
    for level, begin, end in ((0, 0, 30), (1, 30, 150), (2, 150, 630)):
        assert (abs(length[begin:end] * 2**level / 1.05 - 1) < 0.25).all(), level


@some(["mesh-decoder"], ["mesh-encoder", "mesh-decoder"])
def test_grid_and_mesh_are_joined_where_they_are_near(name):
    pytest.importorskip("scipy", reason="nearest points need scipy")
    src, dst, num_src, num_dst = blocks.make(name, None)
    mesh, grid = blocks.icosahedra(6)[0], blocks.spiral(542_080)
    assert {num_src, num_dst} == {len(mesh), len(grid)}
    a, b = (grid, mesh) if num_src == len(grid) else (mesh, grid)
    assert np.linalg.norm(a[src] - b[dst], axis=1).max() < 0.03
    assert len(np.unique(src.astype(np.int64) * num_dst + dst)) == len(src)
    if name == "mesh-decoder":
        assert (np.bincount(dst, minlength=num_dst) == 3).all()
    else:
        assert 1_050_000 < len(src) < 1_130_000


def test_the_processor_is_that_of_the_published_sizes():
    graph, count = graphs.read("mesh-processor")
    assert (graph.num_src, graph.num_dst, graph.num_edges, count) == (40_962, 40_962, 327_660, 1)


def test_sampled_rows_are_distinct_neighbours_up_to_the_fanout(tmp_path):
    generator = np.random.default_rng(1)
    matrix = generator.random((300, 300)) < 0.05
    indptr = np.r_[0, matrix.sum(1).cumsum()]
    indices = np.nonzero(matrix)[1]
    src, dst, n, m = blocks.sampled(indptr, indices, seeds=10, fanout=(6, 3))
    assert n == m and src.max() < n and dst.max() < n
    degree = np.bincount(dst, minlength=n)
    full = matrix.sum(1)
    assert len(np.unique(src * n + dst)) == len(src)  # none twice
    # The seeds come first; nodes that only the last hop reached have no edges.
    assert degree[:10].max() <= 6 and degree[10:].max() <= 3
    assert (degree[:10] == np.minimum(full[_nodes(indptr, 10)], 6)).all()
    assert (degree == 0).any()


def _nodes(indptr, seeds):
    return np.random.default_rng(0).choice(len(indptr) - 1, seeds, replace=False)


def test_a_mini_batch_of_any_graph_by_name():
    graph, _ = graphs.read("sampled:cora~")
    assert graph.num_src == graph.num_dst and 1024 < graph.num_src <= 2708
    assert int(graph.csr().indptr.diff().max()) <= 15
    assert torch.equal(graph.edge_index, graphs.read("sampled:cora~")[0].edge_index)
