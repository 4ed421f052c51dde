"""Attention over several processes: what one process with the whole graph computes."""

from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from graphs import GRAPHS
from ranks import all_cases, both, compare_attention

import dfgnn
from dfgnn import Graph, functional
from dfgnn.distributed import DistributedGraph
from dfgnn.engine import operators
from dfgnn.functional import EdgeTerm, Projected

TWO, THREE = ranks.GROUPS


@pytest.mark.parametrize("turn, name", list(enumerate(GRAPHS)))
def test_two_processes(four, turn, name):
    """Each graph takes its turn of the cases (score, edge tensors, options); two graphs take all of them."""
    cases = all_cases()
    if name not in ("random", "fewer_sources"):
        cases = cases[turn % 5 :: 5]
    kind = "contiguous" if turn % 2 else "random"
    four.run(compare_attention, name, kind, torch.float64, 1e-10, cases, ranks=TWO)
    four.run(compare_attention, name, kind, torch.float32, 1e-5, cases[::3], ranks=TWO)


@pytest.mark.parametrize("turn, name", list(enumerate(GRAPHS)))
def test_four_processes(four, turn, name):
    kind = "random" if turn % 2 else "contiguous"
    four.run(compare_attention, name, kind, torch.float64, 1e-10, all_cases()[turn % 7 :: 7])


def _layers():
    nn = dfgnn.nn
    allow = {"allow_zero_in_degree": True}
    return [
        lambda: nn.dgl.GATConv(6, 5, 2, feat_drop=0.0, attn_drop=0.4, residual=True, **allow),
        lambda: nn.dgl.GATv2Conv(6, 5, 2, attn_drop=0.3, **allow),
        lambda: nn.dgl.AGNNConv(**allow),
        lambda: nn.dgl.DotGatConv(6, 5, 2, **allow),
        lambda: nn.GraphTransformerConv(6, 5, 2, attn_drop=0.3, **allow),
        lambda: nn.GraphTransformerLayer(6, 2, norm="layer", **allow),
    ]


def _pyg_layers():
    pyg = pytest.importorskip("dfgnn.nn.pyg")
    return [
        lambda: pyg.GATConv(6, 5, 2, dropout=0.5),
        lambda: pyg.GATv2Conv(6, 5, 2, dropout=0.3, residual=True),
        lambda: pyg.TransformerConv(6, 5, 2, dropout=0.2),
        lambda: pyg.AGNNConv(),
    ]


def _compare_layer(group, family, kind):
    """The edges contain loops, which torch_geometric's layers remove and append, so that edge ids change."""
    num_nodes = 40
    edge_index = torch.randint(num_nodes, (2, 300))
    edge_index[1, ::17] = edge_index[0, ::17]
    x = torch.randn(num_nodes, 6, dtype=torch.float64)
    graph = Graph.from_edge_index(edge_index, num_nodes)
    partition = ranks.a_partition(kind, num_nodes, num_nodes, dist.get_world_size(group))
    part = DistributedGraph.from_edge_index(edge_index, num_nodes, partition, group)
    for make in _layers() if family == "dgl" else _pyg_layers():
        torch.manual_seed(1)
        layer = make().double()
        for train in (True, False):
            layer.train(train)
            whole = (graph, x) if family == "dgl" else (x, edge_index)
            mine = (part, part.scatter(x)) if family == "dgl" else (part.scatter(x), part)
            found = []
            for args, seed in ((whole, 3), (mine, 3 + dist.get_rank(group))):
                torch.manual_seed(seed)  # dropout on all ranks must follow rank 0's generator
                layer.zero_grad()
                out = layer(*args)
                out.square().sum().backward()
                found.append([out.detach(), *(p.grad.clone() for p in layer.parameters())])
            (expected, *grads), (out, *sums) = found
            torch.testing.assert_close(out, part.scatter(expected), rtol=0, atol=1e-11)
            for grad, mine in zip(grads, sums):
                dist.all_reduce(mine, group=group)
                torch.testing.assert_close(mine, grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["contiguous", "random"])
@pytest.mark.parametrize("family", ["dgl", "pyg"])
def test_layers(four, family, kind):
    if family == "pyg":
        _pyg_layers()
    four.run(_compare_layer, family, kind, ranks=THREE)


def _compare_functions(group):
    graph, part = both(group, "random", "random")
    rows = torch.randn(50, 2, 4, dtype=torch.float64)
    weight = torch.randn(graph.num_edges, 2, dtype=torch.float64)
    proj = torch.randn(8, 2, dtype=torch.float64)

    def run(graph, rows, weight):
        rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()

        def score(q, k, e):
            return (q * k).sum(-1).tanh()

        term = Projected(weight, proj)
        found = [
            functional.sddmm(graph, rows, rows),
            functional.edge_softmax(graph, weight),
            functional.spmm(graph, weight, rows),
            functional.agnn_attention(graph, rows, beta=2.0),
            functional.flex_attention(graph, score, rows, rows, rows),
            functional.dot_attention(graph, rows, rows, rows, edge=EdgeTerm(term, term)),
            functional.edge_product_attention(
                graph, rows, rows, rows, weight[:, :, None].expand(-1, -1, 4), clamp=0.5
            ),
            functional.dot_attention(
                graph,
                rows,
                rows,
                rows,
                edge=EdgeTerm(weight[:, :, None].expand(-1, -1, 4), weight.repeat(1, 2)),
            ),
        ]
        sum(x.square().sum() for x in found).backward()
        return [x.detach() for x in found], rows.grad, weight.grad

    expected, grad_rows, grad_weight = run(graph, rows, weight)
    found, mine_rows, mine_weight = run(part, part.scatter(rows), part.scatter(weight, "edges"))
    for x, y, of in zip(expected, found, ("edges", "edges", "dst", "dst", "dst", "dst", "dst", "dst")):
        torch.testing.assert_close(y, part.scatter(x, of), rtol=0, atol=1e-11)
    torch.testing.assert_close(mine_rows, part.scatter(grad_rows), rtol=0, atol=1e-10)
    torch.testing.assert_close(mine_weight, part.scatter(grad_weight, "edges"), rtol=0, atol=1e-10)


def test_other_functions(four):
    four.run(_compare_functions)


def test_without_a_group():
    graph = ranks.make_graph("random")
    part = DistributedGraph.from_edge_index(graph.edge_index, 50, "metis")
    assert part.num_halo == 0 and part.group is None
    x = torch.randn(50, 2, 8)
    expected = functional.dot_attention(graph, x, x, x)
    assert torch.equal(part.gather(functional.dot_attention(part, x, x, x)), expected)


# ---- what autograd promises ------------------------------------------------------------------------------


def _autograd(group):
    from torch.utils.checkpoint import checkpoint

    _, part = both(group, "power_law")
    x = torch.randn(part.num_src, 2, 8, dtype=torch.float64)

    def gradient(attend):
        leaf = x.clone().requires_grad_()
        out = attend(leaf)
        (out * torch.arange(8)).sum().backward()
        return leaf.grad

    def attend(leaf):
        return functional.dot_attention(part, leaf, leaf, leaf)

    expected = gradient(lambda leaf: attend(leaf) * 2)
    again = gradient(lambda leaf: attend(leaf) * 2)
    assert torch.equal(expected, again)
    assert torch.equal(gradient(lambda leaf: attend(leaf).mul_(2)), expected)  # backward reads the output
    assert torch.equal(gradient(lambda leaf: checkpoint(attend, leaf, use_reentrant=False) * 2), expected)
    leaf = x.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="create_graph: expected False"):
        torch.autograd.grad(attend(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda y: attend(y).sum())(x)
    with pytest.raises(NotImplementedError, match="edge_index is not to be had"):
        _ = part.edge_index
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = part.no_such_thing


def test_autograd(four):
    four.run(_autograd)


def _only_some_gradients(group):
    """Gradients of features but not of scores, and the reverse: backward then exchanges other rows."""
    graph, part = both(group, "mixed_degrees")
    inputs = {
        "value": torch.randn(72, 2, 4, dtype=torch.float64),
        "score_src": torch.randn(72, 2, dtype=torch.float64),
        "score_dst": torch.randn(72, 2, dtype=torch.float64),
    }
    for wanted in inputs:
        grads = []
        for g, local in ((graph, lambda x: x), (part, part.scatter)):
            leaves = {n: local(x.clone()).requires_grad_(n == wanted) for n, x in inputs.items()}
            functional.gat_attention(g, **leaves).square().sum().backward()
            grads.append(leaves[wanted].grad)
        torch.testing.assert_close(grads[1], part.scatter(grads[0]), rtol=0, atol=1e-11)


def test_only_some_gradients(four):
    four.run(_only_some_gradients)


def _wire(group):
    errors = []
    for wire in (None, torch.bfloat16, torch.float16):
        graph, part = both(group, "random", wire=wire)
        x = torch.randn(50, 2, 8)
        leaves = [y.clone().requires_grad_() for y in (x, part.scatter(x))]
        out = [functional.dot_attention(g, y, y, y) for g, y in zip((graph, part), leaves)]
        for y in out:
            y.square().sum().backward()
        for expected, y in ((out[0], out[1]), (leaves[0].grad, leaves[1].grad)):
            errors.append((part.scatter(expected.detach()) - y).norm() / expected.norm())
    exact, rounded = errors[:2], errors[2:]
    assert max(exact) < 1e-6
    assert min(rounded) > 1e-5 and max(rounded) < 1e-2, rounded


def test_wire(four):
    four.run(_wire)


# ---- parts -----------------------------------------------------------------------------------------------


def _scatter_and_gather(group):
    for name in ("fewer_sources", "random", "no_nodes", "one_edge"):
        graph, part = both(group, name, "random")
        total = dict(zip(("src", "dst", "edges"), part.total))
        assert part.total == (graph.num_src, graph.num_dst, graph.num_edges)
        for of, size in total.items():
            x = torch.randn(size, 3)
            assert torch.equal(part.gather(part.scatter(x, of), of), x)
        assert part.has_zero_in_degree == graph.has_zero_in_degree
        for call in (part.scatter, part.gather):
            with pytest.raises(ValueError, match="x: expected"):
                call(torch.zeros(total["dst"] + 1, 2))
            with pytest.raises(ValueError, match="'dst', 'src' or 'edges'"):
                call(torch.zeros(1), "nodes")


def test_scatter_and_gather(four):
    four.run(_scatter_and_gather)


def _a_rank_without_in_edges(group):
    """All ranks raise, not only the one that has the node."""
    part = DistributedGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4, group=group)
    with pytest.raises(ValueError, match="destinations without in-edges"):
        dfgnn.nn.dgl.GATConv(3, 2, 1)(part, torch.zeros(part.num_src, 3))


def test_zero_in_degree(four):
    four.run(_a_rank_without_in_edges)


def test_contiguous_balances_edges():
    degrees = torch.cat([torch.full((100,), 50), torch.full((5000,), 1), torch.zeros(100, dtype=torch.int64)])
    owner = dfgnn.distributed.parts.contiguous(degrees, 4)
    assert (owner.diff() >= 0).all()
    work = torch.bincount(owner, degrees + 1.0, minlength=4)
    assert work.max() < 1.02 * work.mean()


def test_metis_keeps_neighbours_together():
    pytest.importorskip("pymetis")
    community = torch.arange(400) % 4
    ends = torch.randint(400, (2, 20000))
    ends = ends[:, community[ends[0]] == community[ends[1]]]
    for square, src in ((True, ends[0]), (False, ends[0] % 200)):
        index = torch.stack([src, ends[1]])
        owner = dfgnn.distributed.parts.metis(index, int(src.max()) + 1, 400, square, 4)
        between = (owner[0][index[0]] != owner[1][index[1]]).float().mean()
        assert between < (0.02 if square else 0.05), between
        assert torch.bincount(owner[1], minlength=4).min() > 50


# ---- errors ----------------------------------------------------------------------------------------------


def _disagree(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    edge_index = torch.randint(20, (2, 100))
    other = edge_index.clone()
    if rank == size - 1:
        other[0, 7] = (other[0, 7] + 1) % 20

    def refuses(match, call):
        with pytest.raises(ValueError, match=match) as caught:
            call()
        assert f"on rank {size - 1}" in str(caught.value)

    make = DistributedGraph.from_edge_index
    refuses("fingerprint: expected the same on all ranks", lambda: make(other, 20, group=group))
    refuses("num_edges", lambda: make(edge_index[:, : 100 - rank // (size - 1)], 20, group=group))
    refuses("num_src", lambda: make(edge_index, 20 + rank, group=group))
    owner = torch.arange(20) % size
    owner[3] = int(rank == size - 1)
    refuses("fingerprint", lambda: make(edge_index, 20, owner, group=group))
    refuses("overlap", lambda: make(edge_index, 20, group=group, overlap=rank < size - 1))
    part = make(edge_index, 20, group=group)
    x = torch.randn(part.num_src, 2, 8)
    mine = x.double() if rank == size - 1 else x
    refuses("value: expected the same", lambda: functional.dot_attention(part, mine, mine, mine))
    mine = x[:, :1] if rank == size - 1 else x
    refuses("value", lambda: functional.dot_attention(part, mine, mine, mine))
    refuses("score", lambda: (
        functional.gatv2_attention(part, x, x, x.new_ones(2, 8))
        if rank == size - 1
        else functional.dot_attention(part, x, x, x)
    ))  # fmt: skip
    refuses("scale", lambda: functional.dot_attention(part, x, x, x, scale=float(rank == size - 1)))
    grad = x.clone().requires_grad_(rank == size - 1)
    refuses("value", lambda: functional.dot_attention(part, grad, grad, grad))
    functional.dot_attention(part, x, x, x)  # after the errors the ranks are still in step


def test_ranks_that_disagree(four):
    four.run(_disagree)


@pytest.mark.parametrize(
    "message, kind, arguments",
    [
        ("expected num_nodes, or num_src and num_dst, got neither", TypeError, {}),
        ("got both", TypeError, {"num_nodes": 4, "num_src": 4}),
        (r"edge_index\[0\]: expected ids in 0 .. 2", ValueError, {"num_nodes": 3}),
        ("expected one of contiguous, metis", ValueError, {"num_nodes": 4, "partition": "random"}),
        ("partition: expected a tensor or a name", TypeError, {"num_nodes": 4, "partition": [0]}),
        ("expected a pair of tensors", TypeError,
         {"num_src": 4, "num_dst": 4, "partition": torch.zeros(4, dtype=torch.int64)}),
        (r"partition: expected numbers of parts in 0 .. 0, got 0 .. 2", ValueError,
         {"num_nodes": 4, "partition": torch.arange(4) // 2 * 2}),
        ("partition: expected", ValueError, {"num_nodes": 4, "partition": torch.zeros(3, dtype=torch.int64)}),
        ("wire: expected None", ValueError, {"num_nodes": 4, "wire": torch.int8}),
    ],
)  # fmt: skip
def test_errors(message, kind, arguments):
    with pytest.raises(kind, match=message):
        DistributedGraph.from_edge_index(torch.tensor([[0, 3], [1, 2]]), **arguments)
    with pytest.raises(TypeError, match="got a direct call"):
        DistributedGraph()


def part_of(score, value, here):
    """(out, stats) of attention over the edges [N, H, K] that are `here`."""
    some = here.any(-1)
    score = score.masked_fill(~here, -torch.inf)
    top = score.amax(-1).masked_fill(~some, torch.inf)
    mass = (score - top.unsqueeze(-1)).exp().sum(-1)
    out = torch.einsum("nhk,nkhd->nhd", score.softmax(-1).nan_to_num(0), value)
    return out, torch.stack([top, mass.log().masked_fill(~some, 0)], -1)


@pytest.mark.parametrize("before, after", [(None, "1"), ("0", "0")])
def test_rows_go_first(plain_python, before, after):
    """NCCL's blocks find room next to the attention's; who has set the variable keeps it."""
    code = "import os\n" + (f"os.environ['TORCH_NCCL_HIGH_PRIORITY'] = {before!r}\n" if before else "")
    code += "import dfgnn.distributed\nprint(os.environ['TORCH_NCCL_HIGH_PRIORITY'])"
    assert plain_python(code).stdout.split() == [after]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_two_calls_are_merged(dtype):
    """The kernel merges two calls: rows with edges in both calls, in one and in none, and scores far
    apart."""
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(40, 3, 6, generator=generator, dtype=torch.float64).mul(8).round() / 8
    score[:5] *= 1e4  # exact in float32, too
    value = torch.randn(40, 6, 3, 8, generator=generator, dtype=torch.float64)
    owner = torch.randint(3, (40, 1, 6), generator=generator).expand_as(score).clone()  # 2: no edge
    owner[10], owner[11], owner[12] = 0, 1, 2
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    parts = (part_of(score, value, owner == k) for k in (0, 1))
    given = [x.to("cuda", kind) for part in parts for x, kind in zip(part, (dtype, acc))]
    found = operators.merge_parts(*given)
    assert [x.dtype for x in found] == [dtype, acc, acc]
    out, stats, weight = (x.double().cpu() for x in found)
    right, right_stats = part_of(score, value, owner < 2)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out, right, rtol=tolerance, atol=tolerance)
    same = partial(torch.testing.assert_close, rtol=min(tolerance, 1e-5), atol=min(tolerance, 1e-5))
    same(stats, right_stats)
    alpha = score.masked_fill(owner == 2, -torch.inf).softmax(-1).nan_to_num(0)
    same(weight, (alpha * (owner == 1)).sum(-1))
