"""What the attention functions promise besides their numbers: inputs, dropout, autograd, operators,
errors."""

import itertools
import weakref

import pytest
import torch
from attention import DTYPES, SCORES, function, make_inputs, run
from covering import covered, exhaustive
from graphs import make_graph
from torch import library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dfgnn import functional, reference

ALL = {"term": True, "weight": "H"}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("score", SCORES)
def test_inputs_and_graph_are_not_modified(device, score):
    graph = make_graph("mixed_degrees", device)
    inputs = make_inputs(score, graph, 3, 8, **ALL)
    tensors = [*inputs.values(), *graph.csr(), *graph.reverse_csr(need_eids=True), graph.edge_index]
    before = [None if x is None else x.clone() for x in tensors]
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
    out, attention = function(score)(graph, **leaves, return_attention=True, dropout_p=0.2)
    grads = [torch.randn_like(out), torch.randn_like(attention)]
    copies = [g.clone() for g in grads]
    torch.autograd.backward([out, attention], grads)
    for x, y in zip([*tensors, *grads], [*before, *copies]):
        assert x is None and y is None or torch.equal(x, y)


@covered(dtype=DTYPES, name=["mixed_degrees", "super_row", "super_source"], score=SCORES)
def test_two_runs_are_bitwise_equal(device, score, name, dtype):
    graph = make_graph(name, device)
    inputs = make_inputs(score, graph, 8, 32, dtype, **ALL)
    for options in (
        {},
        {"return_attention": True, "dropout_p": 0.4, "generator": torch.tensor([1], device=device)},
    ):
        assert same(
            run(function(score), graph, inputs, **options), run(function(score), graph, inputs, **options)
        )


# ---- dropout ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("module", [functional, reference], ids=["functional", "reference"])
def test_dropout_follows_torchs_seed(device, module, score):
    graph = make_graph("random", device)
    inputs = make_inputs(score, graph, 3, 8)
    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        call = function(score, module)
        results.append(run(call, graph, inputs, dropout_p=0.5, return_attention=True))
    if module is functional:
        assert same(results[0], results[1])
    else:  # whose sums by an index are added up on a GPU in any order
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(results[0]["attention"], results[2]["attention"])


@pytest.mark.parametrize("score", SCORES)
def test_dropout_at_the_ends(device, score):
    graph = make_graph("random", device)
    inputs = make_inputs(score, graph, 3, 8, **ALL)
    results = run(function(score), graph, inputs, dropout_p=1.0, return_attention=True)
    assert all(x.eq(0).all() for x in results.values())
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    function(score)(graph, **inputs, dropout_p=0.0)
    assert torch.equal(state, torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state())


# ---- autograd and operators ------------------------------------------------------------------------------


def test_second_derivatives_of_the_bare_operators_are_refused(device):
    """Only the functions have second derivatives; test_second_order.py tests those."""
    graph = make_graph("random", device)
    inputs = {n: x.requires_grad_() for n, x in make_inputs("gat", graph, 2, 4).items()}
    with Recorder() as recorder:
        functional.gat_attention(graph, **inputs)
    ((op, args, _),) = recorder.calls
    value = args[1].detach().requires_grad_()
    out, *_ = op(args[0], value, *args[2:])
    (grad,) = torch.autograd.grad(out.square().sum(), value, create_graph=True)
    with pytest.raises(NotImplementedError, match="attention_backward is not differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("score", SCORES)
def test_no_graph_is_recorded_without_gradients(device, score):
    graph = make_graph("random", device)
    inputs = make_inputs(score, graph, 2, 4)
    assert not function(score)(graph, **inputs).requires_grad
    with torch.no_grad():
        assert not function(score)(graph, **{n: x.requires_grad_() for n, x in inputs.items()}).requires_grad
    with torch.inference_mode():
        assert torch.equal(function(score)(graph, **inputs), function(score)(graph, **inputs))


def test_hooks_see_the_result(device):
    """saved_tensors_hooks, as offloading uses them, get everything that backward needs, also the result."""
    graph = make_graph("random", device)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.data_ptr()) or x, lambda x: x):
        out = function("gat")(
            graph, **{n: x.requires_grad_() for n, x in make_inputs("gat", graph, 2, 4).items()}
        )
    assert out.data_ptr() in seen


def test_a_modified_input_is_refused(device):
    graph = make_graph("random", device)
    inputs = {n: x.requires_grad_() for n, x in make_inputs("gat", graph, 2, 4).items()}
    feat = inputs["value"] * 1
    out = function("gat")(graph, **{**inputs, "value": feat})
    feat.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_results_are_freed(device, no_collection):
    """No cycle keeps a result alive, and backward lets go of it while the loss lives on."""
    graph = make_graph("random", device)
    out = function("gat")(
        graph, **{n: x.requires_grad_() for n, x in make_inputs("gat", graph, 2, 4).items()}
    )
    node = out.grad_fn
    loss, alive = out.sum(), weakref.ref(out)
    del out
    assert alive() is None
    loss.backward()
    assert node.output is None


class Recorder(TorchDispatchMode):
    """Keeps the calls of the attention operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op._schema.name.startswith("dfgnn::attention"):  # planning has operators, too
            self.calls.append((op, args, kwargs or {}))
        return op(*args, **(kwargs or {}))


MORE = {"return_attention": True, "dropout_p": 0.5}
CHECKED = [("gat", ALL, MORE), ("gatv2", {}, {}), ("dot", ALL, {})]
CHECKED += [
    pytest.param(score, options, more, marks=exhaustive)
    for score, options, more in itertools.product(SCORES, ({}, ALL), ({}, MORE))
    if (score, options, more) not in CHECKED
]


@pytest.mark.parametrize("score, options, more", CHECKED)
def test_opcheck(device, score, options, more):
    graph = make_graph("fewer_destinations", device)
    inputs = {n: x.requires_grad_() for n, x in make_inputs(score, graph, 2, 4, **options).items()}
    with Recorder() as recorder:
        results = function(score)(graph, **inputs, **more)
        sum(x.square().sum() for x in (results if more else (results,))).backward()
    assert [op._schema.name for op, *_ in recorder.calls] == [
        "dfgnn::attention_forward",
        "dfgnn::attention_backward",
    ]
    for op, args, kwargs in recorder.calls:
        # Forward is checked with its gradients, backward without, because the operator has no derivative.
        wants_grad = op._schema.name.endswith("forward")

        def recreate(x, wants_grad=wants_grad):
            return x.detach().clone().requires_grad_(wants_grad and x.is_floating_point())

        args, kwargs = tree_map_only(torch.Tensor, recreate, (args, kwargs))
        library.opcheck(op, args, kwargs)


def test_backward_in_another_thread_and_forward_in_a_fresh_process(plain_python):
    """Autograd runs backward in its own threads; and the first call of a process may come from anywhere."""
    code = """
import threading, torch, dfgnn
from dfgnn import functional
graph = dfgnn.Graph.from_coo(torch.tensor([0, 1, 2]), torch.tensor([1, 1, 0]), num_src=3, num_dst=3)
for function, inputs in (
    (functional.gat_attention, lambda x: (x, x[:, :, 0], x[:, :, 1])),
    (functional.gatv2_attention, lambda x: (x, x, x[0])),
    (functional.dot_attention, lambda x: (x, x, x)),
):
    x = torch.ones(3, 2, 4, requires_grad=True)
    thread = threading.Thread(target=lambda: function(graph, *inputs(x)).sum().backward())
    thread.start()
    thread.join()
    assert abs(x.grad.sum() - 16) < 1e-4, x.grad
"""
    plain_python(code)


@pytest.mark.gpu
@pytest.mark.parametrize("score", SCORES)
def test_graph_and_tensors_on_different_devices(score):
    inputs = make_inputs(score, make_graph("random"), 2, 4)
    with pytest.raises(ValueError, match="cuda"):
        function(score)(make_graph("random", "cuda"), **inputs)
