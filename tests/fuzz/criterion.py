"""Running a drawn call with its gradients, and the error criterion of tests/attention.py for any function."""

import math

import torch
from attention import SCORE_INPUTS, VALUES, relative_error, rounding_band
from torch.utils.checkpoint import checkpoint

from dfgnn import functional, reference

# Ways to call that must not change the results; the first two give no gradients.
TRANSFORMS = (
    *("no_grad", "inference_mode"),
    *("eager", "autocast", "checkpoint", "in place", "reordered", "sum of results", "backward twice"),
)
_NODES = ("value", "score_src", "score_dst", "key", "query")


def _reordered(call, graph, leaves, masks):
    """The same call on the graph with its nodes relabelled, with results in the original order."""
    order = [
        torch.randperm(n, generator=torch.Generator().manual_seed(n)).to(graph.device)
        for n in (graph.num_src, graph.num_dst)
    ]
    other = graph.reorder(order[0] if graph.num_src == graph.num_dst else tuple(order))
    permuted = {n: other.permute(x) if n in _NODES else x for n, x in leaves.items()}
    results = call(functional, other.graph, permuted, masks)
    per_edge = call.function in ("edge_softmax", "sddmm")
    return (results[0] if per_edge else other.restore(results[0]), *results[1:])


def results_of(transform, call, graph, leaves, masks):
    if transform == "reordered":
        return _reordered(call, graph, leaves, masks)

    def run():
        return call(functional, graph, leaves, masks)

    if transform == "checkpoint":
        return checkpoint(run, use_reentrant=False)
    if transform == "autocast":
        with torch.autocast(graph.device.type, dtype=torch.bfloat16):
            return run()
    results = run()
    if transform == "in place":
        results[0].mul_(1)
    return results


def gradients(transform, results, leaves):
    """The gradient of each leaf for a loss that weights the results with fixed random numbers."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in results]
    if transform == "sum of results":  # backward gets a gradient of stride 0
        torch.stack([x.sum() for x in results]).sum().backward()
    elif transform == "backward twice":
        for _ in range(2):
            for leaf in leaves.values():
                leaf.grad = None
            torch.autograd.backward(results, weights, retain_graph=True)
    else:
        torch.autograd.backward(results, weights)
    return {name: leaf.grad for name, leaf in leaves.items()}


def _reference(call, graph, inputs, dtype, transform):
    leaves, masks = inputs
    leaves = {n: x.detach().to(dtype or x.dtype).requires_grad_() for n, x in leaves.items()}
    results = call(reference, graph, leaves, masks)
    return results, gradients("sum of results" if transform == "sum of results" else "", results, leaves)


def _cancelling(call, graph, inputs):
    """Size of the terms of sums that may cancel, to which the error of such a sum is relative.

    They are attention weights times a product with the D values of a row, or for the plain products sums of
    random numbers.
    """
    leaves, masks = inputs
    if call.function in ("sddmm", "spmm"):
        shape = leaves["value" if call.function == "spmm" else "query"].shape
        return math.sqrt(graph.num_edges * shape[1] * shape[2])
    exact = {n: x.detach().double() for n, x in leaves.items()}
    if call.function == "edge_softmax":
        return call(reference, graph, exact, masks)[0].norm().item()
    arguments = call.arguments(exact, masks, graph.device)
    arguments["return_attention"] = True
    if "out_bias" in leaves:
        # On CUDA delta is g . out - g . out_bias. Its rounding, of which each edge gets its share of the
        # softmax, is relative to the bias, however little the weights leave of the rows' sums.
        arguments.pop("weight", None)
    _, weights = call.of(reference)(graph, **arguments)
    value = exact["value" if call.function in ("flex_attention", "agnn_attention") else _value(call)]
    if call.dtype == torch.float64:
        # The oracle adds a row's edges one after the other. Where the edges are equal, so are the rounding
        # errors, which do not average out. In other dtypes plain PyTorch's own error allows for that.
        rows = weights.new_zeros(graph.num_dst, *weights.shape[1:])
        weights = rows.index_add(0, graph.edge_index[1], weights.abs())
    return weights.norm().item() * math.sqrt(value.shape[-1])


def _value(call):
    return VALUES[call.function.removesuffix("_attention")]


def check(spec, call, transform="eager", device="cpu"):
    """Error against the float64 oracle <= 2 x that of plain PyTorch in the same dtype + rounding."""
    graph = spec.build(device)
    inputs = leaves, masks = call.inputs(device)
    oracle_graph = spec.constructed(spec.ends().to(device))
    assert torch.equal(graph.edge_index, oracle_graph.edge_index)

    if transform in ("no_grad", "inference_mode"):
        with torch.no_grad() if transform == "no_grad" else torch.inference_mode():
            results, grads = results_of(transform, call, graph, leaves, masks), {}
        assert not any(x.requires_grad for x in results)
    else:
        results = results_of(transform, call, graph, leaves, masks)
        grads = gradients(transform, results, leaves)

    low, low_grads = _reference(call, oracle_graph, inputs, None, transform)
    oracle, oracle_grads = _reference(call, oracle_graph, inputs, torch.float64, transform)
    floor = _cancelling(call, oracle_graph, inputs)
    assert len(results) == len(oracle)
    names = ("out", "attention")[: len(results)]
    rows = [*zip(names, results, low, oracle)]
    rows += [("grad_" + n, grads[n], low_grads[n], oracle_grads[n]) for n in grads]
    degrees = torch.cat([torch.bincount(ends) for ends in oracle_graph.edge_index])
    longest = int(degrees.max()) if degrees.numel() else 0
    luck = _luck_of_large_scores(call, leaves)
    for name, x, plain, expected in rows:
        _compare(name, x, plain, expected, floor, call, (longest, luck))


def _luck_of_large_scores(call, leaves):
    """The largest relative error of a weight from rounding a score of this size to the softmax's dtype. Plain
    PyTorch's error may by luck be much smaller, and is then no measure of what is allowed."""
    kinds = ("shift up", "shift down", "one value")
    large = [leaves[name].detach().abs() for name, kind in call.special if kind in kinds]
    unit = 2.0**-53 if call.dtype == torch.float64 else 2.0**-24
    if call.dtype == torch.float64:  # plain PyTorch is the oracle there, and has no error
        large += [leaves[name].detach().abs() for name, kind in call.special if kind == "-1e9"]
    return max((unit * x.max().item() for x in large if x.numel()), default=0.0)


def _compare(name, x, plain, expected, floor, call, luck):
    assert x is not None, f"{name}: no gradient"
    assert x.shape == expected.shape, f"{name}: shape {tuple(x.shape)}, not {tuple(expected.shape)}"
    assert x.dtype == plain.dtype, f"{name}: {x.dtype}, not {plain.dtype}"
    assert x.isfinite().all(), f"{name} is not finite"
    x, plain, expected = (t.detach().double() for t in (x, plain, expected))
    argument = name.removeprefix("grad_")
    products = call.function in ("sddmm", "spmm")
    # edge_value, and its gradient, do not pass through the softmax; a floor harms nothing.
    softmax = argument in SCORE_INPUTS or argument in ("score", "beta", "param")
    positive = name == "attention" or (name == "out" and call.function == "edge_softmax")
    if argument == "out_bias":
        floor = math.sqrt(max(x.numel(), 1)) + floor
    floor = 0.0 if positive else floor * (3 if softmax and not products else 1)
    error, allowed = (relative_error(y, expected, floor) for y in (x, plain))
    # A dot product of many columns, added up in another order, may be exact in plain PyTorch by luck; the
    # gradient of weight has the attention for a factor, whose relative error is that of an exponent.
    reordered = products or "edge_attr" in call.tensors
    bands = 4 if softmax or positive or argument == "weight" else 2 if reordered else 1
    # The same holds for a sum over a long row, whose rounding error grows with the root of its length.
    longest, rounded = luck
    bands *= max(1, math.sqrt(longest) / 16)
    limit = 2 * allowed + rounding_band(call.dtype) * bands + rounded
    assert error <= limit, f"{name}: error {error:.3g} > {limit:.3g} (plain PyTorch: {allowed:.3g})"
