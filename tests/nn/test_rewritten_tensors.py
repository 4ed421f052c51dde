"""Tensors that are rewritten after a layer has used them, by PyTorch's operations and behind its back.

A layer derives graphs and more from its indices, and keeps them. Whatever is written, and by whom, the next
call on a CPU is that of torch_geometric's layer with the new contents.
"""

import contextlib
import copy
import ctypes
import gc
import inspect
import io
import itertools
import os
import weakref

import pytest
import torch
from every_layer import EDGES, VARIANTS, E, N, X, arguments, assert_equal, both, floats, in_turns, made, names
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dfgnn import Graph
from dfgnn.nn import pyg
from dfgnn.nn.dgl import HGTConv

pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")


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


def fresh(given):
    """The same arguments in memory of their own."""
    return tree_map_only(torch.Tensor, torch.clone, given)


def other(x):
    """Other contents, as valid: ids and rows in the opposite order."""
    return x.flip(0) + 1 if x.is_floating_point() else (x.max() - x).flip(-1)


class Subject:
    """Compares a layer with torch_geometric's, or one of another library with itself on other tensors."""

    def __init__(self, name):
        self.name = name
        self.theirs, self.ours = both(name) if name.startswith("pyg") else [made(name).eval()] * 2

    def given(self):
        return fresh(arguments(self.name))

    def call(self, layer, given, **options):
        torch.manual_seed(1)
        return floats(layer(*given, **options))

    def check(self, given):
        assert_equal(self.call(self.ours, given), self.call(self.theirs, fresh(given)))


def written(given):
    """The tensors of which a layer keeps something: of features nothing is kept."""
    return [x for x in tree_leaves(given) if isinstance(x, torch.Tensor) and not x.is_floating_point()]


SUBJECTS = [*names("pyg"), *(name for name in VARIANTS if name.startswith("pyg")), "dgl HGTConv"]


def write_and_check(subject, way, place, of=written):
    """Checks the layer before a tensor's contents are replaced, after it, and after they are set back."""
    given = subject.given()
    x = of(given)[place]
    before = x.clone()
    if way == "another process":
        x.share_memory_()
    for new in (None, other(before), before):
        if new is not None:
            write(way, x, new)
        for _ in range(2):  # the second call uses what the first has cached
            subject.check(given)


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_way_to_write(name):
    """All ways, and all tensors, with one layer; with the others one way of each kind."""
    subject, of, ways = Subject(name), written, WAYS
    if name == "pyg GATConv attributes":
        of = tree_leaves
    else:
        ways = ("in place", "NumPy", ".data", "set_", "swap_tensors")
    for place, way in itertools.product(range(len(of(subject.given()))), ways):
        write_and_check(subject, way, place, of)


FORMS = {
    "int32": lambda x: x.int(),
    "[E, 2] transposed": lambda x: x.t().contiguous().t(),
    "rows with gaps": lambda x: torch.cat([x, x], 1)[:, :E],
    "with gaps": lambda x: torch.stack([x, x], 2)[..., 0],
    "rows turned round": lambda x: x.flip(0).as_strided((2, E), (E, 1)),
    "a parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "a buffer of NumPy": lambda x: torch.from_numpy(x.numpy()),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_an_index(form):
    subject = Subject("pyg GATConv attributes")
    for way in ("in place", ".data", "detach", "DLPack"):
        x, edge_index, attr = subject.given()
        edge_index = FORMS[form](edge_index)
        for new in (EDGES, other(EDGES), (EDGES + 1) % N):
            write(way, edge_index, new)
            subject.check((x, edge_index, attr))
            subject.check((x, edge_index, attr))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
def test_sparse_tensors(layout):
    layer = pyg.GATConv(8, 4, add_self_loops=False).double()
    index = torch.stack([torch.arange(N), torch.arange(N).flip(0)])
    matrix = torch.sparse_coo_tensor(index, torch.ones(N), (N, N)).coalesce().to_sparse(layout=layout)
    columns = {
        torch.sparse_coo: lambda x: x._indices()[1],
        torch.sparse_csr: lambda x: x.col_indices(),
        torch.sparse_csc: lambda x: x.row_indices(),
    }[layout](matrix)
    for shift in (0, 3, 0):
        columns.numpy()[...] = (columns.flip(0).numpy() + shift) % N
        expected = layer(X, matrix.to_sparse_coo().clone().to_sparse(layout=layout))
        assert torch.equal(layer(X, matrix), expected)


def test_edges_of_a_model_that_is_trained():
    """Layers that share an ``edge_index``, and a step of training between the writes."""
    import torch_geometric.nn as theirs

    models, edge_index = [], EDGES.clone()
    for home in (pyg, theirs):
        torch.manual_seed(0)
        models.append(nn.ModuleList([home.GATConv(8, 8), home.GATv2Conv(8, 8), home.TransformerConv(8, 8)]))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for step in range(6):
        edge_index.numpy()[...] = ((EDGES + step // 2) % N).numpy()
        outs = []
        for model, optimizer, edges in zip(models, optimizers, (edge_index, edge_index.clone())):
            out = X.float()
            for layer in model:
                out = layer(out, edges).relu()
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
            outs.append(out.detach())
        torch.testing.assert_close(*outs)


def test_a_compiled_layer():
    subject = Subject("pyg GATConv attributes")
    subject.ours = torch.compile(subject.ours, backend="aot_eager", fullgraph=True)
    for place, way in itertools.product(range(3), ("NumPy", ".data", "swap_tensors")):
        write_and_check(subject, way, place, tree_leaves)


# ---- what a layer returns --------------------------------------------------------------------------------


ASKED = "return_attention_weights"


@pytest.mark.parametrize(
    "name", [n for n in names("pyg") if ASKED in inspect.signature(made(n).forward).parameters]
)
def test_what_is_returned_may_be_written_to(name):
    subject = Subject(name)
    given = subject.given()
    for _ in range(2):
        for part in tree_leaves(subject.ours(*given, return_attention_weights=True)):
            if not any(part.data_ptr() == x.data_ptr() for x in tree_leaves(given)):
                part.detach().fill_(7)
        found, want = (
            subject.call(layer, given, **{ASKED: True}) for layer in (subject.ours, subject.theirs)
        )
        assert_equal(found, want)
        subject.check(given)


def test_the_edges_of_a_graph_that_were_written_to():
    graph = Graph.from_edge_index(EDGES.clone(), num_nodes=N)
    graph.edge_index.fill_(0)
    assert torch.equal(graph.edge_index, EDGES)


# ---- the first call is under a transform -----------------------------------------------------------------

TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x + 1])),
    "inference mode": lambda f, x: torch.inference_mode()(f)(x),
}


@in_turns("transform", TRANSFORMS, SUBJECTS)
def test_what_a_transform_leaves(name, transform):
    """Nothing that is wrapped by a transform is kept for the calls after it."""
    subject = Subject(name)
    given = subject.given()
    first = next(x for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.is_floating_point())

    def with_features(x):
        return tree_map_only(torch.Tensor, lambda y: x if y is first else y, given)

    # Not every layer can be transformed; what it leaves is of interest here.
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        TRANSFORMS[transform](lambda x: subject.call(subject.ours, with_features(x))[0], first)
    subject.check(given)
    first.requires_grad_()
    sum(part.sum() for part in subject.call(subject.ours, given)).backward()


# ---- tensors that are swapped, copied, saved --------------------------------------------------------------


class Model(nn.Module):
    """A model that has its edges and their types as buffers."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.relational = pyg.GATConv(8, 8), pyg.RGATConv(8, 8, 2)
        self.register_buffer("edge_index", other(EDGES) if seed else EDGES.clone())
        self.register_buffer("edge_type", self.edge_index[0] % 2)

    def forward(self, x):
        return self.relational(self.conv(x, self.edge_index), self.edge_index, self.edge_type)


def test_load_state_dict_that_swaps():
    x, model, another = X.float(), Model(0), Model(1)
    nn.init.normal_(model.relational.l2)
    another.load_state_dict({**model.state_dict(), **dict(another.named_buffers())})
    model(x).sum().backward()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(copy.deepcopy(another.state_dict()))
        model.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    torch.testing.assert_close(model(x), another(x), rtol=0, atol=0)


def test_swapped_after_use():
    """torch.utils.swap_tensors of two tensors that were both used: each then has the cached graph of its new
    contents."""
    subject = Subject("pyg RGATConv")
    one = subject.given()
    two = tree_map_only(torch.Tensor, other, one)
    for _ in range(3):
        subject.check(one)
        subject.check(two)
        for x, y in zip(tree_leaves(one), tree_leaves(two)):
            torch.utils.swap_tensors(x, y)


def test_a_used_tensor_is_saved_and_copied_as_ever():
    def saved(x):
        file = io.BytesIO()
        torch.save(x, file)
        return file.getvalue()

    subject = Subject("pyg GATConv")
    x, edge_index = given = subject.given()
    before = saved(edge_index)
    subject.check(given)
    assert saved(edge_index) == before and not vars(edge_index)
    edge_index.note = "mine"
    subject.check(given)
    for copied in (lambda x: torch.load(io.BytesIO(saved(x)), weights_only=True), copy.copy, copy.deepcopy):
        again = copied(edge_index)
        assert again.note == "mine" and torch.equal(again, edge_index)
        again[0, 0] = (again[0, 0] + 1) % N  # that of copy.copy has the memory of the first one
        subject.check((x, again))
        subject.check(given)


@pytest.mark.parametrize("name", SUBJECTS)
def test_nothing_that_is_kept_holds_its_tensors(name):
    subject = Subject(name)
    given = subject.given()
    subject.check(given)
    tensors = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
    storages = [weakref.ref(x.untyped_storage()) for x in tensors]
    del given, tensors
    gc.collect()
    assert not any(storage() is not None for storage in storages)


# Without HEATConv, whose projection by type is a module of torch_geometric's, which sorts at each call.
@pytest.mark.parametrize("name", [name for name in SUBJECTS if "HEAT" not in name])
def test_what_is_derived_is_kept(name):
    """A second call sorts nothing: graphs, groups of rows by type and relations are those of the first."""
    subject = Subject(name)
    given = subject.given()
    with torch.no_grad():
        subject.call(subject.ours, given)
        with torch.profiler.profile() as found:
            subject.call(subject.ours, given)
    derived = {"aten::sort", "aten::argsort", "aten::unique_dim", "aten::_unique2", "dfgnn::coo_to_csr"}
    assert not derived & {event.name for event in found.events()}


# ---- the checksum -----------------------------------------------------------------------------------------


def typed_linear(in_size, out_size, num_types):
    """A projection for each type of the rows, as HGTConv has it."""
    return HGTConv(in_size, out_size, 1, num_types, 1).linear_k


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
