"""Running an attention function with its gradients, and the error criterion that compares two runs."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dfgnn import functional, reference
from dfgnn.functional import EdgeTerm, Projected, dot, gat

SCORES = ("gat", "gatv2", "dot")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Inputs whose gradients pass through the softmax: their terms may cancel, so that the result is near 0.
SCORE_INPUTS = (
    *("score_src", "score_dst", "bias", "gate", "edge_score", "edge_key", "edge_both", "edge_attr"),
    *("edge_key_weight", "edge_key_bias", "edge_both_weight", "edge_both_bias"),
    *("query", "key", "att", "sink"),
)
VALUES = {"gat": "value", "gatv2": "key", "dot": "value"}
#: The name of the term of edges that `make_inputs` adds to the score.
TERMS = {"gat": "edge_score", "gatv2": "bias", "dot": "bias"}
#: The name of the features of edges that it adds.
EDGES = {"gat": "edge_value", "gatv2": "edge_key", "dot": "edge_both"}

# Ways to modify a result in place.
MODIFY = {
    "relu_": lambda x: x.relu_(),
    "elu_": F.elu_,
    "add_": lambda x: x.add_(1),
    "iadd": lambda x: x.__iadd__(torch.ones_like(x)),
    "mul_": lambda x: x.mul_(2),
    "ReLU": nn.ReLU(inplace=True),
    "dropout_": lambda x: F.dropout(x, 0.5, training=True, inplace=True),
    "setitem": lambda x: x.__setitem__((slice(None, 3),), 0.5) or x,
    "view": lambda x: x.flatten().sigmoid_().view_as(x),
}

HEADS = (1, 3, 8)
DIMS = (1, 7, 33, 300, 4, 8, 32, 64, 128, 256)


def shapes(device, turn, num_edges):
    """(H, D) pairs: all on a GPU; on the CPU one, which depends on ``turn``, the number of the case."""
    pairs = [(h, d) for h, d in itertools.product(HEADS, DIMS) if num_edges * h * d < 5_000_000]
    if device != "cpu":
        return pairs
    return [pairs[7 * turn % len(pairs)]]


def packed(given):
    """A call's arguments from tensors by flat names: ``edge_key``, ``edge_value``, ``edge_score`` and
    ``edge_both`` (key and value) are terms of an EdgeTerm, with ``_weight`` and ``_bias`` behind that of a
    Projected, of ``edge_attr``; ``schedule`` is one of the kernel_options."""
    terms, attr = {}, given.get("edge_attr")
    for place in ("key", "value", "score", "both"):
        term, weight = given.get(f"edge_{place}"), given.get(f"edge_{place}_weight")
        if weight is not None:
            term, attr = Projected(given["edge_attr"], weight, given.get(f"edge_{place}_bias")), None
        if term is not None:
            terms |= {"key": term, "value": term} if place == "both" else {place: term}
    found = {name: x for name, x in given.items() if not name.startswith("edge_")}
    if attr is not None:
        found["edge_attr"] = attr
    if terms:
        found["edge"] = EdgeTerm(**terms)
    if "schedule" in found:
        found["kernel_options"] = {"schedule": found.pop("schedule")}
    return found


def function(score, module=functional):
    """The attention, whose tensors have flat names (`packed`), with the options that only layers have."""
    if module is functional:
        call = {"gat": gat.gat, "gatv2": gat.gatv2, "dot": dot.dot}[score]
    else:
        call = getattr(module, f"{score}_attention")
    return lambda graph, *inputs, **given: call(graph, *inputs, **packed(given))


def make_inputs(
    score,
    graph,
    heads,
    dim,
    dtype=torch.float32,
    *,
    value_dim=None,
    term=False,
    weight=None,
    gate=None,
    edge=False,
):
    """Random arguments by name. term: a term of edges in the score, of GAT's before the LeakyReLU, or with
    "bias" behind it. weight and gate are None, 1 or "H": their heads. edge: features of edges, as the name in
    `EDGES` or another."""
    value_dim = value_dim or dim
    sizes = {
        "gat": {
            "value": (graph.num_src, heads, dim),
            "score_src": (graph.num_src, heads),
            "score_dst": (graph.num_dst, heads),
        },
        "gatv2": {
            "query": (graph.num_dst, heads, dim),
            "key": (graph.num_src, heads, dim),
            "att": (heads, dim),
        },
        "dot": {
            "query": (graph.num_dst, heads, dim),
            "key": (graph.num_src, heads, dim),
            "value": (graph.num_src, heads, value_dim),
        },
    }[score]
    if term:
        sizes["bias" if term == "bias" else TERMS[score]] = (graph.num_edges, heads)
    for name, wanted in (("weight", weight), ("gate", gate)):
        if wanted:
            sizes[name] = (graph.num_edges,) if wanted == 1 else (graph.num_edges, heads)
    if edge:
        sizes[edge if isinstance(edge, str) else EDGES[score]] = (graph.num_edges, heads, dim)
    inputs = {name: torch.randn(size).to(graph.device, dtype) for name, size in sizes.items()}
    if score == "gatv2":  # scores of the size of 1, as the other families have
        inputs["att"] /= dim**0.5
    return inputs


def run(attention, graph, inputs, dtype=None, **options):
    """Outputs and the gradient of every input, by name, for fixed random weights of the loss."""
    leaves = {
        name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_() if x is not None else None
        for name, x in inputs.items()
    }
    result = attention(graph, **packed({**leaves, **options}))
    results = {"out": result}
    if options.get("return_attention"):
        results = {"out": result[0], "attention": result[1]}
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator).to(x) for x in results.values()]
    torch.autograd.backward(list(results.values()), grads)
    results = {name: x.detach() for name, x in results.items()}
    for name, leaf in leaves.items():
        if leaf is not None:
            assert leaf.grad is not None, f"no gradient of {name}"
            results["grad_" + name] = leaf.grad
    return results


def loss_of(results):
    """A sum of the results with fixed weights that differ between elements."""
    return sum((x * torch.linspace(-1, 1, x.numel()).to(x).view_as(x)).sum() for x in results)


def derivatives(results, leaves, orders=1):
    """The results, and for each order the gradients of the leaves, 0 for None, of a `loss_of` of the tensors
    of the order before."""
    found, last = [*results], results
    for order in range(orders):
        last = [x for x in last if x is not None and x.requires_grad]
        if last:
            more = order + 1 < orders
            last = torch.autograd.grad(loss_of(last), leaves, create_graph=more, allow_unused=True)
        given = last or [None] * len(leaves)
        found += [torch.zeros_like(leaf) if x is None else x for x, leaf in zip(given, leaves)]
    return [x.detach() for x in found]


def relative_error(actual, oracle, floor=0.0):
    """||actual - oracle|| / ||oracle||, the denominator being at least ``floor``."""
    difference = (actual.double() - oracle).norm().item()
    return 0.0 if difference == 0 else difference / max(oracle.norm().item(), floor, 1e-300)


def rounding_band(dtype):
    """The relative difference that right results may have. In float64, the oracle's own dtype, only the order
    of sums differs."""
    return 1e-12 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps


def check(score, graph, inputs, note="", extra=0.0, attention=None, **options):
    """Error against the float64 oracle <= 2 x that of plain PyTorch in the same dtype + rounding + extra.
    attention: the function, by default that of the score."""
    attention = attention or function(score)
    value = inputs[VALUES[score]]
    plain = function(score, reference)
    actual = run(attention, graph, inputs, **options)
    low = run(plain, graph, inputs, **options)
    oracle = run(plain, graph, inputs, dtype=torch.float64, **options)
    # In a gradient through the softmax terms of the size alpha_ij |g_i . v_j| cancel (g: the gradient of the
    # output, v: the value): errors are relative to them. |g . v| is taken as three standard deviations.
    exact = {n: None if x is None else x.double() for n, x in inputs.items()}
    _, weights = plain(graph, **exact, **{**options, "return_attention": True})
    floor = weights.norm().item() * 3 * math.sqrt(value.shape[-1])
    for name, expected in oracle.items():
        x = actual[name]
        assert x.shape == expected.shape, f"{note}{name}: shape {tuple(x.shape)}, not {tuple(expected.shape)}"
        assert x.dtype == low[name].dtype, f"{note}{name}: {x.dtype}, not {low[name].dtype}"
        assert x.isfinite().all(), f"{note}{name} is not finite"
        through_softmax = name.removeprefix("grad_") in SCORE_INPUTS
        error, allowed = (relative_error(y, expected, floor * through_softmax) for y in (x, low[name]))
        # Four times the band: sums that cancel are rounded at the size of their terms, and attention is an
        # exponential, whose relative error is the rounding of the exponent.
        wide = through_softmax or name == "attention"
        limit = 2 * allowed + rounding_band(value.dtype) * (4 if wide else 1) + extra
        assert error <= limit, f"{note}{name}: error {error:.3g} > {limit:.3g} (plain PyTorch: {allowed:.3g})"
    return actual


class Made(TorchDispatchMode):
    """The sizes, in elements, of the tensors that operations make; views of their arguments do not count."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.sizes += [x.numel() for x in made if x.untyped_storage().data_ptr() not in given]
        return result
