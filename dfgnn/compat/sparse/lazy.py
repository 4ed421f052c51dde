"""Lazy values of sparse matrices: they are computed when they are read.

``bsddmm(A, q, k).softmax()`` followed by ``bspmm`` with ``v`` is one attention call, which needs no values in
between. So the first two return matrices that hold their operands; reading ``.val`` computes the values.

A lazy value must equal the one that would have been computed immediately. So it is computed in the grad mode
of the call that made it, and if an operand was modified in between, it raises an error, as autograd does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import functional
from ...graph import Graph
from ...runtime.tracing import has_numbers


class _Seen(NamedTuple):
    """A tensor with its version at some time, by which modifications are noticed."""

    name: str
    tensor: Tensor
    version: int


class Lazy:
    """The operands of lazy values; ``values()`` computes them."""

    def __init__(self, graph: Graph, tensors: dict[str, Tensor | None]):
        self.graph, self.grad = graph, torch.is_grad_enabled()
        given = [(name, x) for name, x in tensors.items() if x is not None]
        self._seen = [_Seen(name, x, x._version) for name, x in given if can_wait(x)]

    def check(self) -> None:
        for name, x, version in self._seen:
            if x._version != version:
                raise RuntimeError(
                    f"dgl.sparse: {name} was modified in place before the matrix made of it was used. dfgnn "
                    "computes its values at their first use: ask for .val before, or modify a copy"
                )

    def values(self) -> Tensor:
        self.check()
        with torch.set_grad_enabled(self.grad):
            return self.compute()

    def compute(self) -> Tensor:
        raise NotImplementedError


class Scores(Lazy):
    """scale * gate * q_i . k_j for each entry (i, j), by head: ``[nnz, H]``, or ``[nnz]`` if single.

    query: [rows, H, D].  key: [columns, H, D].  gate: [nnz] or [nnz, H], the matrix's values; None for ones.
    """

    def __init__(self, graph: Graph, query: Tensor, key: Tensor, gate: Tensor | None, single: bool):
        super().__init__(graph, {"the first dense matrix": query, "the second": key, "val": gate})
        self.query, self.key, self.gate, self.single = query, key, gate, single
        self.scale = 1.0

    def times(self, factor: float) -> Scores:
        other = Scores(self.graph, self.query, self.key, self.gate, self.single)
        other.scale, other.grad, other._seen = self.scale * factor, self.grad, self._seen
        return other

    def compute(self) -> Tensor:
        out = functional.sddmm(self.graph, self.query, self.key)
        out = out if self.scale == 1 else out * self.scale
        if self.gate is not None:
            out = out * (self.gate if self.gate.dim() == 2 else self.gate.unsqueeze(1))
        return out.squeeze(1) if self.single else out


class Weights(Lazy):
    """Softmax over each row of scores, which are a `Scores`, or values ``[nnz]`` or ``[nnz, H]``."""

    def __init__(self, graph: Graph, scores: Scores | Tensor):
        super().__init__(graph, {"val": scores} if isinstance(scores, Tensor) else {})
        self.scores = scores

    @property
    def single(self) -> bool:
        return self.scores.dim() == 1 if isinstance(self.scores, Tensor) else self.scores.single

    def compute(self) -> Tensor:
        scores = self.scores if isinstance(self.scores, Tensor) else self.scores.values()
        return functional.edge_softmax(self.graph, scores)

    def times(self, value: Tensor) -> Tensor | None:
        """The product with ``value [M, H, D]`` as one attention call; None if that is not possible: the calls
        were made in different grad modes, or numbers of heads or dtypes differ."""
        scores = self.scores
        modes = {self.grad, torch.is_grad_enabled()}
        if isinstance(scores, Tensor):
            heads, dtype = (1 if scores.dim() == 1 else scores.shape[1]), scores.dtype
        else:
            modes.add(scores.grad)
            heads, dtype = scores.query.shape[1], scores.query.dtype
        if len(modes) > 1 or heads != value.shape[1] or dtype != value.dtype:
            return None
        self.check()
        if isinstance(scores, Tensor):
            return functional.score_attention(self.graph, scores, value)
        scores.check()
        scale: float | Tensor = scores.scale if scores.gate is None else scores.gate * scores.scale
        return functional.dot_attention(self.graph, scores.query, scores.key, value, scale=scale)


def can_wait(*tensors: Tensor | None) -> bool:
    """Whether values may be lazy, which needs modifications to be noticed: inference tensors do not count
    them. Not under a compiler or a transform of torch.func, either."""
    if torch.compiler.is_compiling():
        return False
    return all(x is None or has_numbers(x) and not x.is_inference() for x in tensors)
