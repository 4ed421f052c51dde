"""GPSConv with torch_geometric's contract."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor, nn

from ... import functional
from ...graph import Graph
from ...graph import cache as _kept
from ...runtime import eager, rules
from ...runtime import torch_internals as internals
from ...runtime.compiling import without_gradient
from .._fused_or_upstream import foreign_mode, foreign_tensor, warn
from .._terms import is_untouched
from ._base import LIBRARY

# The functions that torch_geometric's own forward calls: if one was replaced, that forward has to run.
_functions = attrgetter("multi_head_attention_forward", "scaled_dot_product_attention", "linear", "dropout")
_FUNCTIONS = _functions(F)


class GPSConv(torch_geometric.nn.GPSConv):
    r"""Local message passing and global attention (Rampášek et al., "Recipe for a General, Powerful, Scalable
    Graph Transformer", NeurIPS 2022).

    .. math::
        x' = \mathrm{MLP}(\mathrm{conv}(x, \mathrm{edges}) + \mathrm{attention}(x))

    with residuals and normalisations. A drop-in for ``torch_geometric.nn.GPSConv``: its subclass, with the
    same arguments, parameters, state_dict and results. The attention among all nodes of each graph of a batch
    is that over a graph with all their pairs, which is cached as long as the tensor ``batch``: nothing is
    padded to the largest graph, and of edge size are the pairs' indices alone. On the CPU without dropout,
    PyTorch's dense attention takes graphs that are alike in size, because it is faster there. A single graph
    (``batch=None``), Performer attention and compilers take torch_geometric's own forward.

    Differentiable any number of times, with respect to features and parameters.

    Example::

        import torch
        from dfgnn.nn.pyg import GPSConv
        from torch_geometric.nn import GCNConv

        edge_index = torch.randint(100, (2, 600))
        batch = torch.arange(100) // 25  # four graphs
        conv = GPSConv(16, GCNConv(16, 16), heads=4)
        out = conv(torch.randn(100, 16), edge_index, batch)  # [100, 16]
    """

    #: What computes the attention; ``reference.dot_attention`` makes it the same layer on plain PyTorch.
    attention: Callable[..., Any] = staticmethod(functional.dot_attention)

    @classmethod
    def why_not(cls, layer: Any) -> str | None:
        """What ``layer`` is set up for that the fused forward does not do."""
        attn = layer.attn
        if type(attn) is not nn.MultiheadAttention:
            return f"attn is {type(attn).__name__}"
        if not (is_untouched(attn) and is_untouched(attn.out_proj)):
            return "attn has hooks or a forward of its own"
        # A parametrization may draw random numbers at each access, and the fused forward accesses
        # out_proj.weight at other times than PyTorch's attention.
        if "parametrizations" in attn.out_proj._modules:
            return "attn.out_proj has parametrizations"
        if _functions(F) != _FUNCTIONS:
            return "a function of attention was replaced in torch.nn.functional"
        if torch.jit.is_tracing():
            return "TorchScript"
        if foreign_mode() is not None:
            return f"a mode is active, {foreign_mode()}"
        if attn.bias_k is not None or attn.add_zero_attn or type(attn.in_proj_weight) is not nn.Parameter:
            return "attn has options of its own"
        return None

    def forward(self, x: Tensor, edge_index: Any, batch: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Apply the layer.

        Args:
            x: ``[N, channels]``.
            edge_index: what ``conv`` takes.
            batch: int64 ``[N]``, sorted: the graph that each node belongs to.
            kwargs: handed to ``conv``.

        Returns:
            ``[N, channels]``.

        Raises:
            ValueError: ``batch`` is not as described.
        """
        if self._falls_back(x, batch) or batch is None or torch.compiler.is_compiling():
            return super().forward(x, edge_index, batch, **kwargs)
        # The order is that of torch_geometric's forward, so that dropout draws the same random numbers.
        local = None
        if self.conv is not None:
            local = self._with_residual(self.norm1, self.conv(x, edge_index, **kwargs), x, batch)
        out = self._with_residual(self.norm2, self._among_all(x, batch), x, batch)
        out = out if local is None else local + out
        return self._normalized(self.norm3, out + self.mlp(out), batch)

    def _falls_back(self, x: Tensor, batch: Tensor | None) -> bool:
        reason = self.why_not(self)
        if reason is None and not torch.compiler.is_compiling():
            foreign = foreign_tensor((x, *self.attn.parameters()))
            if foreign is not None:
                reason = f"there is a {foreign} among features and parameters"
            elif batch is None:
                reason = "batch=None, a single graph, whose attention is dense"
        if reason is not None:
            warn(type(self), LIBRARY, reason)
        return reason is not None

    def _among_all(self, x: Tensor, batch: Tensor) -> Tensor:
        attn = self.attn
        rows = F.linear(x, attn.in_proj_weight, attn.in_proj_bias)
        rows = rows.unflatten(1, (3, attn.num_heads, attn.head_dim))
        scale = 1 / math.sqrt(attn.head_dim)
        dropout = attn.dropout if attn.training else 0.0
        may_be_dense = dropout == 0 and rows.is_cpu and self.attention is functional.dot_attention
        dense = dense_of(x, batch) if may_be_dense and eager.is_eager(rows) else None
        if dense is not None:
            out = dense.attention(rows, scale)
        else:
            graph = all_pairs(x, batch)
            out = self.attention(graph, *rows.unbind(1), scale=scale, dropout_p=dropout)
        return F.linear(out.flatten(1), attn.out_proj.weight, attn.out_proj.bias)

    def _with_residual(self, norm: Any, h: Tensor, x: Tensor, batch: Tensor) -> Tensor:
        return self._normalized(norm, F.dropout(h, p=self.dropout, training=self.training) + x, batch)

    def _normalized(self, norm: Any, h: Tensor, batch: Tensor) -> Tensor:
        if norm is None:
            return h
        return norm(h, batch=batch) if self.norm_with_batch else norm(h)


def _of_batch(x: Tensor, batch: Tensor, what: str, build: Callable[[Tensor], Any]) -> Any:
    """``build(batch)``, cached as long as the tensor ``batch``, which has to be sorted."""
    batch = without_gradient(batch)
    if batch.dim() != 1 or len(batch) != len(x) or batch.device != x.device:
        raise ValueError(
            f"batch: expected shape [{len(x)}] on {x.device}, got {list(batch.shape)} on {batch.device}"
        )

    def of_sorted() -> Any:
        if bool((batch[1:] < batch[:-1]).any()):
            raise ValueError("batch: expected sorted values, got others")
        return build(batch)

    return _kept.once((batch,), (what,), of_sorted)


def all_pairs(x: Tensor, batch: Tensor) -> Graph:
    """The graph in which all nodes of a graph of a batch are neighbours of each, itself among them."""

    def build(batch: Tensor) -> Graph:
        _, inverse, sizes = torch.unique_consecutive(batch, return_inverse=True, return_counts=True)
        degrees = sizes[inverse]
        indptr = F.pad(degrees.cumsum(0), (1, 0))
        node = torch.repeat_interleave(torch.arange(len(batch), device=batch.device), degrees)
        within = torch.arange(len(node), device=batch.device) - indptr[node]
        first = (sizes.cumsum(0) - sizes)[inverse]
        return Graph.from_csr(indptr, first[node] + within, len(batch), validate=False)

    return _of_batch(x, batch, "all_pairs", build)


def dense_of(x: Tensor, batch: Tensor) -> Dense | None:
    """The graphs of a batch as one dense tensor; None if attention over `all_pairs` is faster."""

    def build(batch: Tensor) -> Dense | None:
        _, inverse, sizes = torch.unique_consecutive(batch, return_inverse=True, return_counts=True)
        graphs, size = len(sizes), int(sizes.max()) if len(sizes) else 0
        # The factor in brackets is the time per pair of dense attention, divided by that of attention over
        # `all_pairs`, as measured for graphs of 10 to 1,000 nodes.
        if graphs * size * size * (0.3 + 10 / max(size, 1)) >= int(sizes.square().sum()):
            return None
        if graphs * size == len(batch):
            return Dense(graphs, size, None, None)
        first = sizes.cumsum(0) - sizes
        slot = torch.arange(len(batch)) + (torch.arange(graphs) * size - first)[inverse]
        mask = torch.arange(size) < sizes.unsqueeze(1)
        return Dense(graphs, size, slot, mask.view(graphs, 1, 1, size))

    return _of_batch(x, batch, "dense", build)


class Dense(NamedTuple):
    """Rows of a batch's nodes as a tensor [graphs, size, ...], padded to the size of the largest graph."""

    graphs: int
    size: int
    slot: Tensor | None  # [N]: each node's row in [graphs * size]; None: all graphs have one size
    mask: Tensor | None  # bool [graphs, 1, 1, size]: which rows hold a node; None as for slot

    def attention(self, rows: Tensor, scale: float) -> Tensor:
        """``[N, H, D]``, of the queries, keys and values of all nodes, ``[N, 3, H, D]``."""
        slot, shape, places = self.slot, rows.shape[1:], self.graphs * self.size
        if slot is not None:
            rows = rows.new_zeros(places, *shape).index_copy(0, slot, rows)
        mask = self.mask
        if mask is not None:
            mask = rows.new_zeros(mask.shape).masked_fill(~mask, -math.inf)
        out, _ = rules.apply(_DenseAttention(scale, mask), rows.view(self.graphs, self.size, *shape))
        out = out.reshape(places, *shape[1:])
        return out if slot is None else out.index_select(0, slot)


class _DenseAttention(rules.Rule):
    """Computes, from rows [graphs, size, 3, H, D] of queries, keys and values, the attention's output
    [graphs, size, H, D] and the logsumexp of its scores."""

    __slots__ = "mask", "scale"

    def __init__(self, scale: float, mask: Tensor | None):
        self.scale, self.mask = scale, mask

    def forward(self, rows):
        query, key, value = self._by_head(rows)
        out, logsumexp = internals.flash_attention(
            query, key, value, attn_mask=self.mask, scale=self.scale
        )  # fmt: skip
        return out.transpose(1, 2), logsumexp

    def saved(self, tensors, results):
        return *tensors, *results

    def gradients(self, need, saved, grad, _):
        rows, out, logsumexp = saved
        query, key, value = self._by_head(rows)
        if torch.is_grad_enabled():  # PyTorch's kernel has no second derivatives
            score = query @ key.mT * self.scale
            weight = (score if self.mask is None else score + self.mask).softmax(-1)
            plain = (weight @ value).transpose(1, 2)
            return torch.autograd.grad(plain, rows, grad, create_graph=True)
        found = internals.flash_attention_backward(
            grad.transpose(1, 2), query, key, value, out.transpose(1, 2), logsumexp, 0.0, False,
            attn_mask=self.mask, scale=self.scale,
        )  # fmt: skip
        return (torch.stack([x.transpose(1, 2) for x in found], 2),)

    @staticmethod
    def _by_head(rows: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [graphs, H, size, D]."""
        return rows.permute(2, 0, 3, 1, 4).unbind(0)
