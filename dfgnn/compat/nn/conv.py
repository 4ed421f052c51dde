"""Layers without attention that scripts with attention layers use, too, with DGL's contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...functional.ops import copy_u_sum, u_mul_e_sum
from ...nn._graph import as_graph, check_in_degrees
from ...nn.dgl import DGLError
from ..passing import CROSS
from ..utils import expand_as_pair


class GraphConv(nn.Module):
    r"""The graph convolution of Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional
    Networks" (ICLR 2017).

    .. math::
        h_i = b + \sum_j \frac{w_{ij}}{c_{ij}} W x_j

    norm: c is the square root of the product of the degrees ("both"), the in-degree of i ("right"), the
    out-degree of j ("left") or 1 ("none"). Same arguments and state_dict as ``dgl.nn.GraphConv``.
    """

    def __init__(
        self, in_feats: int, out_feats: int, norm: str = "both", weight: bool = True, bias: bool = True,
        activation: Callable[[Tensor], Tensor] | None = None, allow_zero_in_degree: bool = False,
    ):  # fmt: skip
        super().__init__()
        if norm not in ("none", "both", "right", "left"):
            raise DGLError(f"GraphConv: norm: expected none, both, right or left, got {norm!r}")
        self._in_feats, self._out_feats, self._norm = in_feats, out_feats, norm
        self._allow_zero_in_degree = allow_zero_in_degree
        self.weight = nn.Parameter(torch.empty(in_feats, out_feats)) if weight else None
        self.bias = nn.Parameter(torch.empty(out_feats)) if bias else None
        self._activation = activation
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def set_allow_zero_in_degree(self, set_value: bool) -> None:
        self._allow_zero_in_degree = set_value

    def forward(
        self, graph: Any, feat: Any, weight: Tensor | None = None, edge_weight: Tensor | None = None
    ) -> Tensor:
        """feat: ``[N, *, in_feats]`` or a pair.  weight: replaces the layer's.  edge_weight: ``[E]``."""
        if weight is not None and self.weight is not None:
            raise DGLError("GraphConv: weight: expected None, as the layer has one of its own (weight=False)")
        weight = self.weight if weight is None else weight
        fused = as_graph(graph, self)
        if not self._allow_zero_in_degree:
            check_in_degrees(graph, fused, "GraphConv: ")
        x, _ = expand_as_pair(feat)
        if self._norm in ("left", "both"):
            x = x * _norm(fused.out_degrees(), x, self._norm)
        # The projection comes first if it shrinks the features, so that narrower rows are summed.
        shrinks = weight is not None and self._in_feats > self._out_feats
        x = x @ weight if shrinks else x
        if edge_weight is None:
            out = copy_u_sum(fused, x)
        else:
            out = u_mul_e_sum(fused, x, edge_weight.view(len(edge_weight), *[1] * (x.dim() - 1)))
        out = out @ weight if weight is not None and not shrinks else out
        if self._norm in ("right", "both"):
            out = out * _norm(fused.in_degrees(), out, self._norm)
        out = out if self.bias is None else out + self.bias
        return out if self._activation is None else self._activation(out)

    def extra_repr(self) -> str:
        text = f"in={self._in_feats}, out={self._out_feats}, normalization={self._norm}"
        return text + f", activation={self._activation}"


def _norm(degrees: Tensor, x: Tensor, norm: str) -> Tensor:
    degrees = degrees.to(x.dtype).clamp(min=1)
    factor = degrees.rsqrt() if norm == "both" else 1 / degrees
    return factor.view(-1, *[1] * (x.dim() - 1))


class HeteroGraphConv(nn.Module):
    """A layer for each relation; ``aggregate`` reduces the results of several relations for one type of
    nodes: "sum", "mean", "max", "min", "stack", or a function of a list of tensors and the type."""

    def __init__(self, mods: Mapping[Any, nn.Module], aggregate: Any = "sum"):
        super().__init__()
        self.mod_dict = {name if isinstance(name, tuple) else str(name): mod for name, mod in mods.items()}
        self.mods = nn.ModuleDict({str(name): mod for name, mod in mods.items()})
        for mod in self.mods.values():
            allow = getattr(mod, "set_allow_zero_in_degree", None)
            if callable(allow):  # a node without edges here may have edges of another relation
                allow(True)
        if isinstance(aggregate, str) and aggregate not in CROSS:
            raise DGLError(f"HeteroGraphConv: aggregate: expected one of {list(CROSS)}, got {aggregate!r}")
        self.agg_fn = partial(_reduced, aggregate) if isinstance(aggregate, str) else aggregate

    def _module(self, relation: tuple[str, str, str]) -> nn.Module:
        for name in (str(relation), relation[1]):
            if name in self.mods:
                return self.mods[name]
        raise KeyError(f"HeteroGraphConv: mods: expected a module of {relation}, got {list(self.mods)}")

    def forward(self, g: Any, inputs: Any, mod_args: Any = None, mod_kwargs: Any = None) -> dict[str, Any]:
        """inputs: features by type, or a pair of such for sources and destinations. Relations of nodes
        without features are left out."""
        if isinstance(inputs, tuple) or g.is_block:
            src, dst = expand_as_pair(inputs, g) if isinstance(inputs, tuple) else (
                inputs, {k: v[: g.num_dst_nodes(k)] for k, v in inputs.items() if k in g.dsttypes}
            )  # fmt: skip
        else:
            src = dst = inputs
        found: dict[str, list[Any]] = {kind: [] for kind in g.dsttypes}
        for relation in g.canonical_etypes:
            if relation[0] not in src or relation[2] not in dst:
                continue
            mod, part = self._module(relation), g[relation]
            args = (mod_args or {}).get(relation[1], ())
            kwargs = (mod_kwargs or {}).get(relation[1], {})
            found[relation[2]].append(mod(part, (src[relation[0]], dst[relation[2]]), *args, **kwargs))
        return {kind: self.agg_fn(parts, kind) for kind, parts in found.items() if parts}


def _reduced(name: str, parts: list[Tensor], kind: str) -> Tensor:
    """A function of the module, so that layers can be pickled."""
    return CROSS[name](parts)


class Identity(nn.Module):
    """A layer that returns its input."""

    def forward(self, x: Any) -> Any:
        return x


class Sequential(nn.Sequential):
    """Calls modules in turn with the graph (or, if there are several, each with its own) and the features."""

    def forward(self, graph: Any, *feats: Any) -> Any:  # type: ignore[override]
        graphs = graph if isinstance(graph, list) else [graph] * len(self)
        if len(graphs) != len(self):
            raise DGLError(
                f"Sequential: graph: expected {len(self)} graphs, one per module, got {len(graphs)}"
            )
        for g, module in zip(graphs, self):
            feats = feats if isinstance(feats, tuple) else (feats,)
            feats = module(g, *feats)
        return feats
