"""Tensors that are rewritten after a layer has used them, by PyTorch's operations and behind its back.

A layer derives graphs and more from its indices, and keeps them. Whatever is written, and by whom, the next
call on a CPU is that of torch_geometric's layer with the new contents.
"""

import contextlib
import copy
import ctypes
import gc
import io
import itertools
import os
import weakref

import pytest
import torch
from torch import nn

from dfgnn import Graph
from dfgnn.nn import pyg
from dfgnn.nn.dgl import HGTConv

torch_geometric = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
NODES, EDGES = 12, 40


# ---- ways to write ---------------------------------------------------------------------------------------


def in_another_process(x, new):
    """Writes ``new`` to x, which is in shared memory, from a forked process."""
    new, address, size = new.contiguous(), x.data_ptr(), x.nbytes
    child = os.fork()
    if child == 0:
        ctypes.memmove(address, new.data_ptr(), size)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def resized(x, new):
    x.resize_(0).resize_(new.shape).copy_(new)


WAYS = {
    "in place": lambda x, new: x.copy_(new),
    "NumPy": lambda x, new: x.numpy().__setitem__(..., new.numpy()),
    ".data": lambda x, new: x.data.copy_(new),
    "another .data": lambda x, new: setattr(x, "data", new.clone()),
    "detach": lambda x, new: x.detach().copy_(new),
    "DLPack": lambda x, new: torch.from_dlpack(x).copy_(new),
    "storage": lambda x, new: x.untyped_storage().copy_(new.contiguous().untyped_storage()),
    "another process": in_another_process,
    "set_": lambda x, new: x.set_(new.clone()),
    "resize_": resized,
    "swap_tensors": lambda x, new: torch.utils.swap_tensors(x, new.clone()),
}


@torch.no_grad()
def write(way, x, new):
    WAYS[way](x, new)


# ---- layers, and the tensors that they take --------------------------------------------------------------


def tensors_of(seed):
    generator = torch.Generator().manual_seed(seed)

    def ints(high, *shape):
        return torch.randint(high, shape, generator=generator)

    def floats(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sizes = torch.tensor([[5, 4, 3], [2, 3, 7]][seed % 2])
    return {
        "x": floats(NODES, 4),
        "x_0": floats(NODES, 4),
        "rows": floats(EDGES, 4),
        "edge_index": ints(NODES, 2, EDGES),
        "other_index": ints(NODES, 2, EDGES),
        "edge_attr": floats(EDGES, 3),
        "edge_weight": floats(EDGES),
        "edge_type": ints(4, EDGES),
        "node_type": ints(3, NODES),
        "batch": torch.arange(3).repeat_interleave(sizes),
        "index": ints(5, EDGES),
        "ptr": torch.tensor([[0, 7, 7, 30, EDGES], [0, 11, 20, 22, EDGES]][seed % 2]),
    }


class Subject:
    """A layer beside torch_geometric's, or, where ``upstream`` is None, beside itself with other tensors.

    call: ``(layer, tensors) -> a tensor or several``; names: the tensors that it takes.
    """

    def __init__(self, ours, upstream, names, call):
        torch.manual_seed(0)
        self.names, self.call = names, call
        self.ours = ours().double()
        self.upstream = copy.deepcopy(self.ours) if upstream is None else upstream().double()
        if upstream is not None:
            self.upstream.load_state_dict(self.ours.state_dict())

    def expected(self, tensors):
        return self.call(self.upstream, {name: x.clone() for name, x in tensors.items()})

    def check(self, tensors):
        for one, other in zip(flat(self.call(self.ours, tensors)), flat(self.expected(tensors)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)

    def tensors(self, seed=0):
        return {name: x for name, x in tensors_of(seed).items() if name in self.names}


def flat(x):
    if isinstance(x, dict):
        x = tuple(x.values())
    return [y for part in x for y in flat(part)] if isinstance(x, tuple) else [x]


def of_pyg(name, *args, names=("x", "edge_index"), call=None, home=torch_geometric.nn, **options):
    names = tuple(names)

    def positional(layer, tensors):
        return layer(*(tensors[name] for name in names))

    def make(cls):
        return lambda: cls(*args, **copy.deepcopy(options)).eval()

    ours, theirs = (make(getattr(library, name)) for library in (pyg, home))
    return lambda: Subject(ours, theirs, names, call or positional)


METADATA = ["a", "b"], [("a", "to", "b"), ("b", "to", "a")]


def typed(layer, tensors):
    x = {"a": tensors["x"], "b": tensors["x_0"]}
    return layer(x, dict(zip(METADATA[1], (tensors["edge_index"], tensors["other_index"]))))


def grouped(name):
    return lambda layer, tensors: layer(tensors["rows"], **{name: tensors[name]})


def typed_linear(in_size, out_size, num_types):
    """A projection for each type of the rows, as HGTConv has it."""
    return HGTConv(in_size, out_size, 1, num_types, 1).linear_k


EDGE = "x", "edge_index", "edge_attr"
SUBJECTS = {
    "GATConv": of_pyg("GATConv", 4, 3, heads=2),
    "GATConv no loops": of_pyg("GATConv", 4, 3, heads=2, add_self_loops=False),
    **{
        f"{name} {fill}": of_pyg(name, 4, 3, heads=2, edge_dim=3, fill_value=fill, names=EDGE)
        for name in ("GATConv", "GATv2Conv")
        for fill in ("mean", "add", "max", 0.5)
    },
    "GATv2Conv": of_pyg("GATv2Conv", 4, 3, heads=2),
    "TransformerConv": of_pyg("TransformerConv", 4, 3, heads=2, edge_dim=3, names=EDGE),
    "AGNNConv": of_pyg("AGNNConv"),
    "SuperGATConv": of_pyg("SuperGATConv", 4, 3, heads=2),
    "FAConv": of_pyg("FAConv", 4, names=("x", "x_0", "edge_index")),
    "FAConv no loops": of_pyg("FAConv", 4, add_self_loops=False, names=("x", "x_0", "edge_index")),
    "FAConv weights": of_pyg("FAConv", 4, normalize=False, names=("x", "x_0", "edge_index", "edge_weight")),
    "GENConv": of_pyg("GENConv", 4, 3, edge_dim=3, names=EDGE),
    "GeneralConv": of_pyg("GeneralConv", 4, 3, attention=True, heads=2),
    "ResGatedGraphConv": of_pyg("ResGatedGraphConv", 4, 3, edge_dim=3, names=EDGE),
    "HEATConv": of_pyg(
        "HEATConv", 4, 3, 3, 4, 2, 3, 2, names=("x", "edge_index", "node_type", "edge_type", "edge_attr")
    ),
    **{
        f"RGATConv {how}": of_pyg(
            "RGATConv", 4, 3, 4, attention_mechanism=f"{how}-relation", names=("x", "edge_index", "edge_type")
        )
        for how in ("within", "across")
    },
    "HGTConv": of_pyg(
        "HGTConv", 4, 4, METADATA, 2, names=("x", "x_0", "edge_index", "other_index"), call=typed
    ),
    "HANConv": of_pyg(
        "HANConv", 4, 4, METADATA, 2, names=("x", "x_0", "edge_index", "other_index"), call=typed
    ),
    "GPSConv": of_pyg("GPSConv", 4, None, heads=2, names=("x", "edge_index", "batch")),
    "SoftmaxAggregation index": of_pyg(
        "SoftmaxAggregation", names=("rows", "index"), call=grouped("index"), home=torch_geometric.nn.aggr
    ),
    "SoftmaxAggregation ptr": of_pyg(
        "SoftmaxAggregation", names=("rows", "ptr"), call=grouped("ptr"), home=torch_geometric.nn.aggr
    ),
    "AttentionalAggregation": of_pyg(
        "AttentionalAggregation",
        nn.Linear(4, 1),
        names=("rows", "index"),
        call=grouped("index"),
        home=torch_geometric.nn.aggr,
    ),
    "TypedLinear": lambda: Subject(
        lambda: typed_linear(4, 3, 3),
        None,
        ("x", "node_type"),
        lambda layer, t: layer(t["x"], t["node_type"]),
    ),
}


def write_and_check(subject, way, name):
    """Checks the layer before a tensor's contents are replaced, after it, and after they are set back."""
    tensors, others = subject.tensors(), subject.tensors(1)
    before = tensors[name].clone()
    if way == "another process":
        tensors[name].share_memory_()
    for new in (None, others[name], before):
        if new is not None:
            write(way, tensors[name], new)
        for _ in range(2):  # the second call uses what the first has cached
            subject.check(tensors)


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_way_to_write(name):
    """All ways with one layer; with the others one of each kind. Of features of nodes nothing is kept."""
    subject = SUBJECTS[name]()
    tensors, ways = subject.names, WAYS
    if name != "GATConv mean":
        tensors = [tensor for tensor in tensors if tensor not in ("x", "x_0", "rows")]
        ways = ("in place", "NumPy", ".data", "set_", "swap_tensors")
    for tensor, way in itertools.product(tensors, ways):
        write_and_check(subject, way, tensor)


FORMS = {
    "int32": lambda x: x.int(),
    "[E, 2] transposed": lambda x: x.t().contiguous().t(),
    "rows with gaps": lambda x: torch.cat([x, x], 1)[:, :EDGES],
    "with gaps": lambda x: torch.stack([x, x], 2)[..., 0],
    "rows turned round": lambda x: x.flip(0).as_strided((2, EDGES), (EDGES, 1)),
    "a parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "a buffer of NumPy": lambda x: torch.from_numpy(x.numpy()),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_an_index(form):
    subject, tensors = SUBJECTS["GATConv mean"](), tensors_of(0)
    for way in ("in place", ".data", "detach", "DLPack"):
        tensors = subject.tensors()
        tensors["edge_index"] = FORMS[form](tensors["edge_index"])
        for seed in range(3):
            write(way, tensors["edge_index"], tensors_of(seed)["edge_index"])
            subject.check(tensors)
            subject.check(tensors)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
def test_sparse_tensors(layout):
    subject = SUBJECTS["GATConv no loops"]()
    index = torch.stack([torch.arange(NODES), torch.arange(NODES).flip(0)])
    matrix = torch.sparse_coo_tensor(index, torch.ones(NODES), (NODES, NODES)).coalesce()
    matrix = matrix.to_sparse(layout=layout)
    columns = {
        torch.sparse_coo: lambda x: x._indices()[1],
        torch.sparse_csr: lambda x: x.col_indices(),
        torch.sparse_csc: lambda x: x.row_indices(),
    }[layout](matrix)
    x = subject.tensors()["x"]
    for shift in (0, 3, 0):
        columns.numpy()[...] = (columns.flip(0).numpy() + shift) % NODES
        expected = subject.ours(x, matrix.to_sparse_coo().clone().to_sparse(layout=layout))
        assert torch.equal(subject.ours(x, matrix), expected)


def test_edges_between_two_kinds_of_nodes_of_a_model():
    """Layers that share an ``edge_index``, and a step of training between the writes."""
    edge_index = tensors_of(0)["edge_index"]
    models = []
    for home in (pyg, torch_geometric.nn):
        torch.manual_seed(0)
        models.append(nn.ModuleList([home.GATConv(4, 4), home.GATv2Conv(4, 4), home.TransformerConv(4, 4)]))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for seed in range(6):
        edge_index.numpy()[...] = tensors_of(seed // 2)["edge_index"].numpy()
        outs = []
        for model, optimizer, edges in zip(models, optimizers, (edge_index, edge_index.clone())):
            out = tensors_of(9)["x"].float()
            for layer in model:
                out = layer(out, edges).relu()
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
            outs.append(out.detach())
        torch.testing.assert_close(*outs)


def test_a_compiled_layer():
    subject = SUBJECTS["GATConv mean"]()
    subject.ours = torch.compile(subject.ours, backend="aot_eager", fullgraph=True)
    for tensor, way in itertools.product(subject.names, ("NumPy", ".data", "swap_tensors")):
        write_and_check(subject, way, tensor)


# ---- what a layer returns --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SUBJECTS if name.startswith(("GAT", "FA", "Tr", "RGAT"))])
def test_what_is_returned_may_be_written_to(name):
    subject = SUBJECTS[name]()
    call = subject.call

    def with_attention(layer, tensors):
        return call(lambda *args: layer(*args, return_attention_weights=True), tensors)

    subject.call = with_attention
    tensors = subject.tensors()
    for _ in range(2):
        for part in flat(with_attention(subject.ours, tensors)):
            if part.data_ptr() != tensors["edge_index"].data_ptr():
                part.detach().fill_(7)
        subject.check(tensors)
        subject.call = call
        subject.check(tensors)
        subject.call = with_attention


def test_the_edges_of_a_graph_that_were_written_to():
    edge_index = tensors_of(0)["edge_index"]
    graph = Graph.from_edge_index(edge_index.clone(), num_nodes=NODES)
    graph.edge_index.fill_(0)
    assert torch.equal(graph.edge_index, edge_index)


# ---- the first call is under a transform -----------------------------------------------------------------

TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x + 1])),
    "inference mode": lambda f, x: torch.inference_mode()(f)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_what_a_transform_leaves(name, transform):
    """Nothing that is wrapped by a transform is kept for the calls after it."""
    subject = SUBJECTS[name]()
    tensors, first = subject.tensors(), subject.names[0]
    # Not every layer can be transformed; what it leaves is of interest here.
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        transform(lambda x: flat(subject.call(subject.ours, tensors | {first: x}))[0], tensors[first])
    subject.check(tensors)
    tensors[first].requires_grad_()
    sum(part.sum() for part in flat(subject.call(subject.ours, tensors))).backward()


# ---- tensors that are swapped, copied, saved --------------------------------------------------------------


class Model(nn.Module):
    """With its edges and their types among its buffers."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.relational = pyg.GATConv(4, 4), pyg.RGATConv(4, 4, 4)
        for name in ("edge_index", "edge_type"):
            self.register_buffer(name, tensors_of(seed)[name])

    def forward(self, x):
        return self.relational(self.conv(x, self.edge_index), self.edge_index, self.edge_type)


def test_load_state_dict_that_swaps():
    x, model, other = tensors_of(0)["x"].float(), Model(0), Model(1)
    nn.init.normal_(model.relational.l2)
    other.load_state_dict({**model.state_dict(), **dict(other.named_buffers())})
    model(x).sum().backward()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(copy.deepcopy(other.state_dict()))
        model.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    torch.testing.assert_close(model(x), other(x), rtol=0, atol=0)


def test_swapped_after_use():
    """torch.utils.swap_tensors of two tensors that were both used: each then has the cached graph of its new
    contents."""
    subject = SUBJECTS["RGATConv across"]()
    one, other = subject.tensors(0), subject.tensors(1)
    for _ in range(3):
        subject.check(one)
        subject.check(other)
        for name in subject.names:
            torch.utils.swap_tensors(one[name], other[name])


def test_a_used_tensor_is_saved_and_copied_as_ever():
    def saved(x):
        file = io.BytesIO()
        torch.save(x, file)
        return file.getvalue()

    subject = SUBJECTS["GATConv"]()
    tensors = subject.tensors()
    edge_index = tensors["edge_index"]
    before = saved(edge_index)
    subject.check(tensors)
    assert saved(edge_index) == before and not vars(edge_index)
    edge_index.note = "mine"
    subject.check(tensors)
    for copied in (lambda x: torch.load(io.BytesIO(saved(x)), weights_only=True), copy.copy, copy.deepcopy):
        again = copied(edge_index)
        assert again.note == "mine" and torch.equal(again, edge_index)
        again[0, 0] = (again[0, 0] + 1) % NODES  # that of copy.copy has the memory of the first one
        subject.check(tensors | {"edge_index": again})
        subject.check(tensors)


@pytest.mark.parametrize("name", SUBJECTS)
def test_nothing_that_is_kept_holds_its_tensors(name):
    subject = SUBJECTS[name]()
    tensors = subject.tensors()
    subject.check(tensors)
    storages = [weakref.ref(x.untyped_storage()) for x in tensors.values()]
    del tensors
    gc.collect()
    assert not any(storage() is not None for storage in storages)


# ---- the checksum -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 31, 64, 65, 1000])
def test_one_other_number_is_noticed(size, dtype):
    """A single changed element of a tensor of types, or two exchanged ones, change the layer's result."""
    layer, x = typed_linear(1, 1, 3), torch.ones(size, 1)
    layer.W.data = torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
    types = torch.arange(size).remainder(3).to(dtype)
    places = range(size) if size <= 65 else range(0, size, 37)
    for place in places:
        for new in (2, 0, 1, place % 3):
            types.numpy()[place] = new
            assert torch.equal(layer(x, types), 2.0 ** types.view(-1, 1))
    for place in range(size - 1):
        types.numpy()[[place, place + 1]] = types.numpy()[[place + 1, place]]
        assert torch.equal(layer(x, types), 2.0 ** types.view(-1, 1))


def test_long_tensors():
    """Tensors so long that their contents are compared in several runs, by any number of threads."""
    layer, size = typed_linear(1, 1, 2), 2**19
    layer.W.data = torch.tensor([1.0, 2.0]).view(2, 1, 1)
    types, x = torch.zeros(size, dtype=torch.int64), torch.ones(size, 1)
    for place in (0, 2**17 - 1, 2**17, 2**18 + 5, size - 1):
        types.numpy()[place] = 1
        assert layer(x, types).sum() == size + types.sum()
