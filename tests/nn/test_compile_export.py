"""Layers that a compiler records together with their edges: torch.compile, torch.export, AOTInductor."""

import subprocess
import sys
import warnings

import pytest
import torch
from compiled_steps import assert_same_step, step
from covering import exhaustive, some
from every_layer import arguments, made, names
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric import EdgeIndex

from dfgnn.graph import cache as _kept
from dfgnn.nn.pyg import AGNNConv, GATConv, HGTConv, RGATConv, SuperGATConv

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# In evaluation, for SuperGATConv in training samples edges in Python. HGTConv and GPSConv have tests of their
# own.
NAMES = names("pyg", without=["HGT", "HAN", "GPS", "Aggregation"])


def make(name, device="cpu"):
    return made(name).eval().to(device)


def batch(name, seed, device="cpu"):
    """Another graph, of another size, for each seed; with loops and repeated edges."""
    generator = torch.Generator().manual_seed(seed)
    num_nodes, num_edges = 30 + 7 * seed, 90 + 31 * seed
    x = torch.randn(num_nodes, 8, generator=generator, dtype=torch.float64).to(device)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator).to(device)
    attr = torch.randn(num_edges, 3, generator=generator, dtype=torch.float64).to(device)
    return arguments(name, x, attr, edge_index)


def export(layer, inputs, **options):
    num_nodes, num_edges = Dim("num_nodes"), Dim("num_edges")
    rows = tree_leaves(inputs)[0].shape[0]

    def sizes(t):
        return {1: num_edges} if t.shape[0] == 2 else {0: num_nodes if t.shape[0] == rows else num_edges}

    return torch.export.export(layer, inputs, dynamic_shapes=tree_map(sizes, inputs), **options)


# ---- torch.compile ---------------------------------------------------------------------------------------


# Those of GATConv, GATv2Conv and TransformerConv also in test_recorded.py.
# Without GeneralConv's products, which are recorded once more, and HEATConv.
@some(["pyg AGNNConv", "pyg RGATConv"], [n for n in NAMES if "products" not in n and "HEAT" not in n])
def test_training_without_a_break(name, device):
    """Batches of changing sizes: torch.compile records once for the first, and once for all others."""
    layer = make(name, device)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for seed in range(3):
        assert_same_step(compiled, layer, batch(name, seed, device))
    assert backend.frame_count <= 2


@exhaustive
def test_inductor(device):
    """A layer with loops and edge attributes in training, and not a warning; as test_compiled_like_float64 on
    sizes that change."""
    model = make("pyg GATConv attributes", device)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module=r"dfgnn")
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        for seed in range(2):
            assert_same_step(compiled, model, batch("pyg GATConv attributes", seed, device))


def test_a_layer_that_samples_breaks_and_goes_on(device):
    """SuperGATConv in training draws edges in Python; the rest is compiled."""
    layer = SuperGATConv(8, 4, heads=3, edge_sample_ratio=0.9).double().to(device)
    compiled = torch.compile(layer, backend="aot_eager")
    x, edge_index = batch("pyg SuperGATConv", 0, device)
    torch.testing.assert_close(compiled(x, edge_index), layer(x, edge_index))
    compiled(x, edge_index)
    layer.get_attention_loss().backward()


def hetero(seed, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"a": 20 + 3 * seed, "b": 30 + 5 * seed}
    x = {kind: torch.randn(size, 8, generator=generator).double().to(device) for kind, size in sizes.items()}
    edges = {}
    for k, (src, name, dst) in enumerate((("a", "x", "b"), ("b", "y", "a"), ("a", "z", "a"))):
        ends = [torch.randint(sizes[kind], (40 + k + 7 * seed,), generator=generator) for kind in (src, dst)]
        edges[src, name, dst] = torch.stack(ends).to(device)
    return x, edges


def test_hgt(device):
    torch.manual_seed(3)
    layer = HGTConv(8, 8, (["a", "b"], list(hetero(0)[1])), heads=2).double().to(device)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for seed in range(2):
        assert_same_step(compiled, layer, hetero(seed, device))
    assert backend.frame_count <= 2
    module = torch.export.export(layer.eval(), hetero(0, device), strict=False).module()
    torch.testing.assert_close(module(*hetero(0, device)), layer(*hetero(0, device)))


def test_types_out_of_range_are_refused():
    compiled = torch.compile(make("pyg RGATConv"), fullgraph=True, backend="aot_eager")
    x, edge_index, edge_type, attr = batch("pyg RGATConv", 0)
    compiled(x, edge_index, edge_type, attr)
    with pytest.raises(ValueError, match="expected values in"):
        compiled(x, edge_index, torch.full_like(edge_type, 4), attr)


def test_attention_is_returned_and_differentiable(device):
    layer = make("pyg GATConv attributes", device)

    def weighted(*inputs):
        out, (edge_index, alpha) = layer(*inputs, return_attention_weights=True)
        return torch.cat([out.flatten(), alpha.sin().flatten(), edge_index.flatten()])

    compiled = torch.compile(weighted, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed in range(2):
        inputs = batch("pyg GATConv attributes", seed, device)
        torch.testing.assert_close(step(compiled, layer, inputs), step(weighted, layer, inputs))


def test_score_terms_are_no_products_of_their_own():
    """The score terms of GAT are recorded as products and sums, not as matrix products: calling one costs
    more than the product itself on a small graph, while the compiler fuses the sums into a kernel."""
    products = []

    def count(module, _):
        names = [node.target.__name__ for node in module.graph.nodes if node.op == "call_function"]
        products.extend(name for name in names if "mm" in name.partition(".")[0])
        return make_boxed_func(module.forward)

    layer = make("pyg GATConv")
    compiled = torch.compile(
        layer, fullgraph=True, backend=aot_autograd(fw_compiler=count, bw_compiler=count)
    )
    assert_same_step(compiled, layer, batch("pyg GATConv", 0))
    assert products == ["mm.default"] * 3


def test_the_graph_is_made_once(count_calls, device):
    """Layers that share an edge_index, forward and backward, and compiled and eager calls make one graph."""
    built = count_calls(_kept, "of_edges")
    first, second = GATConv(8, 8).double().to(device), AGNNConv().double().to(device)
    model = torch.nn.Sequential(first, second)

    def run(x, edge_index):
        return second(first(x, edge_index), edge_index)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    inputs = batch("pyg GATConv", 0, device)
    for _ in range(3):
        step(compiled, model, inputs)
    step(run, model, inputs)
    assert len(built) == 1


def test_edges_out_of_range_are_refused():
    layer = make("pyg GATConv")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, edge_index = batch("pyg GATConv", 0)
    compiled(x, edge_index)
    edge_index[1, 3] = len(x)
    with pytest.raises(ValueError, match=rf"GATConv: edge_index\[1\].*{len(x)}"):
        compiled(x, edge_index)


def test_ids_of_another_type_are_refused():
    """In the numbers that stand for pairs of a type and a node they are those of the next type."""
    x, edges = torch.randn(10, 6), torch.randint(10, (2, 30))
    bad = edges.clone()
    bad[0, 3] = 12
    rgat, kinds = RGATConv(6, 4, 3), torch.zeros(30, dtype=torch.int64)
    relations = ("a", "r", "b"), ("b", "s", "a")
    hgt = HGTConv(6, 4, (["a", "b"], list(relations)), heads=2)
    for name, call in (
        ("RGATConv", lambda e: rgat(x, e, kinds)),
        ("HGTConv", lambda e: hgt({"a": x, "b": x}, {relations[0]: e, relations[1]: edges})),
        ("HGTConv", lambda e: hgt({"a": x, "b": x}, {relations[0]: e.flip(0), relations[1]: edges})),
    ):
        compiled = torch.compile(call, backend="aot_eager")
        torch.testing.assert_close(compiled(edges), call(edges))
        with pytest.raises(ValueError, match=rf"{name}: edge_.* got -1 at position"):
            compiled(bad)


def test_two_kinds_of_nodes():
    layer = GATConv((9, 9), 4, heads=3, add_self_loops=False)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_src, num_dst in ((20, 30), (31, 17)):
        x = torch.randn(num_src, 9), torch.randn(num_dst, 9)
        edge_index = torch.stack([torch.randint(num_src, (80,)), torch.randint(num_dst, (80,))])
        torch.testing.assert_close(compiled(x, edge_index), layer(x, edge_index))


@pytest.mark.parametrize(
    "sizes, name", [(False, "pyg GATConv"), pytest.param(True, "pyg GATv2Conv attributes", marks=exhaustive)]
)
def test_an_edge_index_of_torch_geometric(name, sizes, count_calls, device):
    """torch_geometric.EdgeIndex, a subclass of Tensor: its graph is cached as for a tensor. Where it carries
    its sizes, torch.compile takes them as constants."""
    built = count_calls(_kept, "of_edges")
    layer = make(name, device)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for seed in range(2):
        x, edge_index, *more = batch(name, seed, device)
        edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
        size = (len(x), len(x)) if sizes else None
        given = EdgeIndex(edge_index, sparse_size=size, sort_order="col")
        for run in (compiled, compiled, layer):
            found = run(x, given, *more)
        assert len(built) == seed + 1
        torch.testing.assert_close(compiled(x, given, *more), found)
    assert backend.frame_count <= 3


@some(["csr"], ["coo", "csr", "csc"], "form")
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support")
def test_sparse_tensors_break_and_go_on(form, device):
    """torch.compile cannot record sparse tensors at all: it breaks, and the layer runs eagerly."""
    layer = make("pyg TransformerConv", device)
    compiled = torch.compile(layer, backend="aot_eager")
    for seed in range(3):
        x, edge_index = batch("pyg TransformerConv", seed, device)
        ones = torch.ones(edge_index.shape[1], device=device)
        edges = torch.sparse_coo_tensor(edge_index.flip(0), ones, (len(x), len(x))).coalesce()
        edges = {"coo": edges.clone, "csr": edges.to_sparse_csr, "csc": edges.to_sparse_csc}[form]()
        found = []
        for run in (compiled, layer):
            leaf = x.clone().requires_grad_()
            out = run(leaf, edges)
            found.append([out, *torch.autograd.grad(out.sin().sum(), [leaf, *layer.parameters()])])
        torch.testing.assert_close(*found)


# ---- torch.export ----------------------------------------------------------------------------------------


OF_EXPORT = names(
    "pyg", without=["HGT", "HAN", "GPS", "Aggregation", "pair", "FA", "GEN", "Gen", "GATE", "Res", "HEAT"]
)
EXPORTED = "GATConv", "GATv2Conv attributes", "AGNNConv", "SuperGATConv SD", "RGATConv"


@pytest.mark.parametrize(
    "name, strict",
    [
        *(
            pytest.param(n, False, marks=[exhaustive] * (n.partition(" ")[2] not in EXPORTED))
            for n in OF_EXPORT
        ),
        ("pyg GATConv attributes", True),
        ("pyg TransformerConv", True),
    ],
)
def test_export(name, strict, device):
    layer = make(name, device)
    module = export(layer, batch(name, 0, device), strict=strict).module()
    for seed in range(2):
        inputs = batch(name, seed, device)
        torch.testing.assert_close(module(*inputs), layer(*inputs))


def test_an_exported_layer_is_saved_and_loaded(tmp_path):
    layer = make("pyg GATConv attributes")
    torch.export.save(export(layer, batch("pyg GATConv attributes", 0)), tmp_path / "layer.pt2")
    module = torch.export.load(tmp_path / "layer.pt2").module()
    inputs = batch("pyg GATConv attributes", 4)
    torch.testing.assert_close(module(*inputs), layer(*inputs))


@exhaustive
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12),
    reason="the package crashes in the process that loads it, seen with torch 2.11",
)
def test_aot_inductor(tmp_path, device):
    """The package runs in a process that knows dfgnn alone, without the layers' library."""
    layer = make("pyg GATv2Conv attributes", device)
    with torch.no_grad():
        program = export(layer, batch("pyg GATv2Conv attributes", 0, device))
    package, data = tmp_path / "layer.pt2", tmp_path / "data.pt"
    torch._inductor.aoti_compile_and_package(program, package_path=str(package))
    inputs = [batch("pyg GATv2Conv attributes", seed, device) for seed in range(3)]
    torch.save([(given, layer(*given).detach()) for given in inputs], data)
    code = (
        "import sys, torch, dfgnn\n"
        f"run = torch._inductor.aoti_load_package({str(package)!r})\n"
        f"for given, expected in torch.load({str(data)!r}):\n"
        "    torch.testing.assert_close(run(*given), expected)\n"
        "assert 'torch_geometric' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
