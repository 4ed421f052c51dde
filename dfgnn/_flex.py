"""Scores written in Python, a chunk of edges at a time: no E x H x D tensor, forward or backward."""

from collections.abc import Callable

import torch
from torch import Tensor

# Bytes of what is gathered for one chunk of edges, by default.
_CHUNK_BYTES = 2**27


def chunk_size(query: Tensor, key: Tensor) -> int:
    """Edges whose query and key rows fill a chunk."""
    row = sum(x[:1].numel() * x.element_size() for x in (query, key))
    return max(_CHUNK_BYTES // max(row, 1), 1)


def edge_scores(graph, score_fn: Callable, chunk: int, query, key, edge_feat, params) -> Tensor:
    """score_fn of all edges [E, H], differentiable in query, key, edge_feat and params."""
    return _EdgeScores.apply(graph, score_fn, chunk, query, key, edge_feat, *params)


def _chunks(graph, chunk: int):
    src, dst = graph.edge_index
    for begin in range(0, graph.num_edges, chunk):
        part = slice(begin, begin + chunk)
        yield part, src[part], dst[part]


class _EdgeScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, score_fn, chunk, query, key, edge_feat, *params):
        ctx.save_for_backward(query, key, edge_feat, *params)
        ctx.graph, ctx.score_fn, ctx.chunk = graph, score_fn, chunk
        scores = query.new_empty(graph.num_edges, query.shape[1])
        for part, src, dst in _chunks(graph, chunk):
            e = None if edge_feat is None else edge_feat[part]
            scores[part] = score_fn(query[dst], key[src], e, *params)
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        query, key, edge_feat, *params = ctx.saved_tensors
        need = ctx.needs_input_grad[3:]
        inputs = [query, key, edge_feat, *params]
        # Added up in float32 at least: a parameter collects from every chunk.
        acc = torch.promote_types(query.dtype, torch.float32)
        grads = [torch.zeros_like(x, dtype=acc) if n else None for x, n in zip(inputs, need)]
        for part, src, dst in _chunks(ctx.graph, ctx.chunk):
            rows = [query[dst], key[src], None if edge_feat is None else edge_feat[part], *params]
            rows = [x if x is None else x.detach().requires_grad_(n) for x, n in zip(rows, need)]
            with torch.enable_grad():
                scores = ctx.score_fn(*rows)
            wanted = [x for x, n in zip(rows, need) if n]
            found = iter(torch.autograd.grad(scores, wanted, grad[part], allow_unused=True))
            for k, n in enumerate(need):
                g = next(found) if n else None
                if g is None:
                    continue
                if k < 2:
                    grads[k].index_add_(0, dst if k == 0 else src, g.to(acc))
                elif k == 2:
                    grads[k][part] = g
                else:
                    grads[k] += g
        return None, None, None, *(g if g is None else g.to(x.dtype) for g, x in zip(grads, inputs))


def try_out(error: Callable, score_fn: Callable, query, key, edge_feat, params) -> None:
    """Calls score_fn on no edges; raises error(kind, argument, expected, got) if the result is not right."""
    with torch.enable_grad():
        rows = [None if x is None else x.detach()[:0] for x in (query, key, edge_feat)]
        scores = score_fn(*rows, *(p.detach() for p in params))
    if not isinstance(scores, Tensor):
        raise error(TypeError, "score_fn", "a function that returns a tensor", type(scores).__name__)
    if scores.shape != (0, query.shape[1]):
        got = "[edges, " + ", ".join(str(n) for n in scores.shape[1:]) + "]"
        raise error(ValueError, "score_fn", f"a result of shape [edges, {query.shape[1]}]", got)
    if scores.requires_grad:
        raise error(
            ValueError,
            "score_fn",
            "every tensor that requires a gradient among its arguments (`params`)",
            "one that it captures, of which the gradient would be lost",
        )
