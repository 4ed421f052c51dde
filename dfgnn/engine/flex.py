"""Scores written in Python, computed a chunk of edges at a time: without E x H x D tensors, forward or
backward."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from ..graph import GraphPart
from ..runtime import eager as _eager
from ..runtime import rules
from ..runtime.rules import Rule, rows_at
from . import compiler_graph as _edges
from . import plain as _plain
from .edge_maps import rows_of_destinations, rows_of_sources

# Bytes of query and key rows that are gathered for one chunk of edges, unless the user sets its size.
_CHUNK_BYTES = 2**27


def chunk_size(query: Tensor, key: Tensor) -> int:
    """How many edges' query and key rows fill a chunk."""
    row = sum(x[:1].numel() * x.element_size() for x in (query, key))
    return max(_CHUNK_BYTES // max(row, 1), 1)


def edge_scores(graph, score_fn: Callable, chunk: int, query, key, edge_feat, params) -> Tensor:
    """The scores [E, H] by score_fn, differentiable in query, key, edge_feat and params."""
    if isinstance(graph, GraphPart):
        graph, (key,) = graph.gathered(key)
    if isinstance(_edges.for_compiler(graph), _edges.EdgeList):
        # There are no chunks here: the compiler fuses the operations of the score, but the gathered rows of
        # the nodes exist for all edges at a time.
        q = rows_of_destinations(graph, query.flatten(1)).unflatten(1, query.shape[1:])
        k = rows_of_sources(graph, key.flatten(1)).unflatten(1, key.shape[1:])
        return score_fn(q, k, edge_feat, *params).to(query.dtype)
    tensors = query, key, edge_feat, *params
    if _eager.transformed(*tensors):
        return _all_scores(_plain.ends_of(graph, all_in_use=False).edge_index, score_fn, query.dtype, tensors)
    return rules.apply(_EdgeScores(graph, score_fn, chunk, query.device), *tensors)


def _all_scores(edge_index, score_fn, dtype, tensors) -> Tensor:
    """The scores without chunks, in operations that torch differentiates any number of times, in any mode."""
    query, key, edge_feat, *params = tensors
    src, dst = edge_index
    return score_fn(rows_at(query, dst), rows_at(key, src), edge_feat, *params).to(dtype)


def _chunks(graph, chunk: int):
    src, dst = graph.edge_index
    for begin in range(0, graph.num_edges, chunk):
        part = slice(begin, begin + chunk)
        yield part, src[part], dst[part]


class _Surroundings:
    """The states of autocast and of the random number generators, so that backward computes the same score
    again (`again`).

    While a CUDA graph is captured the generators' states cannot be read: backward draws new random numbers.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.generators = None
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self.generators = self._states()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
            if kind != "meta"  # which has no autocast
        ]

    def _states(self):
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return torch.get_rng_state(), cuda

    def drew_nothing(self) -> None:
        """Drops the generators' states if the score drew no random numbers, as most do not."""
        if self.generators is not None:
            pairs = zip(self.generators, self._states())
            if all(then is now or torch.equal(then, now) for then, now in pairs):
                self.generators = None

    @contextlib.contextmanager
    def again(self):
        with contextlib.ExitStack() as stack:
            if self.generators is not None:
                cuda = [self.device] if self.generators[1] is not None else []
                stack.enter_context(torch.random.fork_rng(cuda))
                torch.set_rng_state(self.generators[0])
                if cuda:
                    torch.cuda.set_rng_state(self.generators[1], self.device)
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False))
            yield


class _EdgeScores(Rule):
    """Computes all scores from query, key, edge_feat and params; backward computes them again."""

    def __init__(self, graph, score_fn: Callable, chunk: int, device: torch.device):
        self.graph, self.score_fn, self.chunk = graph, score_fn, chunk
        self.surroundings = _Surroundings(device)

    def forward(self, query, key, edge_feat, *params):
        scores = query.new_empty(self.graph.num_edges, query.shape[1])
        for part, src, dst in _chunks(self.graph, self.chunk):
            e = None if edge_feat is None else edge_feat[part]
            scores[part] = self.score_fn(rows_at(query, dst), rows_at(key, src), e, *params)
        self.surroundings.drew_nothing()
        return scores

    def gradients(self, need, saved, grad):
        with self.surroundings.again():
            gradients = _second_order if torch.is_grad_enabled() else _first_order
            return tuple(gradients(self, saved, need, grad))


def _first_order(call, inputs, need, grad):
    query, key, edge_feat, *params = inputs
    # Gradients are added up in float32 at least, because that of a parameter is a sum over all chunks.
    acc = torch.promote_types(query.dtype, torch.float32)
    grads = [torch.zeros_like(x, dtype=acc) if n else None for x, n in zip(inputs, need)]
    for part, src, dst in _chunks(call.graph, call.chunk):
        rows = [
            rows_at(query, dst),
            rows_at(key, src),
            None if edge_feat is None else edge_feat[part],
            *params,
        ]
        rows = [x if x is None else x.detach().requires_grad_(n) for x, n in zip(rows, need)]
        with torch.enable_grad():
            scores = call.score_fn(*rows)
        wanted = [x for x, n in zip(rows, need) if n]
        found = torch.autograd.grad(scores, wanted, grad[part].to(scores.dtype), allow_unused=True)
        found = iter(found)
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
    return (g if g is None else g.to(x.dtype) for g, x in zip(grads, inputs))


def _second_order(call, inputs, need, grad):
    """The gradients again, but differentiable, and with all edges at a time."""
    edge_index = _plain.ends_of(call.graph, all_in_use=False).edge_index
    if call.surroundings.generators is not None and call.graph.num_edges > call.chunk:
        raise NotImplementedError(
            "flex_attention: second derivatives of a random score_fn need chunk_edges >= the number of edges"
        )

    def scores(wanted):
        merged = [wanted.get(k, x) for k, x in enumerate(inputs)]
        return _all_scores(edge_index, call.score_fn, grad.dtype, merged)

    _, pull = torch.func.vjp(scores, {k: x for k, x in enumerate(inputs) if need[k]})
    (found,) = pull(grad)
    return (found.get(k) for k in range(len(inputs)))


def try_out(error: Callable, score_fn: Callable, query, key, edge_feat, params) -> None:
    """Calls score_fn on no edges; raises error(kind, argument, expected, got) if the result is not right."""
    with torch.enable_grad():
        rows = [None if x is None else x.detach()[:0] for x in (query, key, edge_feat)]
        scores = score_fn(*rows, *(p.detach() for p in params))
    if not isinstance(scores, Tensor):
        raise error(TypeError, "score_fn", "a function that returns a tensor", type(scores).__name__)
    if not scores.is_floating_point():
        raise error(TypeError, "score_fn", "a result of floating-point numbers", scores.dtype)
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
