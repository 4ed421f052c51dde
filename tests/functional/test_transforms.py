"""torch.func's transforms and forward mode, also nested, give what they give for plain PyTorch."""

import itertools

import pytest
import torch
from attention import SCORES, function, make_inputs
from every_function import CASES
from graphs import make_graph, tiny_graph
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from dfgnn import functional, reference


def loss(f):
    return lambda *x: f(*x).pow(2).sum()


def everything(x):
    return tuple(range(len(x)))


def one_batched(x):
    return (0,) + (None,) * (len(x) - 1)


def others_batched(x):
    return (None,) + (0,) * (len(x) - 1)


# Name -> the transform of a function f at the tensors x; b is a batch of three of each of x.
TRANSFORMS = {
    "grad": lambda f, x, b: grad(loss(f), everything(x))(*x),
    "vjp": lambda f, x, b: vjp(f, *x)[1](torch.ones_like(f(*x))),
    "jvp": lambda f, x, b: jvp(f, tuple(x), tuple(torch.ones_like(t) for t in x)),
    "vmap": lambda f, x, b: vmap(f)(*b),
    "vmap over one": lambda f, x, b: vmap(f, in_dims=one_batched(x))(b[0], *x[1:]),
    "vmap over the last": lambda f, x, b: vmap(f, in_dims=(*(None,) * (len(x) - 1), 1))(
        *x[:-1], b[-1].movedim(0, 1)
    ),
    "vmap of vmap": lambda f, x, b: vmap(vmap(f, in_dims=one_batched(x)), in_dims=others_batched(x))(*b),
    "vmap of grad": lambda f, x, b: vmap(grad(loss(f), everything(x)))(*b),
    "grad of vmap": lambda f, x, b: grad(lambda *b: vmap(f)(*b).pow(2).sum(), everything(x))(*b),
    "jacrev": lambda f, x, b: jacrev(f, everything(x))(*x),
    "jacfwd": lambda f, x, b: jacfwd(f, everything(x))(*x),
    "hessian": lambda f, x, b: hessian(loss(f))(*x),
    "jacrev of jacrev": lambda f, x, b: jacrev(jacrev(loss(f)))(*x),
    "grad of grad": lambda f, x, b: grad(
        lambda *x: sum(g.pow(2).sum() for g in grad(loss(f), (0, 1))(*x)), (0, 1)
    )(*x),
    "modified in place": lambda f, x, b: grad(lambda *x: f(*x).tanh_().sum(), everything(x))(*x),
}


PIECES = "softmax", "sddmm", "spmm"
NAMES = (
    "gat",
    "gat edges",
    "gatv2",
    "gatv2 vectors",
    "dot",
    "dot edges",
    "agnn",
    "blocks",
    "blocks of pairs",
    *PIECES,
)
OF_SEVERAL = "vmap of vmap", "grad of grad"  # a softmax has one tensor


@pytest.mark.parametrize(
    "name, how, dropout",
    [
        (name, how, dropout)
        for name, how, dropout in itertools.product(NAMES, TRANSFORMS, (False, True))
        if not (dropout and name in PIECES or name == "softmax" and how in OF_SEVERAL)
    ],
)
def test_functions(device, name, how, dropout):
    """Transforms of the first result; with dropout, of the last one, which is the attention if it is
    returned."""
    case, graph, transform = CASES[name], tiny_graph(device), TRANSFORMS[how]
    inputs = case.tensors(graph, batch=False)
    batch = [torch.randn(3, *x.shape, dtype=x.dtype, device=device) for x in inputs.values()]
    more = {"dropout_p": 0.5, "generator": torch.tensor([5], device=device)} if dropout else {}

    def bound(module):
        return lambda *x: case(graph, dict(zip(inputs, x)), module, **more)[-dropout]

    found, expected = (transform(bound(m), list(inputs.values()), batch) for m in (functional, reference))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_forward_mode(device, score, dtype):
    graph = make_graph("random", device)
    inputs = make_inputs(score, graph, 2, 5, dtype)
    tangents = [torch.randn_like(x) for x in inputs.values()]

    def derivative(attention, dtype):
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(x.to(dtype), t.to(dtype)) for x, t in zip(inputs.values(), tangents)
            ]
            return forward_ad.unpack_dual(attention(graph, **dict(zip(inputs, duals)))).tangent

    found, expected = (
        derivative(function(score), dtype),
        derivative(function(score, reference), torch.float64),
    )
    assert found.dtype == dtype
    assert (found.double() - expected).norm() / expected.norm() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("score", SCORES)
def test_forward_over_reverse(device, score):
    """Forward mode over torch.autograd.grad: the tangent of a gradient."""
    graph = make_graph("random", device)
    inputs = make_inputs(score, graph, 2, 4, torch.float64)
    tangents = [torch.randn_like(x) for x in inputs.values()]

    def derivative(attention):
        with forward_ad.dual_level():
            leaves = [x.clone().requires_grad_() for x in inputs.values()]
            duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, tangents)]
            out = attention(graph, **dict(zip(inputs, duals))).pow(2).sum()
            grads = torch.autograd.grad(out, leaves, create_graph=True)
            return [forward_ad.unpack_dual(g).tangent for g in grads]

    torch.testing.assert_close(derivative(function(score)), derivative(function(score, reference)))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_under_vmap(device, randomness):
    """The masks follow vmap's own rule."""
    graph = make_graph("complete", device)
    inputs = make_inputs("gat", graph, 2, 4, torch.float64)
    batch = inputs["value"].expand(4, -1, -1, -1)

    def call(feat):
        return functional.gat_attention(graph, **{**inputs, "value": feat}, dropout_p=0.5)

    out = vmap(call, randomness=randomness)(batch)
    assert all(torch.equal(out[0], x) == (randomness == "same") for x in out[1:])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(call)(batch)


def test_folded_batches_take_one_call(device):
    from test_functional_contract import Recorder

    graph = make_graph("random", device)
    inputs = make_inputs("dot", graph, 2, 4)
    batch = {n: torch.randn(5, *x.shape, device=device) for n, x in inputs.items()}
    with Recorder() as recorder:
        vmap(lambda x: functional.dot_attention(graph, **x))(batch)
    assert len(recorder.calls) == 1
