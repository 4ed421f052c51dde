"""Asking for the attention changes neither a layer's result nor its gradients, to the bit."""

import inspect

import pytest
import torch
from covering import covered
from every_function import CASES
from every_layer import ATTR, WITH_LOOPS, E, N, X, arguments, floats, in_turns, made, names, of
from graphs import make_graph

from dfgnn import Graph

pytestmark = pytest.mark.usefixtures("one_thread")

ASKABLE = [
    name
    for name, case in CASES.items()
    if case.function not in ("edge_softmax", "sddmm", "spmm", "block_attention")
    and "return_attention" not in case.options
]


def compared(call, leaves, autocast, asked):
    """The results without the attention, and the gradients of the leaves."""
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = call(**asked)
    outs = list(out[:-1] if asked else out) if isinstance(out, tuple) else [out]
    leaves = [x for x in leaves if x.requires_grad]
    torch.manual_seed(2)
    loss = sum((x * torch.randn(x.shape)).sum() for x in floats(outs))
    found = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else []
    return [*outs, *(torch.zeros(()) if x is None else x for x in found), torch.random.get_rng_state()]


@covered(
    further=False, name=ASKABLE, hard=["mixed_degrees", "isolated", "sorted", "super_row"],
    heads=[1, 2, 3, 8], size=[1, 3, 8, 20], width=[1, 3, 8], dropout=[0.0, 0.5],
    dtype=["autocast", torch.float32, torch.float64, torch.bfloat16], grad=[True, False],
)  # fmt: skip
def test_functions(monkeypatch, name, hard, heads, size, width, dtype, dropout, grad):
    case, graph, autocast = CASES[name], make_graph(hard), dtype == "autocast"
    case.choose(monkeypatch)
    dtype = torch.float32 if autocast else dtype
    tensors = case.tensors(graph, size, size, width, dtype, batch=False, h=heads)
    tensors = {n: x.requires_grad_(grad) for n, x in tensors.items()}

    def call(**asked):
        return case(graph, tensors, dropout_p=dropout, **asked)

    found, expected = (
        compared(call, tensors.values(), autocast, given) for given in ({"return_attention": True}, {})
    )
    assert all(map(torch.equal, found, expected))


ASKED = {
    name: word
    for name in names()
    for word in {"return_attention_weights", "return_attention", "get_attention"}
    & inspect.signature(made(name).forward).parameters.keys()
}
# Many edges into one node: a row too long to be grouped with others.
LONG = torch.cat([WITH_LOOPS.repeat(1, 10), torch.stack([WITH_LOOPS[0], torch.zeros(E).long()])], 1)


@pytest.mark.parametrize("train", [True, False])
@in_turns("dtype", ["autocast", torch.float32, torch.float64, torch.bfloat16], ASKED)
def test_layers(name, dtype, train):
    autocast, dtype = dtype == "autocast", torch.float32 if dtype == "autocast" else dtype
    layer = made(name).to(dtype).train(train)
    for edges in (None, LONG if of(name) == "pyg" else Graph.from_edge_index(LONG, num_nodes=N)):
        x, attr = (
            t.detach().to(dtype).requires_grad_() for t in (X, ATTR if edges is None else ATTR.repeat(11, 1))
        )

        def call(x=x, attr=attr, edges=edges, **asked):
            bound = inspect.signature(layer.forward).bind(*arguments(name, x, attr, edges))
            bound.arguments.update(asked)
            return layer(*bound.args, **bound.kwargs)

        leaves = [x, attr, *layer.parameters()]
        found, expected = (compared(call, leaves, autocast, asked) for asked in ({ASKED[name]: True}, {}))
        assert all(torch.equal(*pair) for pair in zip(floats(found), floats(expected), strict=True))
