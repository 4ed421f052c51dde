"""The operators of eager calls give what those of the long schemas give, and refuse what they must."""

import gc

import pytest
import torch
from attention import EDGES, SCORES, TERMS, function, make_inputs
from graphs import make_graph

from dfgnn import Graph
from dfgnn.engine import argument_checks, operators, paths
from dfgnn.engine import autograd as _autograd
from dfgnn.runtime.arguments import SCORES as NUMBERS
from dfgnn.runtime.arguments import EdgeArgs, Numbers, ops
from dfgnn.sparse import csr as _csr

NAMES = {"gat": "additive", "gatv2": "additive_v2", "dot": "dot"}
OPTIONS = {
    "plain": {},
    "term": {"term": True},
    "gate": {"gate": "H"},
    "weight": {"weight": 1},
    "edge": {"edge": True},
    "attention": {"attention": True},
    "dropout": {"dropout": 0.3},
    "all": {"term": True, "gate": 1, "weight": "H", "attention": True, "dropout": 0.3},
}


def make_call(score, options, device, graph="super_row", short=True, dtype=torch.float32):
    options = dict(options)
    attention, dropout = options.pop("attention", False), options.pop("dropout", 0.0)
    graph = make_graph(graph, device)
    x = make_inputs(score, graph, 2, 8, dtype, **options)
    by_edge = [x.get(name) for name in (TERMS[score], "gate", "mask", "weight", EDGES[score])]
    by_edge = [t.unsqueeze(1) if t is not None and t.dim() == 1 else t for t in by_edge]
    seed = torch.tensor([5], device=device) if dropout else None
    ends = {
        "gat": lambda: (x["value"], x["score_src"], x["score_dst"], None),
        "gatv2": lambda: (x["key"], None, x["query"], x["att"]),
        "dot": lambda: (x["value"], x["key"], x["query"], None),
    }[score]()
    if score == "gat":
        ends = ends[0], ends[1].to(_acc(dtype)), ends[2].to(_acc(dtype)), None
    edge = EdgeArgs(*by_edge, seed)
    out_bias = torch.randn(2, 8).to(device, dtype)
    flags = {"gat": 4, "gatv2": 2, "dot": 6}[score]
    numbers = Numbers(0.2, 0.7, dropout, flags)
    edges = attention or any(t is not None for t in edge)
    handle = graph._planner.handle(2, 8, dtype, score, "auto", edges, True)
    positive = score == "gat" and edge.edge_gate is None
    make = operators.EagerCall if short else operators.DispatchedCall
    args = handle if short else handle.args
    call = make(graph, args, NAMES[score], numbers, attention, positive)
    return call, (*ends, *edge, out_bias), graph


def _acc(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("score", SCORES)
def test_equal_to_the_long_operators(device, score, options, dtype):
    results = []
    for short in (True, False):
        torch.manual_seed(0)
        call, tensors, _ = make_call(score, options, device, short=short, dtype=dtype)
        out, attention, kept = call.run(tensors)
        torch.manual_seed(1)
        grad = torch.randn(out.shape).to(device, dtype)
        gamma = None if attention is None else torch.randn(attention.shape).to(attention)
        found = call.run_backward((grad, gamma), tensors, out, attention, kept, 31)
        results.append([out, attention, *found])
    short, long = results
    for x, y in zip(short, long, strict=True):
        if x is None:
            assert y is None or y.numel() == 0
        else:
            assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.parametrize("score", SCORES)
def test_rows_of_a_layer(device, score):
    """With `heads` > 0 an eager call takes and returns nodes' tensors as [N, H * D] instead of [N, H, D]."""
    call, (value, src, dst, attn, *rest), _ = make_call(score, {}, device)

    def flat(x):
        return None if x is None or x.dim() < 3 else x.flatten(1)

    tensors = value, src, dst, attn, *rest
    out, _, (kept,) = call.run(tensors)
    grad = torch.randn_like(out)
    expected = call.run_backward((grad, None), tensors, out, None, (kept,), 1)
    ends = (src, dst) if score == "gat" else (flat(src), flat(dst))
    args = (NUMBERS[NAMES[score]], flat(value), *ends, None if attn is None else attn[None])
    number, options = call.handle.number, (*rest[:-1], rest[-1].flatten())
    rows, kept, _ = ops.attend(number, 2, *args, *options, *call.numbers, False, call.save_positive)
    assert torch.equal(rows, out.flatten(1))
    found = ops.attend_backward(
        number, 2, grad.flatten(1), None, *args, *options, rows, kept, call.save_positive, None,
        *call.numbers, 1,
    )  # fmt: skip
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dim() < 3 or x.shape[0] != value.shape[0] or score == "gatv2"
            assert torch.equal(x.flatten(), y.flatten())


def test_a_handle_ends_with_its_object(device):
    graph = make_graph("random", device)
    handle = graph._planner.handle(2, 8, torch.float32, "gat", "auto", False, True)
    number = handle.number
    assert graph._planner.handle(2, 8, torch.float32, "gat", "auto", False, True) is handle
    feat, vector = torch.randn(graph.num_src, 16, device=device), torch.randn(1, 2, 8, device=device)
    ops.gat(number, feat, vector, vector, None, None, 0.2, 0.0, False)
    del handle, graph
    gc.collect()
    with pytest.raises(RuntimeError, match=r"dfgnn::gat: graph: expected a number that graph_handle gave"):
        ops.gat(number, feat, vector, vector, None, None, 0.2, 0.0, False)


def test_backward_may_outlive_the_graph(device):
    call, tensors, graph = make_call("gat", {}, device)
    value = tensors[0].requires_grad_()
    out, _ = _autograd.Attention.apply(call, None, value, *tensors[1:])
    del call, graph
    gc.collect()
    out.sum().backward()
    assert value.grad.isfinite().all()


def test_backward_refuses_what_it_did_not_keep(device):
    call, tensors, _ = make_call("gat", {}, device)
    out, _, (kept,) = call.run(tensors)
    for bad in (kept[:-16], kept.float()):
        with pytest.raises(RuntimeError, match="kept: "):
            call.run_backward((torch.randn_like(out), None), tensors, out, None, (bad,), 1)
    with torch.no_grad():  # otherwise a small graph gets its reverse CSR when it is made
        graph = make_graph("super_row", device)
    forward_only = graph._planner.handle(2, 8, torch.float32, "gat", "auto", False, False)
    call = call._replace(handle=forward_only)
    with pytest.raises(RuntimeError, match="graph: expected one with its reverse CSR"):
        call.run_backward((torch.randn_like(out), None), tensors, out, None, (kept,), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_score_terms(device, dtype):
    for rows, num_dst, heads, size, used in (
        (1000, 700, 3, 8, 8),
        (5, 5, 1, 16, 9),
        (300, 0, 2, 72, 72),
        (0, 0, 1, 8, 8),
    ):
        feat = torch.randn(rows, heads, size).to(device, dtype)
        vectors = [torch.randn(heads, used, device=device).to(_acc(dtype)) for _ in range(2)]
        src, dst = ops.score_terms(feat, *vectors, num_dst)
        wide = feat.double()[..., :used]
        for found, vector, n in ((src, vectors[0], rows), (dst, vectors[1], num_dst)):
            expected = (wide * vector.double()).sum(-1)[:n]
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        grads = (
            torch.randn(rows, heads, device=device).to(src),
            torch.randn(num_dst, heads, device=device).to(src),
        )
        feat_grad, *vector_grads = ops.score_terms_backward(*grads, feat, *vectors)
        expected = grads[0].double()[..., None] * vectors[0].double()
        expected[:num_dst] += grads[1].double()[..., None] * vectors[1].double()
        eps = 1e-5 if dtype in (torch.float32, torch.float64) else 2e-2
        torch.testing.assert_close(feat_grad[..., :used].double(), expected, rtol=eps, atol=eps)
        assert not feat_grad[..., used:].any()
        for found, grad, n in zip(vector_grads, grads, (rows, num_dst), strict=True):
            expected = (grad.double()[..., None] * wide[:n]).sum(0)
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
        again = ops.score_terms_backward(*grads, feat, *vectors)
        assert all(torch.equal(x, y) for x, y in zip(again, (feat_grad, *vector_grads), strict=True))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("edges", [False, True])
def test_the_reverse_csr_is_made_once(count_calls, score, edges):
    """The reverse CSR is made together with the plans, at once with edge ids."""
    graph, calls = make_graph("random"), count_calls(_csr, "transpose")
    args = graph._planner.handle(2, 8, torch.float32, score, "auto", edges, True).args
    assert graph.reverse_csr(need_eids=True)[1:] == (args.rev_indices, args.rev_eids)
    assert not calls
    assert (
        graph._planner.handle(2, 8, torch.float32, score, "natural", edges, True).args.rev_indices
        is args.rev_indices
    )
    assert not calls


@pytest.mark.gpu
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_graphs_of_another_device_are_no_graphs_here(score, train):
    """Each device counts its own graphs: one on a GPU and one on the CPU may have the same number. Tensors of
    the other device must be refused all the same."""
    kept = []
    for seed in range(12):
        torch.manual_seed(seed)
        ends = torch.randint(20, (2, 60))
        for device in ("cpu", "cuda"):
            graph = Graph.from_edge_index(ends.to(device), num_nodes=20)
            inputs = make_inputs(score, graph, 2, 8, torch.float32)
            function(score)(graph, **inputs)  # the first call gives the graph its number
            kept.append((device, graph))
    other = {"cpu": "cuda", "cuda": "cpu"}
    for device, graph in kept:
        inputs = make_inputs(score, graph, 2, 8, torch.float32)
        moved = {k: v.detach().to(other[device]).requires_grad_(train) for k, v in inputs.items()}
        with pytest.raises(ValueError, match="device"):
            function(score)(graph, **moved)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("terms", [None, torch.float32], ids=["of_one_dtype", "terms_as_sums"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("score", SCORES)
def test_calls_without_options_are_not_checked(
    score, dtype, terms, dropout_p, device, monkeypatch, count_calls
):
    """Unchecked calls give the same bits as calls whose arguments are checked; calls with options are
    checked."""
    graph = make_graph("random", device)
    inputs = {name: x.detach() for name, x in make_inputs(score, graph, 2, 8, dtype).items()}
    if terms is not None:
        if score != "gat" or dtype.itemsize > 2:
            pytest.skip("score terms of additive attention in 16 bits may be float32")
        inputs |= {name: x.to(terms) for name, x in inputs.items() if name.startswith("score_")}
    grad = torch.randn(graph.num_dst, 2, 8).to(device, dtype)

    def results(change=False, second=False):
        torch.manual_seed(1)
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        out = function(score)(graph, **leaves, dropout_p=dropout_p)
        if change:
            with torch.no_grad():
                out.mul_(2)
        first = torch.autograd.grad(out, leaves.values(), grad, create_graph=second)
        assert [g.dtype for g in first] == [x.dtype for x in leaves.values()]
        if second:
            return torch.autograd.grad(sum(g.float().square().sum() for g in first), leaves.values())
        return out, *first

    def all_results():
        return [*results(), *results(change=True)], results(second=True)

    with monkeypatch.context() as patch:
        patch.setattr(paths, "unchecked", lambda *args, **kwargs: None)
        expected = all_results()

    checked = count_calls(argument_checks.Checker, "__init__")
    (got, second), (want, second_want) = all_results(), expected
    assert all(map(torch.equal, got, want))
    # Gradients of gradients are sums by plain operations, which CUDA may add in another order.
    tolerance = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(second, second_want, **tolerance)
    assert not checked
    function(score)(graph, **inputs, return_attention=True)
    assert checked
