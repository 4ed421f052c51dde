"""GPSConv with torch_geometric's contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor, nn

from ... import functional
from ...graph import cache as graph_cache
from ...runtime import torch_internals as internals
from ...runtime.tracing import without_gradient
from ...sparse.csr import INDEX_DTYPES
from .._errors import check_constructor
from .._fused_or_upstream import foreign_mode, foreign_tensor, warn
from .._linear import is_untouched
from ._base import LIBRARY

# The functions that torch_geometric's own forward calls: if one was replaced, that forward has to run.
_FUNCTIONS = F.multi_head_attention_forward, F.scaled_dot_product_attention, F.linear, F.dropout


class GPSConv(torch_geometric.nn.GPSConv):
    r"""Local message passing and global attention (Rampášek et al., "Recipe for a General, Powerful, Scalable
    Graph Transformer", NeurIPS 2022).

    .. math::
        x' = \mathrm{MLP}(\mathrm{conv}(x, \mathrm{edges}) + \mathrm{attention}(x))

    with residuals and normalisations. A drop-in for ``torch_geometric.nn.GPSConv``: its subclass, with the
    same arguments, parameters, state_dict and results. The attention among all nodes of each graph of a batch
    is :func:`dfgnn.functional.block_attention`: nothing is padded to the largest graph, and nothing is stored
    of pairs of nodes, unless the attention has dropout. A single graph (``batch=None``), Performer attention,
    and under compilers dropout of the attention, take torch_geometric's own forward. Otherwise compilers and
    export record the attention as one operator, for any numbers of nodes and graphs.

    Differentiable twice, with respect to features and parameters.

    Example::

        import torch
        from dfgnn.nn.pyg import GPSConv
        from torch_geometric.nn import GCNConv

        edge_index = torch.randint(100, (2, 600))
        batch = torch.arange(100) // 25  # four graphs
        conv = GPSConv(16, GCNConv(16, 16), heads=4)
        out = conv(torch.randn(100, 16), edge_index, batch)  # [100, 16]
    """

    #: What computes the attention; ``reference.block_attention`` makes it the same layer on plain PyTorch.
    attention: Callable[..., Any] = staticmethod(functional.block_attention)

    __init__ = check_constructor(torch_geometric.nn.GPSConv.__init__)

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
        now = F.multi_head_attention_forward, F.scaled_dot_product_attention, F.linear, F.dropout
        if now != _FUNCTIONS:
            return "a function of attention was replaced in torch.nn.functional"
        if torch.jit.is_tracing():
            return "TorchScript"
        recording, weight = torch.compiler.is_compiling(), attn._parameters.get("in_proj_weight")
        if not recording and foreign_mode() is not None:
            return f"a mode is active, {foreign_mode()}"
        own = weight is None or not (recording or type(weight) is nn.Parameter)
        if attn.bias_k is not None or attn.add_zero_attn or own:
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
        if self._falls_back(x, batch) or batch is None:
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
        if torch.compiler.is_compiling():
            return reason is not None or self._dropout() > 0  # of pairs, whose number is not known
        if reason is None:
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
        query, key, value = rows.unflatten(1, (3, attn.num_heads, attn.head_dim)).unbind(1)
        offsets = blocks_of(x, batch)
        out = self.attention(query, key, value, offsets, dropout_p=self._dropout())
        return F.linear(out.flatten(1), attn.out_proj.weight, attn.out_proj.bias)

    def _dropout(self) -> float:
        return self.attn.dropout if self.attn.training else 0.0

    def _with_residual(self, norm: Any, h: Tensor, x: Tensor, batch: Tensor) -> Tensor:
        return self._normalized(norm, F.dropout(h, p=self.dropout, training=self.training) + x, batch)

    def _normalized(self, norm: Any, h: Tensor, batch: Tensor) -> Tensor:
        if norm is None:
            return h
        return norm(h, batch=batch) if self.norm_with_batch else norm(h)


def blocks_of(x: Tensor, batch: Tensor) -> Tensor:
    """Where the graphs of a batch begin, and the number of nodes: int64 ``[graphs + 1]``, cached as long as
    the tensor ``batch``, which has to be sorted. Under a compiler, which does not know how many graphs there
    are, ``[N + 1]``: empty blocks follow."""
    rows = x.shape[0]  # len() would be a constant of an exported program
    if not isinstance(batch, Tensor) or batch.dtype not in INDEX_DTYPES:
        got = batch.dtype if isinstance(batch, Tensor) else type(batch).__name__
        raise TypeError(f"GPSConv: batch: expected a tensor of int64, the graph of each node, got {got}")
    if batch.dim() != 1 or batch.shape[0] != rows or batch.device != x.device:
        raise ValueError(
            f"GPSConv: batch: expected shape [{rows}] on {x.device}, got {list(batch.shape)} on "
            f"{batch.device}"
        )
    if torch.compiler.is_compiling():
        rises = batch[1:] - batch[:-1]
        internals.assert_async((rises >= 0).all(), "GPSConv: batch: expected sorted values, got others")
        node = torch.arange(rows + 1, device=batch.device)
        begins = torch.where(F.pad(rises != 0, (1, 1), value=True), node, node[-1])
        return begins.sort().values
    if batch.is_meta:  # how many graphs there are depends on values; results, with a row per node, do not
        return batch.new_empty(1, dtype=torch.int64)
    batch = without_gradient(batch)

    def build() -> Tensor:
        if bool((batch[1:] < batch[:-1]).any()):
            at = int((batch[1:] < batch[:-1]).int().argmax())
            got = f"{int(batch[at])} before {int(batch[at + 1])} at position {at}"
            raise ValueError(f"GPSConv: batch: expected sorted values, got {got}; sort nodes by graph")
        _, sizes = torch.unique_consecutive(batch, return_counts=True)
        return F.pad(sizes.cumsum(0), (1, 0))

    found: Tensor = graph_cache.once((batch,), ("blocks",), build)
    return found
