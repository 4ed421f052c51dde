"""The backend as users meet it: by name, with Inductor behind it, and in explain."""

import logging
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from comparing import check, flat, gradients, rewriting
from covering import exhaustive, some
from functorch.compile import make_boxed_func
from test_refused import activation_in_place_of_softmax, by_another_index
from torch._dynamo.backends.common import aot_autograd
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv
from torch_geometric.utils import softmax
from written import Inputs, cases, inputs, of_tensors

import dfgnn
from dfgnn.compiling import calls, rewrite
from dfgnn.compiling.backend import MIN_ELEMENTS, listeners
from dfgnn.compiling.rewrite import rewritten
from dfgnn.graph import in_cuda_graphs
from dfgnn.runtime.cuda_graphs import captured_step

ROOT = Path(__file__).parents[2]
CASES = {case.name: case for case in cases()}
ALL = {MIN_ELEMENTS: 0}  # rewrites attention of any size


def aot(made, example_inputs):
    """AOTAutograd as before Inductor, whose kernels take long to compile, with what it traced as it is."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(made, example_inputs)


AOT = "dot with projected edge; with projected edge", "gatv2 with edge; rows of sources", "divided afterwards"


@some(["divided afterwards", "rows and columns"], [*AOT, "gat; rows of edges", "weights returned"])
def test_traced_by_autograd(name, device):
    """Compiled code with gradients: operators in forward and backward, on static and symbolic shapes, on a
    graph without edges, and with rows without any."""
    torch._dynamo.reset()
    case, reports = CASES[name], []
    compiled = torch.compile(case.fn, backend=rewriting(reports, aot))
    for k, sizes in enumerate(((7, 7, 25), (12, 12, 40), (30, 30, 33), (5, 5, 0))):
        x = inputs(*sizes, seed=k, device=device)
        check(gradients(compiled, x), gradients(case.fn, x))
    assert all(report.rewritten for report in reports)


@some(["with projected edge", "with another edge"], ["rows of sources"], "others")
def test_projections_of_edges_computed_ahead(others, device, monkeypatch):
    """Small projections are computed before the operator, as on a GPU, also for a graph without edges."""
    torch._dynamo.reset()
    monkeypatch.setattr(calls, "folds", lambda *_: False)
    monkeypatch.setattr(calls, "in_scores", lambda key, value, *_: key is not value)
    case = CASES[f"dot with projected edge; {others}"]
    compiled = torch.compile(case.fn, backend=rewriting([], aot))
    for k, sizes in enumerate(((7, 7, 25), (12, 12, 40), (5, 5, 0))):
        x = inputs(*sizes, seed=k, device=device)
        check(gradients(compiled, x), gradients(case.fn, x))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "default"])
def test_by_inductor(mode, device):
    torch._dynamo.reset()
    case = CASES["dot with edge in key; with edge"]
    compiled = dfgnn.compile(case.fn, mode=mode, options=ALL)
    for k, sizes in enumerate(((7, 7, 25), (12, 12, 40))):
        x = inputs(*sizes, seed=k, device=device)
        check(gradients(compiled, x), gradients(case.fn, x))


@pytest.mark.slow
@exhaustive
def test_within_cuda_graphs(device, monkeypatch):
    """All operators on a graph that is sorted in each replay, behind Inductor: without CUDA graphs of its own
    on the CPU, and with them on a GPU."""
    torch._dynamo.reset()
    monkeypatch.setattr(in_cuda_graphs, "DEVICES", ("cpu", "cuda"))
    layer = dfgnn.nn.pyg.GATConv(15, 5, heads=3).double().to(device)
    gated = dfgnn.nn.pyg.ResGatedGraphConv(15, 15, edge_dim=4).double().to(device)
    names = "dot with projected edge; with projected edge", "dot with edge in key; with another edge"

    def fn(*tensors):
        x = Inputs(*tensors)
        weights = dfgnn.functional.sddmm(x.edge_index, x.query, x.key)
        out = dfgnn.functional.spmm(x.edge_index, weights, x.value).flatten(1)
        out = out + layer(x.value.flatten(1), x.edge_index)
        out = (out + gated(x.key.flatten(1), x.edge_index, x.attr)).view(x.query.shape)
        return sum((CASES[name].fn(*tensors) for name in names), out)

    compiled = dfgnn.compile(fn, mode="reduce-overhead", options=ALL, dynamic=False)
    ran = set()
    with torch._inductor.config.patch(force_disable_caches=True):
        for k in (0, 1, 0):
            x = inputs(12, 12, 40, seed=k, device=device)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                found = gradients(compiled, x)
            check(found, gradients(fn, x))
            ran |= {event.name for event in seen.events()}
    made = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("dfgnn::graph_")}
    assert made - ran == {"dfgnn::graph_handle"}


@pytest.mark.parametrize("name", ["rows and columns", "gat; rows of edges", "two values"])
def test_nothing_is_kept_in_cuda_graphs(name, device, monkeypatch):
    """Their memory is not to be held from one step to the next, and replays read what is given to them."""
    torch._dynamo.reset()
    monkeypatch.setattr(in_cuda_graphs, "DEVICES", ("cpu", "cuda"))
    case, seen = CASES[name], set()

    def noting(module, _):
        seen.update(str(node.target).partition("dfgnn.")[2] for node in module.graph.nodes)
        return make_boxed_func(module.forward)

    inner = aot_autograd(fw_compiler=noting, bw_compiler=noting)
    compiled = torch.compile(case.fn, backend=rewriting([], inner), dynamic=False)
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        for k in range(2):
            x = inputs(12, 12, 40, seed=k, device=device)
            check(gradients(compiled, x), gradients(case.fn, x))
    assert {op for op in seen if not op.startswith("graph_")} == {"", "edge_structure.default"}


class Written(torch.nn.Module):
    """A function of edges and tensors, which are parameters here."""

    def __init__(self, fn, x: Inputs):
        super().__init__()
        self.fn, self.edge_index = fn, x.edge_index
        self.tensors = torch.nn.ParameterList(t.detach().clone() for t in x[1:])

    def forward(self):
        # torch 2.11 does not record the list's own iteration.
        return self.fn(self.edge_index, *[self.tensors[k] for k in range(len(self.tensors))])


@pytest.mark.parametrize("name", ["gat; rows of edges", "weights returned", "two values"])
def test_captured(name, device):
    """dfgnn.capture takes compiled steps, also where pairs of indices are made from the step's edges."""
    torch._dynamo.reset()
    case, x, reports, losses = CASES[name], inputs(12, 12, 40, device=device), [], []
    for compiled in (True, False):
        model = Written(case.fn, x)
        if compiled:
            model.compile(backend=rewriting(reports, aot))

        def loss(model=model):
            return sum(out.square().mean() for out in flat(model()))

        step = dfgnn.capture(loss, model, torch.optim.SGD(model.parameters(), lr=0.1), debug=device == "cpu")
        losses.append(torch.stack([step() for _ in range(4)]))
    check([losses[0]], [losses[1]])
    assert reports and all(report.rewritten for report in reports)


def test_small_attention_is_left(device):
    """Small attention is left to Inductor, by the number of edges x heads x columns. Symbolic edges make two
    versions. Sums in 16 bits are in float32 still."""
    torch._dynamo.reset()
    case, made = CASES["gat; rows of sources"], []

    def backend(module, _):
        made.append((module, *rewritten(module, 15 * 40)))
        return made[-1][1].forward

    compiled = torch.compile(case.fn, backend=backend)
    for k, num_edges in enumerate((25, 30, 39, 40, 33, 90, 20)):
        x = inputs(12, 12, num_edges, seed=k, device=device)
        check(gradients(compiled, x), gradients(case.fn, x))
    (static, left, few), (_, _, symbolic), (_, _, many) = made
    assert left is static and not few.rewritten and many.rewritten[0].form == "gat_attention"
    assert [x.reason for x in few.refused] == ["left to Inductor: 25 edges x 3 heads x 5 columns < 600"]
    assert [x.reason for x in symbolic.refused] == ["left to Inductor: edges x 3 heads x 5 columns < 600"]
    made.clear()
    compiled(*inputs(12, 12, 20, dtype=torch.bfloat16, device=device))
    assert {x.form for x in made[0][2].rewritten} == {"index_add in float32"}


@pytest.mark.parametrize("replayed", [False, True])
def test_small_attention_within_cuda_graphs(replayed, device, monkeypatch):
    """The limit is twice as high, and numbers of edges that depend on values count as few."""
    monkeypatch.setitem(rewrite.MIN_ELEMENTS, device, 600)
    fn, left = CASES["dot; rows of sources"].fn, []

    def backend(module, _):
        made, report = rewritten(module, replayed=replayed)
        left.append(not report.rewritten)
        return made.forward

    def masked(edge_index, *tensors):
        return fn(edge_index[:, edge_index[0] > 3], *tensors)

    for call, num_edges in ((fn, 30), (fn, 40), (fn, 90), (masked, 90)):
        torch._dynamo.reset()
        x = inputs(12, 12, num_edges, device=device)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            check([torch.compile(call, backend=backend, dynamic=False)(*x)], [call(*x)])
    assert left == [True, replayed, False, replayed]


def test_small_attention_of_given_scores(device, monkeypatch):
    """The limit is four times as high."""
    monkeypatch.setitem(rewrite.MIN_ELEMENTS, device, 600)
    for name, at_least in (("given; rows of sources", 2400), ("dot; rows of sources", 600)):
        for num_edges in (at_least // 15 - 1, at_least // 15):
            torch._dynamo.reset()
            reports: list = []

            def backend(module, _, reports=reports):
                reports.append(rewritten(module)[1])
                return module.forward

            torch.compile(CASES[name].fn, backend=backend)(*inputs(12, 12, num_edges, device=device))
            assert bool(reports[0].rewritten) == (15 * num_edges >= at_least)


@pytest.mark.parametrize("fn", [by_another_index, activation_in_place_of_softmax])
def test_large_sums_without_a_softmax_of_their_own(fn, device, monkeypatch):
    """On a GPU such sums use our kernels only from twice the limit on, because edges are sorted for them
    alone. There are two versions if the number of edges is symbolic."""
    monkeypatch.setitem(rewrite.MIN_ELEMENTS, device, 600)
    torch._dynamo.reset()
    forms = []

    def backend(module, _):
        made, report = rewritten(module)
        forms.append([found.form for found in report.rewritten])
        return made.forward

    fn = of_tensors(fn)
    compiled = torch.compile(fn, backend=backend)
    for k, num_edges in enumerate((79, 81, 90, 60)):
        x = inputs(12, 12, num_edges, seed=k, device=device)
        check(gradients(compiled, x), gradients(fn, x))
    assert forms == [[], ["spmm"], []]


def test_the_option_of_the_backend(device, monkeypatch):
    """And that there is no limit within steps that are captured, unless it is given."""
    monkeypatch.setitem(rewrite.MIN_ELEMENTS, device, 601)
    forms = []
    case, x = CASES["gat; rows of sources"], inputs(12, 12, 40, device=device)
    listeners.append(forms.append)
    try:
        for least, captured, attention in (
            (None, False, False), (None, True, True), (601, True, False), (600, False, True)
        ):  # fmt: skip
            torch._dynamo.reset()
            options = {} if least is None else {MIN_ELEMENTS: least}
            with torch.no_grad(), captured_step() if captured else nullcontext():
                torch.compile(case.fn, backend=dfgnn.compiling.backend, options=options)(*x)
            assert bool(forms.pop().rewritten) is attention
    finally:
        listeners.remove(forms.append)
    with pytest.raises(ValueError, match="options: expected dfgnn.min_elements of at least 0, got -1"):
        dfgnn.compile(case.fn, options={"dfgnn.min_elements": -1})


def test_it_has_a_name():
    group = "[project.entry-points.torch_dynamo_backends]\n"
    line = (ROOT / "pyproject.toml").read_text().partition(group)[2].partition("\n")[0]
    name, value = line.split(" = ")
    found = EntryPoint(name, value.strip('"'), "torch_dynamo_backends").load()
    assert name == "dfgnn" and found is dfgnn.compiling.backend


def test_options_and_a_mode():
    with pytest.raises(
        ValueError, match="dfgnn.compile: options: expected none but dfgnn.min_elements with a mode.*, got x"
    ):
        dfgnn.compile(torch.sin, mode="default", options={"x": 1})


class Mine(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add", node_dim=0)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j, index, size_i):
        weight = softmax((x_i * x_j).sum(-1), index, num_nodes=size_i)
        return weight.unsqueeze(-1) * x_j


def layers():
    return {
        "Mine": (Mine(), "dot_attention"),
        "GATConv": (GATConv(8, 4, heads=3, add_self_loops=False), "gat_attention"),
        "GATConv, edges": (GATConv(8, 4, heads=2, add_self_loops=False, edge_dim=5), "gat_attention, with"),
        "GATv2Conv": (GATv2Conv(8, 4, heads=2, add_self_loops=False), "gatv2_attention"),
        "GATv2Conv, edges": (
            GATv2Conv(8, 4, heads=2, add_self_loops=False, edge_dim=5),
            "gatv2_attention, with",
        ),
        "TransformerConv": (TransformerConv(8, 4, heads=2), "dot_attention"),
        "TransformerConv, edges": (
            TransformerConv(8, 4, heads=2, edge_dim=5, beta=True),
            "dot_attention, with",
        ),
    }


@pytest.mark.parametrize("name", layers())
def test_layers_of_torch_geometric(name):
    """torch_geometric's own forward is attention that somebody wrote."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, form = layers()[name]
    layer, reports = layer.double(), []
    x, edge_index = torch.randn(9, 8, dtype=torch.float64), torch.randint(0, 9, (2, 40))
    more = (torch.randn(40, 5, dtype=torch.float64),) if "edges" in name else ()
    out = torch.compile(layer, backend=rewriting(reports))(x, edge_index, *more)
    check([out], [layer(x, edge_index, *more)])
    assert [found.form.startswith(form) for report in reports for found in report.rewritten] == [True]


def test_dropout_of_the_weights():
    """The mask is one of its own, with the mean of the weights as they are."""
    torch._dynamo.reset()

    def attention(*tensors):
        x = Inputs(*tensors)
        weight = softmax(x.bias, x.dst, num_nodes=len(x.query))
        weight = torch.nn.functional.dropout(weight, 0.4, True)
        return x.query.new_zeros(x.query.shape).index_add(
            0, x.dst, weight.unsqueeze(-1) * torch.ones_like(x.value)[x.src]
        )

    reports: list = []
    compiled = torch.compile(attention, backend=rewriting(reports))
    x = inputs(4, 4, 4000)
    out = compiled(*x)
    assert [found.form for found in reports[0].rewritten] == ["score_attention, values at nodes"]
    assert ((out - 1).abs() < 0.2).all() and (out - 1).abs().max() > 1e-4
    assert (out - compiled(*x)).abs().max() > 1e-4, "another mask in each call"


@pytest.mark.parametrize("dtype, stops", [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_sums_in_16_bits_do_not_stop(dtype, stops):
    torch._dynamo.reset()
    reports: list = []
    compiled = torch.compile(
        lambda x, index: x.new_zeros(2, x.shape[1]).index_add_(0, index, x), backend=rewriting(reports)
    )
    out = compiled(torch.ones(3 * stops, 1, dtype=dtype), torch.zeros(3 * stops, dtype=torch.int64))
    assert out.dtype == dtype and out.tolist() == [[3 * stops], [0]]
    assert reports[0].rewritten[0].form == "index_add in float32"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "name", ["dot; rows of sources", "gatv2 with edge; rows of sources", "given; with edge"]
)
def test_dtypes(name, dtype):
    """Compared with float64; the error may be twice that of the code as it is."""
    torch._dynamo.reset()
    case, x = CASES[name], inputs(9, 9, 60, dtype=dtype)
    exact = gradients(case.fn, Inputs(x.edge_index, *(t.detach().double().requires_grad_() for t in x[1:])))
    plain = gradients(case.fn, x)
    ours = gradients(torch.compile(case.fn, backend=rewriting([])), x)
    for a, b, c in zip(ours, plain, exact, strict=True):
        if c is None:
            continue
        assert a.dtype == b.dtype
        limit = 2 * (b.double() - c).abs().max() + torch.finfo(dtype).eps * c.abs().max()
        assert (a.double() - c).abs().max() <= limit


def test_an_index_out_of_range():
    torch._dynamo.reset()
    case = CASES["dot; rows of sources"]
    x = inputs(9, 9, 60)
    x.edge_index[1, 3] = 9
    with pytest.raises(ValueError, match="edge_index"):
        torch.compile(case.fn, backend=rewriting([]))(*x)


def test_the_graph_is_made_once():
    """For rows of an edge_index in either order, whatever the compiled code copies."""
    torch._dynamo.reset()
    from dfgnn.graph import cache

    for name in ("rows and columns", "dot; rows of sources"):
        case, x = CASES[name], inputs(9, 9, 60)
        compiled = torch.compile(case.fn, backend=rewriting([], aot))
        compiled(*x)
        before = len(cache._cache)
        for _ in range(3):
            compiled(*x)
        assert len(cache._cache) == before
        x.edge_index.copy_(x.edge_index.flip(1))  # modified, so that it is made again
        check([compiled(*x)], [case.fn(*x)])


def test_sizes_that_change():
    """Fifty batches of other sizes compile once more at most, for symbolic sizes."""
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    draw = torch.Generator().manual_seed(0)
    for name in ("dot with projected edge; with projected edge", "gat; rows of edges"):
        before, case = counts["unique_graphs"], CASES[name]
        compiled = torch.compile(case.fn, backend=rewriting([], aot))
        for seed in range(50):
            nodes, edges = torch.randint(2, 90, (2,), generator=draw).tolist()
            x = inputs(nodes, nodes, edges, seed=seed)
            check([compiled(*x)], [case.fn(*x)])
        assert counts["unique_graphs"] - before <= 2


def test_explain():
    torch._dynamo.reset()
    model, x = Mine(), torch.randn(5, 8)
    text = str(dfgnn.explain(dfgnn.compile(model), x, torch.randint(0, 5, (2, 9))))
    assert f"{__file__}:" in text and "in message, dot_attention: backend dfgnn" in text

    def own(score, index):
        e = score.exp()
        return e / (score.new_zeros(5).index_add(0, index, e.detach())[index] + 1)

    text = str(dfgnn.explain(torch.compile(own), torch.randn(9), torch.randint(0, 5, (9,))))
    assert "in own: as written" in text and "not backend dfgnn: what divides the exponentials" in text


def test_what_is_left_is_logged(caplog):
    torch._dynamo.reset()
    from dfgnn.compiling.backend import tell

    def own(score, index):
        e = score.exp()
        return e / score.new_zeros(5).index_add(0, index, e.detach())[index]

    modules = []
    torch.compile(own, backend=lambda module, _: modules.append(module) or module.forward)(
        torch.randn(9), torch.randint(0, 5, (9,))
    )
    with caplog.at_level(logging.INFO):
        tell(rewritten(modules[0])[1])
    (record,) = (record for record in caplog.records if record.name == "dfgnn.compile")
    assert record.levelname == "WARNING" and "in own: as it was: what divides" in record.getMessage()


def test_a_graph_without_attention_stays_itself():
    torch._dynamo.reset()
    seen = []

    def backend(module, example_inputs):
        seen.append(rewritten(module)[0] is module)
        return module.forward

    torch.compile(lambda x: x.sin().sum(), backend=backend)(torch.randn(3))
    assert seen == [True]
