"""FusedGATConv and CuGraphGATConv with torch_geometric's contracts, without the libraries that these need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor, nn

from ... import functional
from ...graph import Graph
from ...graph import cache as _kept
from .._errors import projected
from ._base import FusedConv, check_rows
from ._graph import graph_of


class FusedGATConv(FusedConv, torch_geometric.nn.FusedGATConv):
    r"""GATConv on edges in three formats, as dgNN's kernels take them (Zhang et al., "Understanding GNN
    Computational Graph", MLSys 2022).

    A drop-in for ``torch_geometric.nn.FusedGATConv``: its subclass, with the same arguments, parameters,
    state_dict and results, on any device and without dgNN. It has neither self loops nor edge features.
    Rows of ``csr`` are destinations.

    Differentiable any number of times, with respect to features and parameters.

    Raises:
        ValueError: ``add_self_loops`` or ``edge_dim`` is given.

    Example::

        import torch
        from dfgnn.nn.pyg import FusedGATConv

        edge_index = torch.randint(100, (2, 600))
        conv = FusedGATConv(16, 8, heads=4, add_self_loops=False)
        csr, csc, perm = conv.to_graph_format(edge_index, size=(100, 100))
        out = conv(torch.randn(100, 16), csr, csc, perm)  # [100, 32]
    """

    #: What computes the attention; ``reference.gat_attention`` makes it the same layer on plain PyTorch.
    attention: Callable[..., Any] = staticmethod(functional.gat_attention)

    def __init__(self, *args: Any, **kwargs: Any):
        torch_geometric.nn.GATConv.__init__(self, *args, **kwargs)  # upstream's own imports dgNN
        for name, wanted in (("add_self_loops", False), ("edge_dim", None)):
            if getattr(self, name) != wanted:
                raise ValueError(f"FusedGATConv: {name}: expected {wanted}, got {getattr(self, name)}")

    def forward(
        self, x: Tensor, csr: tuple[Tensor, Tensor], csc: tuple[Tensor, Tensor], perm: Tensor
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: ``[N, F]``.
            csr: (rowptr ``[N + 1]``, col ``[E]``), as ``to_graph_format`` gives them.
            csc, perm: have no meaning here.

        Returns:
            ``[N, H * C]``, or ``[N, C]`` with ``concat=False``.

        Raises:
            TypeError, ValueError: an argument is not as described, or sizes differ.
        """
        reason = self.why_not(self)
        if reason is not None:  # theirs has a fused forward only, too
            raise NotImplementedError(f"FusedGATConv: {reason}: use GATConv")
        check_rows(self, "x", x)
        rowptr, col = csr
        graph = _kept.once((rowptr, col), ("csr", x.shape[-2]), lambda: _graph(x, rowptr, col))
        feat = self._heads((self.lin_src if self.lin is None else self.lin)(x))
        terms = ((feat * vector).sum(-1) for vector in (self.att_src, self.att_dst))
        options = self._options(negative_slope=self.negative_slope)
        return self._attend(graph, (feat, *terms), options, feat.dtype, None, False)[0]


def _graph(x: Tensor, rowptr: Tensor, col: Tensor) -> Graph:
    if len(rowptr) != x.shape[-2] + 1:
        raise ValueError(
            f"csr: expected {x.shape[-2] + 1} pointers for {x.shape[-2]} rows, got {len(rowptr)}"
        )
    return Graph.from_csr(rowptr.clone(), col.clone(), x.shape[-2])


class CuGraphGATConv(torch_geometric.nn.CuGraphGATConv):
    r"""GATConv with the parameters of cugraph-ops.

    A drop-in for ``torch_geometric.nn.CuGraphGATConv``: its subclass, with the same arguments, parameters
    and state_dict, on any device and without cugraph-ops, for all kinds of edges that GATConv takes. ``att``
    has the sources' vectors and behind them the destinations'.

    Differentiable any number of times, with respect to features and parameters.

    Example::

        import torch
        from dfgnn.nn.pyg import CuGraphGATConv

        edge_index = torch.randint(100, (2, 600))
        conv = CuGraphGATConv(16, 8, heads=4)
        out = conv(torch.randn(100, 16), edge_index)  # [100, 32]
    """

    #: What computes the attention; ``reference.gat_attention`` makes it the same layer on plain PyTorch.
    attention: Callable[..., Any] = staticmethod(functional.gat_attention)

    @classmethod
    def why_not(cls, layer: Any) -> str | None:
        """None: it has no options that the fused forward does not do."""
        return None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        bias: bool = True,
    ):
        nn.Module.__init__(self)  # upstream's own wants cugraph-ops
        self.in_channels, self.out_channels, self.heads = in_channels, out_channels, heads
        self.concat, self.negative_slope = concat, negative_slope
        self.lin = torch_geometric.nn.Linear(in_channels, heads * out_channels, bias=False)
        self.att = nn.Parameter(torch.empty(2 * heads * out_channels))
        if bias:
            self.bias = nn.Parameter(torch.empty(heads * out_channels if concat else out_channels))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        edge_attr: None = None,
        max_num_neighbors: int | None = None,
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: ``[N, F]``.
            edge_index: int32 or int64 ``[2, E]`` tensor or EdgeIndex; or SparseTensor or torch.sparse tensor,
                transposed; or a dfgnn.Graph.
            edge_attr: None; features of edges need GATConv.
            max_num_neighbors: has no meaning here.

        Returns:
            ``[N, H * C]``, or ``[N, C]`` with ``concat=False``.

        Raises:
            TypeError, ValueError: an argument is not as described, or sizes differ.
            NotImplementedError: ``edge_attr`` is given.
        """
        if edge_attr is not None:
            raise NotImplementedError("CuGraphGATConv: edge_attr: expected None, got features: use GATConv")
        check_rows(self, "x", x)
        graph, _ = graph_of(self, edge_index, x, x)
        feat = projected(self, "x", self.lin, x).unflatten(-1, (self.heads, self.out_channels))
        terms = ((feat * vector).sum(-1) for vector in self.att.view(2, self.heads, -1))
        out = self.attention(graph, feat, *terms, negative_slope=self.negative_slope)
        out = out.flatten(-2) if self.concat else out.mean(-2)
        return out if self.bias is None else out + self.bias
