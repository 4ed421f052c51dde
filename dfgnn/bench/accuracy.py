"""Attention in float64: `dfgnn.reference` and its gradients, in ranges of destinations to limit memory."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from .. import reference
from ..graph import Graph

# The features of a range's edges take at most this number of bytes, except for a single destination.
_CHUNK_BYTES = 2**28


def error(x: Tensor, reference: Tensor) -> float:
    """||x - reference|| / ||reference||, or ||x|| where the reference is zero."""
    norm = float(reference.norm())
    return float((x.double() - reference).norm()) / (norm or 1.0)


def _exact(
    name: str, by_dst: str, graph, *, grad_out: Tensor | None = None, **inputs: Tensor
) -> dict[str, Tensor]:
    """``out`` of the function of this name and, with ``grad_out``, the gradient of every input, by name.

    by_dst: the input that has a row per destination. inputs: of any floating dtype; the results are float64.
    """
    exact = {k: x.detach().double() for k, x in inputs.items()}
    grads = {} if grad_out is None else {k: torch.zeros_like(x) for k, x in exact.items()}
    outs, csr = [], graph.csr()
    for begin, end in _ranges(csr.indptr.cpu(), max(x.shape[1:].numel() for x in exact.values())):
        indptr = csr.indptr[begin : end + 1]
        indices = csr.indices[int(indptr[0]) : int(indptr[-1])]
        part = Graph.from_csr(indptr - indptr[0], indices, num_src=graph.num_src, validate=False)
        leaves = {k: (x[begin:end] if k == by_dst else x).detach() for k, x in exact.items()}
        for x in leaves.values():
            x.requires_grad_(grad_out is not None)
        out = getattr(reference, name)(part, **leaves)
        outs.append(out.detach())
        if grad_out is not None:
            given = grad_out[begin:end].double()
            found = torch.autograd.grad(out, tuple(leaves.values()), given, materialize_grads=True)
            for k, grad in zip(leaves, found):
                (grads[k][begin:end] if k == by_dst else grads[k]).add_(grad)
    return {"out": torch.cat(outs), **grads}


def _ranges(indptr: Tensor, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of destinations whose edges have at most ``_CHUNK_BYTES`` of float64 rows of this width."""
    step, begin, rows = max(_CHUNK_BYTES // (8 * width), 1), 0, len(indptr) - 1
    while True:
        end = int(torch.searchsorted(indptr, indptr[begin] + step, right=True)) - 1
        end = min(max(end, begin + 1), rows)
        yield begin, end
        if end == rows:
            return
        begin = end


gat = partial(_exact, "gat_attention", "score_dst")
gatv2 = partial(_exact, "gatv2_attention", "query")
dot = partial(_exact, "dot_attention", "query")
