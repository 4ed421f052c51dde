"""What DGL's names promise beyond a comparison with DGL: ids, files, pickles, samples and numbers."""

import copy
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import dfgnn.compat as dgl
from dfgnn import ops
from dfgnn.compat import sparse as dglsp
from dfgnn.compat.data import CiteseerGraphDataset
from dfgnn.compat.dataloading import (
    DataLoader,
    GraphDataLoader,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
)
from dfgnn.nn.dgl import DGLError

SRC, DST = [0, 1, 2, 2, 3, 3], [1, 2, 0, 1, 1, 1]


def drawn(idtype=torch.int64):
    g = dgl.graph((SRC, DST), num_nodes=5, idtype=idtype)
    g.ndata["x"], g.edata["w"] = torch.arange(10.0).view(5, 2), torch.arange(6.0)
    return g


# ---- ids --------------------------------------------------------------------------------------------------

NODES = {
    "in_degrees": lambda g, x: g.in_degrees(x),
    "out_degrees": lambda g, x: g.out_degrees(x),
    "in_edges": lambda g, x: g.in_edges(x),
    "out_edges": lambda g, x: g.out_edges(x),
    "edge_ids": lambda g, x: g.edge_ids(x, 1),
    "has_edges_between": lambda g, x: g.has_edges_between(x, 1),
    "nodes[x]": lambda g, x: g.nodes[x].data["x"],
    "apply_nodes": lambda g, x: g.apply_nodes(lambda nodes: {"x": nodes.data["x"]}, x),
    "pull": lambda g, x: g.pull(x, dgl.function.copy_u("x", "m"), dgl.function.sum("m", "y")),
    "remove_nodes": lambda g, x: dgl.remove_nodes(g, x),
    "node_subgraph": lambda g, x: dgl.node_subgraph(g, x),
    "in_subgraph": lambda g, x: dgl.in_subgraph(g, x),
    "to_block": lambda g, x: dgl.to_block(g, x),
    "NeighborSampler": lambda g, x: NeighborSampler([2]).sample(g, x),
}
EDGES = {
    "find_edges": lambda g, x: g.find_edges(x),
    "edges[x]": lambda g, x: g.edges[x].data["w"],
    "remove_edges": lambda g, x: dgl.remove_edges(g, x),
    "edge_subgraph": lambda g, x: dgl.edge_subgraph(g, x),
    "send_and_recv": lambda g, x: g.send_and_recv(
        x, dgl.function.copy_e("w", "m"), dgl.function.sum("m", "y")
    ),
}
MASKS = {"node_subgraph", "edge_subgraph"}  # which take them, as in DGL


@pytest.mark.parametrize("name", [*NODES, *EDGES])
def test_ids(name):
    call, size = (NODES | EDGES)[name], 5 if name in NODES else 6
    wrong = [
        (torch.tensor([True, False]), "expected ids of int32 or int64, got torch.bool"),
        ([True, False], "expected ids of int32 or int64, got torch.bool"),
        (torch.tensor([1.0]), "expected ids of int32 or int64, got torch.float32"),
        ([0.5], "expected ids of int32 or int64"),
        (torch.tensor([1], dtype=torch.int16), "expected ids of int32 or int64, got torch.int16"),
        ([0, size], f"expected ids from 0 to {size - 1}, got {size}"),
        ([-1], f"expected ids from 0 to {size - 1}, got -1"),
        (torch.zeros(1, 1, dtype=torch.int64), "expected ids in one dimension"),
        ("all of them", "expected ids, a number or a vector of integers, got str"),
    ]
    # What takes masks too, and what takes the name of a type in their place.
    for x, message in wrong[name in MASKS : -1 if "[x]" in name else None]:
        with pytest.raises(DGLError, match=message):
            call(drawn(), x)
    for idtype in (torch.int32, torch.int64):
        call(drawn(), torch.tensor([1, 0, 2] if name == "to_block" else [2], dtype=idtype))
        call(drawn(idtype), [1, 0, 2] if name == "to_block" else [3])


def test_dtypes_of_ids():
    g = drawn(torch.int32)
    found = [*g.edges(form="all"), g.in_degrees(), g.nodes(), g.in_edges([1])[0], *g.adj_tensors("csr")]
    assert {x.dtype for x in found} == {torch.int32} and g.long().nodes().dtype == torch.int64
    part = dgl.node_subgraph(g, [0, 1])
    assert part.idtype == torch.int32 and part.ndata["_ID"].dtype == torch.int32
    assert dgl.graph((torch.tensor(SRC).int(), torch.tensor(DST).int())).idtype == torch.int32


@pytest.mark.parametrize("call, message", [
    (lambda: dgl.graph(([0, 1], [0, -1])), "not negative"),
    (lambda: dgl.graph(([0.5], [1.0])), "int32 or int64"),
    (lambda: dgl.graph(([0, 1], [0])), "as many sources as destinations"),
    (lambda: dgl.graph(([0], [3]), num_nodes=3), "at least 4"),
    (lambda: dgl.graph(("csr", ([0, 1], [1], []))), "expected 1, those of indptr"),
    (lambda: dgl.graph(("csr", ([0, 2], [0], []))), "an indptr that rises"),
    (lambda: dgl.graph(("csr", ([0, 2], [0, 0], [1, 1]))), "a permutation"),
    (lambda: dgl.graph(([0], [1]), idtype=torch.int16), "torch.int32 or torch.int64"),
    (lambda: dgl.heterograph({("a", "r", "b"): ([0], [1])}, {"a": 1}), "a number of all types"),
    (lambda: dgl.heterograph({}), "at least one relation"),
    (lambda: dgl.node_subgraph(drawn(), [1, 1]), "different ids"),
    (lambda: dgl.to_block(drawn(), [0]), "all nodes that have edges"),
    (lambda: dgl.batch([drawn(), drawn().int()]), "one dtype of ids"),
    (lambda: drawn().update_all(dgl.function.copy_u("x", "m"), dgl.function.sum("n", "y")), "messages 'm'"),
    (lambda: drawn().edge_ids(0, 0), "with an edge between them, got 0, 0"),
    (lambda: dgl.broadcast_nodes(dgl.batch([drawn()] * 3), torch.ones(2, 1)), "3 rows, one per graph"),
])  # fmt: skip
def test_bad_input(call, message):
    with pytest.raises(DGLError, match=message):
        call()


# ---- pickles, files -----------------------------------------------------------------------------------


def same_graph(a, b):
    assert type(a) is type(b) and a.idtype == b.idtype and a.canonical_etypes == b.canonical_etypes
    for relation in a.canonical_etypes:
        assert all(map(torch.equal, a.edges(etype=relation), b.edges(etype=relation)))
    for x, y in zip((*a._node_frames, *a._edge_frames), (*b._node_frames, *b._edge_frames)):
        assert list(x) == list(y) and all(torch.equal(x[name], y[name]) for name in x)


def typed():
    g = dgl.heterograph({("a", "r", "b"): ([0, 1], [1, 1]), ("b", "s", "b"): ([], [])}, {"a": 2, "b": 3})
    g.nodes["b"].data["x"] = torch.randn(3, 2)
    g.edges["r"].data["w"] = torch.randn(2)
    return g


GRAPHS = {
    "graph": drawn, "int32": lambda: drawn(torch.int32), "typed": typed, "relation": lambda: typed()["r"],
    "block": lambda: dgl.to_block(drawn()), "part": lambda: dgl.node_subgraph(drawn(), [2, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_pickles_and_files(tmp_path, name):
    g = GRAPHS[name]()
    same_graph(pickle.loads(pickle.dumps(g)), g)
    same_graph(copy.deepcopy(g), g)
    path = tmp_path / "made" / "graphs.bin"
    dgl.save_graphs(str(path), [g, g], {"y": torch.ones(2)})
    (first, _), labels = dgl.load_graphs(str(path))
    assert torch.equal(labels["y"], torch.ones(2)) and len(dgl.load_graphs(str(path), [1])[0]) == 1
    if name != "relation":  # of which the file does not say what it was a part of
        same_graph(first, g)


def test_other_files(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"DGL's own format")
    with pytest.raises(DGLError, match="was not written by dfgnn"):
        dgl.load_graphs(str(tmp_path / "x.bin"))
    with pytest.raises(DGLError, match="there is none"):
        dgl.load_graphs(str(tmp_path / "y.bin"))


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, k):
        g = drawn()
        g.ndata["x"] = torch.full((5, 2), float(k))
        return g, k


def test_loaders_with_workers():
    found = [
        (g.ndata["x"].sum().item(), k.tolist())
        for g, k in GraphDataLoader(Samples(), batch_size=2, num_workers=1)
    ]
    assert found == [(10.0, [0, 1]), (50.0, [2, 3])]
    loader = DataLoader(
        drawn(), torch.arange(4), MultiLayerFullNeighborSampler(1), batch_size=2, num_workers=1
    )
    assert [blocks[0].num_edges() for _, _, blocks in loader] == [5, 1]


def test_values_of_lazy_matrices_are_copied():
    q = torch.randn(20, 8, 2)
    a = dglsp.spmatrix(torch.randint(20, (2, 60)), shape=(20, 20))
    for made in (
        lambda: dglsp.bsddmm(a, q, q.transpose(0, 1)),
        lambda: dglsp.bsddmm(a, q, q.transpose(0, 1)).softmax(),
    ):
        for copied in (copy.deepcopy(made()), pickle.loads(pickle.dumps(made()))):
            assert torch.equal(copied.val, made().val)


# ---- samples ------------------------------------------------------------------------------------------


def sampled(g, seeds, **options):
    inputs, outputs, (block,) = NeighborSampler(**{"fanouts": [2], **options}).sample(g, seeds)
    assert outputs is seeds and torch.equal(block.srcdata["_ID"], inputs)
    assert torch.equal(block.dstdata["x"], g.ndata["x"][block.dstdata["_ID"]])
    src, dst, eids = block.edges(form="all")
    eids = block.edata["_ID"]
    assert torch.equal(block.edata["w"], g.edata["w"][eids])
    ends = g.find_edges(eids)
    assert torch.equal(ends[0], inputs[src]) and torch.equal(ends[1], block.dstdata["_ID"][dst])
    return eids.tolist(), dst.tolist()


def test_samples():
    torch.manual_seed(0)
    g = drawn()  # edges 0, 3, 4, 5 lead to node 1
    counts = torch.zeros(6)
    for _ in range(600):
        eids, _ = sampled(g, torch.tensor([1, 2]))
        assert len(set(eids)) == len(eids) == 3 and 1 in eids
        counts[eids] += 1
    assert (counts[[0, 3, 4, 5]] / 600 - 0.5).abs().max() < 0.08 and counts[1] == 600
    g.edata["p"] = torch.tensor([0.0, 1, 1, 3, 1, 0])
    g.edata["m"] = torch.tensor([0, 1, 1, 1, 1, 0], dtype=torch.bool)
    first = torch.zeros(6)
    for _ in range(600):
        eids, _ = sampled(g, torch.tensor([1]), fanouts=[1], prob="p")
        first[eids] += 1
    assert first[[0, 5]].sum() == 0 and abs(first[3] / 600 - 0.75) < 0.08
    assert sorted(sampled(g, torch.tensor([1]), fanouts=[3], mask="m")[0]) == [3, 4]
    for options in ({}, {"prob": "p"}):
        eids, dst = sampled(g, torch.tensor([4, 1]), fanouts=[5], replace=True, **options)
        assert len(eids) == 5 and set(eids) <= {0, 3, 4, 5} and set(dst) == {1}
    inputs, _, blocks = NeighborSampler([-1]).sample(g, torch.tensor([1]), exclude_eids=torch.tensor([3, 0]))
    assert sorted(blocks[0].edata["_ID"].tolist()) == [4, 5] and sorted(inputs.tolist()) == [1, 3]


def test_repeated_seeds_have_edges_each():
    """Sampling gives each repeated seed its edges, as in DGL 1.1.3 (2.1.0 gives wrong degrees); DGL's
    to_block gives all edges to the last one."""
    eids, dst = sampled(drawn(), torch.tensor([1, 1, 2]), fanouts=[-1])
    assert sorted(zip(dst, eids)) == [(0, 0), (0, 3), (0, 4), (0, 5), (1, 0), (1, 3), (1, 4), (1, 5), (2, 1)]
    block = dgl.to_block(drawn(), torch.tensor([1, 2, 0, 1]))
    assert block.edges()[1].tolist() == [3, 1, 2, 3, 3, 3] and block.srcdata["_ID"].tolist() == [
        1,
        2,
        0,
        1,
        3,
    ]


def test_samples_of_several_types():
    g = dgl.heterograph(
        {("a", "r", "b"): ([0, 1, 2], [0, 0, 1]), ("b", "s", "a"): ([0, 1], [2, 0])}, {"a": 3, "b": 2}
    )
    g.nodes["a"].data["x"] = torch.arange(3.0)
    loader = DataLoader(
        g, {"b": torch.tensor([0, 1])}, NeighborSampler([-1, {"r": -1, "s": 0}]), batch_size=2
    )
    ((inputs, outputs, blocks),) = loader
    assert {k: sorted(x.tolist()) for k, x in inputs.items()} == {"a": [0, 1, 2], "b": [0, 1]}
    assert outputs["b"].tolist() == [0, 1] and [b.num_edges("r") for b in blocks] == [3, 3]
    assert torch.equal(blocks[0].srcnodes["a"].data["x"], inputs["a"].float())


# ---- numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, offset",
    [(torch.float32, 1e3), (torch.float32, 1e5), (torch.bfloat16, 800.0), (torch.float16, 800.0)],
)
@pytest.mark.parametrize("op", ["add", "sub", "div"])
@pytest.mark.parametrize("edges", [300, 20000])
def test_sums_do_not_cancel(op, edges, dtype, offset):
    """The error of a sum of messages is that of plain PyTorch in the same precision."""
    torch.manual_seed(0)
    src, dst = torch.randint(50, (2, edges))
    g = dgl.graph((src, dst), num_nodes=50)
    x, y = torch.randn(50, 3) + offset, torch.randn(edges, 3) + offset
    x, y = x.to(dtype), (-y if op == "add" else y).to(dtype)
    message = {"add": torch.add, "sub": torch.sub, "div": torch.div}[op]
    right = torch.zeros(50, 3, dtype=torch.float64).index_add(0, dst, message(x.double()[src], y.double()))
    plain = torch.zeros(50, 3).index_add(0, dst, message(x[src], y).float()).to(dtype).double()
    degree = torch.bincount(dst, minlength=50).clamp(min=1).view(-1, 1)
    for found, scale in (
        (getattr(ops, f"u_{op}_e_sum")(g, x, y), 1),
        (getattr(ops, f"u_{op}_e_mean")(g, x, y), degree),
    ):
        error = (found.double() * scale - right).norm()
        assert error <= 2 * (plain - right).norm() + 4 * torch.finfo(dtype).eps * right.norm()


def test_means_do_not_overflow():
    g = dgl.graph((torch.arange(100), torch.zeros(100).long()), num_nodes=100)
    for dtype in (torch.float16, torch.bfloat16):
        g.ndata["x"] = torch.full((100, 1), 1000.0, dtype=dtype)
        g.edata["w"] = torch.full((100, 1), 1e-3, dtype=dtype)
        assert ops.copy_u_mean(g, g.ndata["x"])[0] == 1000 and dgl.mean_nodes(g, "x") == 1000
        assert ops.u_mul_e_mean(g, g.ndata["x"], g.edata["w"])[0].sub(1).abs() < 1e-2
        small = torch.full((100, 1), 1e-5, dtype=dtype)
        out = ops.u_div_e_sum(g, g.edata["w"], small)[0].double()
        assert abs(out / (100 * g.edata["w"][0].double() / small[0].double()) - 1) < 1e-2


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_softmax_of_some_edges(idtype):
    g, eids = drawn(), torch.tensor([4, 0, 3, 1], dtype=idtype)
    logits = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    found = ops.edge_softmax(g, logits, eids)
    right = torch.cat([logits[:3].softmax(0), torch.ones(1, 2)])
    torch.testing.assert_close(found, right)
    weight = torch.randn(4, 2, dtype=torch.float64)
    got, want = (
        torch.autograd.grad((x * weight).sum(), logits, retain_graph=True)[0] for x in (found, right)
    )
    torch.testing.assert_close(got, want)
    assert torch.equal(ops.edge_softmax(g, torch.ones(6), "__ALL__"), ops.edge_softmax(g, torch.ones(6)))
    for wrong in (torch.tensor([True] * 4), torch.tensor([0.0] * 4), torch.tensor([0, 1, 2, 6])):
        with pytest.raises(ValueError, match="edge_softmax: eids: expected"):
            ops.edge_softmax(g, logits, wrong)


# ---- networkx, data sets ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels", [["b", "a", "c"], ["2", "0", "10"], [2.0, 0.0, 1.0], [(1, 0), (0, 0), (0, 1)], [2, 0, 1]]
)
def test_numbers_of_networkx_nodes(labels):
    networkx = pytest.importorskip("networkx")
    graph = networkx.DiGraph([(labels[0], labels[1]), (labels[1], labels[2])])
    networkx.set_edge_attributes(
        graph, {(labels[0], labels[1]): {"id": 1, "w": 0.5}, (labels[1], labels[2]): {"id": 0, "w": 2.5}}
    )
    networkx.set_node_attributes(graph, {label: float(k) for k, label in enumerate(labels)}, "x")
    place = {label: k for k, label in enumerate(sorted(labels))}
    g = dgl.from_networkx(graph, ["x"], ["w"], "id")
    assert torch.stack(g.edges(), 1).tolist() == [
        [place[labels[1]], place[labels[2]]],
        [place[labels[0]], place[labels[1]]],
    ]
    assert g.edata["w"].tolist() == [2.5, 0.5]
    assert g.ndata["x"].tolist() == [float(labels.index(label)) for label in sorted(labels)]


@pytest.mark.skipif(not os.environ.get("DFGNN_DATA"), reason="DFGNN_DATA is not set")
def test_citations_are_those_of_dgl(tmp_path, monkeypatch):
    """Citeseer, whose file has loops, which torch_geometric drops."""
    pytest.importorskip("torch_geometric")
    raw = Path(os.environ["DFGNN_DATA"]) / "planetoid" / "CiteSeer" / "raw"
    if not raw.is_dir():
        pytest.skip(f"there is no {raw}")
    theirs = pytest.importorskip("dgl").data
    shutil.copytree(raw, tmp_path / "ours/CiteSeer/raw")
    download = lambda self: shutil.copytree(raw, self.raw_path, dirs_exist_ok=True)  # noqa: E731
    monkeypatch.setattr(theirs.CiteseerGraphDataset, "download", download)
    right = theirs.CiteseerGraphDataset(str(tmp_path / "theirs"), verbose=False)
    found = CiteseerGraphDataset(str(tmp_path / "ours"), verbose=False)
    assert found.num_classes == right.num_classes and len(found) == 1
    a, b = found[0], right[0]
    assert sorted(zip(*(x.tolist() for x in a.edges()))) == sorted(zip(*(x.tolist() for x in b.edges())))
    for name in b.ndata:
        torch.testing.assert_close(a.ndata[name], b.ndata[name])
