"""The right values where libraries give others: docs/where_libraries_differ.md.

A test that also holds what a library does names its version, and leaves that part out with another one.
"""

import copy
import importlib.util
import random

import pytest
import torch
from covering import EXHAUSTIVE, exhaustive, some
from many_terms import DEGREE

import dfgnn
from dfgnn import Graph, functional, ops
from dfgnn.bench.measure import peak_extra
from dfgnn.nn import pyg

torch_geometric = pytest.importorskip("torch_geometric")
TORCH = torch.__version__.split("+")[0] == "2.13.0"
PYG = torch_geometric.__version__.startswith("2.8.")
STAR = torch.stack([torch.arange(DEGREE), torch.zeros(DEGREE, dtype=torch.long)])


def accelerated(layer):
    layer = copy.deepcopy(layer)
    assert dfgnn.accelerate(layer).replaced
    return layer


def mean_layer(dtype=torch.bfloat16):
    """PyG's GATConv whose scores are 0 and whose projection is 1: the mean of the neighbours."""
    layer = torch_geometric.nn.GATConv(1, 1, add_self_loops=False, bias=False)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.lin.weight.fill_(1)
    return layer.to(dtype)


def total(function, x):
    with torch.no_grad():
        return function(x).double().sum().item()


def gradient(function, x):
    x = x.clone().requires_grad_()
    function(x).sum().backward()
    return x.grad.item()


ONES, INDEX = torch.ones(DEGREE, dtype=torch.bfloat16), STAR[1]
INTO_ONE, FROM_ONE = (
    Graph.from_edge_index(e, num_src=n, num_dst=m)
    for e, n, m in ((STAR, DEGREE, 1), (STAR.flip(0), 1, DEGREE))
)
MEAN = mean_layer()
OURS = accelerated(MEAN)
#: What is summed -> a function of ours and of theirs, its argument, what is looked at, the right number, and
#: that of theirs under torch.compile with torch 2.13 on one thread of a CPU.
COMPILED = {
    "scatter_add": (
        lambda x: functional.spmm(INTO_ONE, x.unsqueeze(1), x.view(-1, 1, 1)),
        lambda x: x.new_zeros(1).scatter_add(0, INDEX, x), ONES, total, 4992, 256,
    ),
    "backward of gather": (
        lambda x: functional.spmm(FROM_ONE, ONES.view(-1, 1), x.view(1, 1, 1)),
        lambda x: x.gather(0, INDEX), ONES[:1], gradient, 4992, 256,
    ),
    "PyG's GATConv, the mean of as many 1s as 3s": (
        lambda x: OURS(x, STAR)[0], lambda x: MEAN(x, STAR)[0],
        torch.tensor([1.0, 3.0]).repeat(DEGREE // 2).view(-1, 1).bfloat16(), total, 2, 4,
    ),
    "PyG's softmax of equal scores": (
        lambda x: functional.edge_softmax(INTO_ONE, x.view(-1, 1)),
        lambda x: torch_geometric.utils.softmax(x, INDEX, num_nodes=1), ONES, total, 1, 19.5,
    ),
}  # fmt: skip


@some(["scatter_add", "backward of gather"], COMPILED)
def test_torch_2_13_compiled_sums_stop_at_256(name, one_thread, fresh_dynamo):
    """Eager ones of torch do not. Ours are the same under a compiler."""
    ours, theirs, x, value, right, stopped = COMPILED[name]
    for call in (ours, torch.compile(ours)):
        assert value(call, x) == pytest.approx(right, rel=0.01)
    if TORCH and PYG:
        assert "PyG" in name or value(theirs, x) == right
        assert value(torch.compile(theirs), x) == pytest.approx(stopped, rel=0.01)


def test_torch_2_13_softmax_of_a_long_column():
    """2**25 equal scores: the weights of torch.softmax sum to 2 in float32, those of an attention to 1."""
    count = 2**25
    if TORCH and EXHAUSTIVE:
        assert torch.softmax(torch.zeros(count, 1), 0).double().sum() == 2
    graph = Graph.from_coo(torch.zeros(count).int(), torch.zeros(count).int(), num_src=1, num_dst=1)
    one = torch.ones(1, 1, 1)
    assert abs(functional.dot_attention(graph, one, one, one).item() - 1) < 1e-4


@pytest.mark.parametrize("number", [1, 2])
def test_torch_2_13_layer_norm_loses_its_gradient_in_16_bits(number, threads):
    """On a CPU the gradient of LayerNorm's weight depends on the number of threads, too."""
    from dfgnn.nn._sums_in_16_bits import normalized  # what our layers call

    threads(number)
    x = torch.randn(DEGREE, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    sign, found = x.sign(), {}
    norm = torch.nn.LayerNorm(64).bfloat16()
    exact = torch.nn.LayerNorm(64).double()
    (exact(x.double()) * sign).sum().backward()
    for name, call in {"theirs": norm, "ours": lambda x: normalized(norm, x)}.items():
        norm.zero_grad()
        out = call(x)
        assert (out.double() - exact(x.double())).abs().max() < 2e-2
        (out * sign).sum().backward()
        found[name] = (norm.weight.grad.double() / exact.weight.grad).mean().item()
    assert abs(found["ours"] - 1) < 0.01
    if TORCH:
        assert found["theirs"] < 0.5


def test_pyg_2_8_negative_samples_follow_pythons_random():
    """With both generators seeded, SuperGATConv's loss is the same, in torch_geometric's layer and ours."""
    torch.manual_seed(0)
    x, edge_index = torch.randn(20, 8), torch.randint(20, (2, 80))
    theirs = torch_geometric.nn.SuperGATConv(8, 4, 2)
    losses = []
    for layer in (theirs, theirs, accelerated(theirs)):
        torch.manual_seed(1)
        random.seed(1)
        layer(x, edge_index)
        losses.append(layer.get_attention_loss())
    torch.testing.assert_close(losses[:2], [losses[2]] * 2)


def test_pyg_2_8_coalesce_of_int32_loses_edges():
    """60,000 distinct edges between 60,000 nodes; a Graph keeps them in either type."""
    ends = torch.arange(60_000)
    edge_index = torch.stack([ends, ends.flip(0)])
    graph = Graph.from_edge_index(edge_index.int(), num_nodes=60_000)
    assert graph.num_edges == 60_000 and torch.equal(graph.edge_index.long(), edge_index)
    x = torch.randn(60_000, 1, 2)
    wide = Graph.from_edge_index(edge_index, num_nodes=60_000)
    assert torch.equal(functional.dot_attention(graph, x, x, x), functional.dot_attention(wide, x, x, x))
    if PYG:
        coalesce = torch_geometric.utils.coalesce
        assert coalesce(edge_index).shape[1] == 60_000 and coalesce(edge_index.int()).shape[1] < 60_000


def test_torch_2_13_multihead_attention_without_keys():
    """NaN or 0, as weights are asked for or not; ours is 0 in any case."""
    x = torch.randn(1, 2, 4)
    masked = torch.tensor([[True, True], [False, False]])
    if TORCH:
        attention = torch.nn.MultiheadAttention(4, 1, batch_first=True)
        with_weights, without = (
            attention(x, x, x, attn_mask=masked, need_weights=w)[0] for w in (True, False)
        )
        assert with_weights[0, 0].isnan().all() and not without[0, 0].any()
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 1]]), num_nodes=2)
    rows = x[0].view(2, 1, 4)
    out = functional.dot_attention(graph, rows, rows, rows)
    out_and_weights = functional.dot_attention(graph, rows, rows, rows, return_attention=True)
    masked_out = functional.dot_attention(
        Graph.from_edge_index(torch.tensor([[0, 1, 0], [1, 1, 0]]), num_nodes=2), rows, rows, rows,
        bias=torch.tensor([[0.0], [0.0], [-torch.inf]]),
    )  # fmt: skip
    for found in (out, out_and_weights[0], masked_out):
        assert not found[0].any() and found[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dgl_1_1_3_gradients_of_maxima(dtype):
    """Equal maxima: the first edge gets the gradient, of nodes and of edges; DGL's float32 code for AVX-512
    gives it to the last. Rows without edges have no gradient; DGL adds theirs to node 0."""
    src, dst = torch.tensor([3, 2, 1, 0]), torch.zeros(4, dtype=torch.long)
    graph = Graph.from_coo(src, dst, num_nodes=5)

    def gradient(module, graph, rows=slice(None)):
        x = torch.ones(5, 16, dtype=dtype, requires_grad=True)
        out = module.copy_u_max(graph, x)
        (found,) = torch.autograd.grad(out[rows].sum(), x)
        return found[:, 0].tolist()

    first, none = [0, 0, 0, 1, 0], [0] * 5
    assert gradient(ops, graph, slice(1)) == first and gradient(ops, graph, slice(1, None)) == none
    x = torch.ones(4, 16, dtype=dtype, requires_grad=True)
    (found,) = torch.autograd.grad(ops.copy_e_max(graph, x)[0].sum(), x)
    assert found[:, 0].tolist() == [1, 0, 0, 0]
    try:
        import dgl
    except ImportError:
        return
    if dgl.__version__ == "1.1.3":
        theirs = dgl.graph((src, dst), num_nodes=5)
        assert gradient(dgl.ops, theirs, slice(1, None)) == [4, 0, 0, 0, 0]
        if dtype == torch.float64:
            assert gradient(dgl.ops, theirs, slice(1)) == first


def test_relations_without_edges():
    """HeteroConv leaves a type out that no relation leads to, and has it for a relation of no edges: with our
    layers as with torch_geometric's."""
    kinds = ("a", "x", "b"), ("b", "y", "a")
    x, edges = {"a": torch.randn(3, 2), "b": torch.randn(2, 2)}, torch.tensor([[0, 1], [1, 0]])
    convs = (
        torch_geometric.nn.HeteroConv({kind: cls((2, 2), 4, add_self_loops=False) for kind in kinds})
        for cls in (torch_geometric.nn.GATConv, pyg.GATConv)
    )
    for conv in convs:
        assert set(conv(x, {kinds[0]: edges})) == {"b"}
        out = conv(x, {kinds[0]: edges, kinds[1]: edges[:, :0]})
        assert set(out) == {"a", "b"} and not (out["a"] - conv.convs[kinds[1]].bias).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_extreme_scores_in_16_bits(device, dtype):
    """One score of a row is the largest number of the type, the others are smaller: its edge gets all of the
    weight, and gradients are finite."""
    top = torch.finfo(dtype).max
    graph = Graph.from_edge_index(STAR.to(device), num_src=DEGREE, num_dst=1)
    value = torch.arange(DEGREE, device=device).clamp(max=100).to(dtype).view(-1, 1, 1).requires_grad_()
    for low, expected in ((-top, 7), (0, 7), (top, 99)):  # 98.99 is the mean of the values
        score = torch.full((DEGREE, 1), low, dtype=dtype, device=device)
        score[7] = top
        score.requires_grad_()
        out = functional.score_attention(graph, score, value)
        assert abs(out.item() - expected) < 0.5
        grads = torch.autograd.grad(out.sum(), [score, value])
        assert all(g.isfinite().all() for g in grads) and (low == top or not grads[0].any())


def test_dgl_1_1_3_order_of_full_neighbourhoods():
    """DGL's dataloading has them in random order; here edges are in the graph's."""
    from dfgnn.compat import dataloading, graph

    g = graph((torch.arange(50), torch.zeros(50).long()), num_nodes=50)
    sampler = dataloading.MultiLayerFullNeighborSampler(1)
    for _ in range(3):
        *_, blocks = sampler.sample_blocks(g, torch.tensor([0]))
        assert torch.equal(blocks[0].edata["_ID"], torch.arange(50))


def test_dgl_1_1_3_masks_in_files(tmp_path):
    """DGL's file gives a mask back as uint8, ours as it was saved."""
    from dfgnn import compat

    mask = torch.tensor([True, False, True])
    libraries = [compat]
    dgl = importlib.import_module("dgl") if importlib.util.find_spec("dgl") else None
    if dgl is not None and dgl.__version__ == "1.1.3":
        libraries.append(dgl)
    for library, dtype in zip(libraries, (torch.bool, torch.uint8)):
        graph = library.graph((torch.tensor([0, 1]), torch.tensor([1, 2])), num_nodes=3)
        graph.ndata["mask"] = mask
        path = str(tmp_path / library.__name__)
        library.save_graphs(path, [graph])
        read = library.load_graphs(path)[0][0].ndata["mask"]
        assert read.dtype == dtype and torch.equal(read.bool(), mask)


@exhaustive
def test_pyg_2_8_peak_memory_of_compiled_layers(threads):
    """A compiled GATConv or TransformerConv peaks at 0.46 to 1.33 tensors of E x H x C where sums along an
    index are left to eager code, as on two threads, ours at none."""
    N, E, H, C = 400, 40_000, 4, 32
    x, edge_index = torch.randn(N, 16), torch.randint(N, (2, E))
    theirs = torch_geometric.nn.GATConv(16, C, H)

    @torch.no_grad()
    def peak(layer):
        torch._dynamo.reset()
        compiled = torch.compile(layer)
        compiled(x, edge_index)
        return peak_extra(lambda: compiled(x, edge_index), 0, x.device) / (4 * E * H * C)

    threads(2)
    assert peak(accelerated(theirs)) < 0.1
    if TORCH and PYG:
        assert peak(theirs) > 0.4


@pytest.mark.gpu
def test_capture_in_a_cuda_graph():
    """Waits for the device make it fail: torch_geometric 2.8's softmax and add_self_loops without num_nodes,
    coalesce, GATConv with loops. `dfgnn.capture` makes a CUDA graph of a step with our GATConv with loops."""
    data = torch_geometric.data.Data(x=torch.randn(20, 8), edge_index=torch.randint(20, (2, 80)))
    batch = torch_geometric.data.Batch.from_data_list([data, data]).to("cuda")
    theirs = torch_geometric.nn.GATConv(8, 4, 2).cuda()
    conv = accelerated(theirs)
    with torch.no_grad():
        step = dfgnn.capture(lambda b: conv(b.x, b.edge_index).square().mean(), conv)
        for _ in range(3):
            found = step(batch)
        torch.testing.assert_close(found, conv(batch.x, batch.edge_index).square().mean())
    if not PYG:
        return
    x, edge_index = batch.x, batch.edge_index
    utils = torch_geometric.utils
    for call in (
        lambda: utils.softmax(x[edge_index[0]], edge_index[1]),
        lambda: utils.coalesce(edge_index),
        lambda: utils.add_self_loops(edge_index),
        lambda: theirs(x, edge_index),
    ):
        call()
        # Not by a capture: one that fails leaves the generator of later tests in a capture.
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchroniz"):
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
