"""Aggregations by a softmax with torch_geometric's contract."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.utils import softmax

from ... import functional
from ...graph import Graph
from ...graph import cache as graph_cache
from ...runtime.torch_internals import FakeTensor
from ...runtime.tracing import any_batched, without_gradient
from ...sparse.csr import INDEX_DTYPES, no_tensor
from .._errors import check_constructor
from .._fused_or_upstream import warn, why_changed
from .._upstream import Called
from ._base import LIBRARY


def graph_of_groups(x: Tensor, index: Tensor | None, ptr: Tensor | None, num_groups: int | None) -> Graph:
    """The graph that leads from each row of x to its group; cached as long as ``index`` or ``ptr`` lives.

    index: int64 ``[E]``, the group of each row, or ptr: int64 ``[groups + 1]``, of sorted rows.
    """
    groups_tensor = index if ptr is None else ptr
    assert groups_tensor is not None
    groups_tensor = without_gradient(groups_tensor)

    def build() -> Graph:
        rows = torch.arange(len(x), device=x.device)
        if ptr is not None:
            return Graph.from_csr(groups_tensor.clone(), rows, len(x))  # the graph must not keep `ptr` alive
        groups = num_groups
        if groups is None:
            groups = int(groups_tensor.max()) + 1 if groups_tensor.numel() else 0
        return Graph.from_coo(rows, groups_tensor, num_src=len(x), num_dst=groups)

    return graph_cache.once((groups_tensor,), ("groups", len(x), num_groups, ptr is None), build)


class FusedAggregation:
    """Mixin: a sum over the rows of a group with weights that a softmax makes of scores."""

    #: What computes the attention; ``reference.gat_attention`` makes it the same module on plain PyTorch.
    attention: Callable[..., Any] = staticmethod(functional.gat.gat)

    @classmethod
    def why_not(cls, layer: Any) -> str | None:
        return None

    if TYPE_CHECKING:
        _called: ClassVar[Called]

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if FusedAggregation in cls.__bases__:
            cls._called = Called(cls.__mro__[2])
            cls.__init__ = check_constructor(cls.__init__)  # type: ignore[method-assign]

    def _falls_back(self, x: Tensor, index: Tensor | None, ptr: Tensor | None, dim: int) -> bool:
        reason = None
        if not torch.compiler.is_compiling():
            parameters = self._parameters.values()  # type: ignore[attr-defined]
            reason = why_changed(self._called, LIBRARY, (x, *parameters))
        if x.dim() != 2 or dim not in (0, -2):
            reason = f"groups along dimension {dim} of {x.dim()}"
        elif x.shape[1] == 0:
            reason = "features without columns"
        elif index is None and ptr is None:
            reason = "one group for all"
        elif torch.compiler.is_compiling() or torch.jit.is_scripting() or torch.jit.is_tracing():
            reason = "the groups are not known while a compiler records"
        elif FakeTensor in (type(x), type(index), type(ptr)):
            reason = "fake tensors do not tell the groups"
        elif x.is_meta:
            reason = "the groups are not known on the device meta"
        elif any_batched((index, ptr)):
            reason = "torch.func.vmap gives each sample groups of its own"
        if reason is not None and not torch.compiler.is_compiling():
            warn(type(self), LIBRARY, reason)
        return reason is not None

    def __call__(self, x, index=None, ptr=None, *args, **kwargs):
        for name, given in (("x", x), ("index", index), ("ptr", ptr)):  # before torch_geometric reads them
            where = f"{type(self).__name__}: {name}"
            if not isinstance(given, Tensor) and (name == "x" or given is not None):
                raise TypeError(f"{where}: {no_tensor(name, given)}")
            if given is not None and name != "x" and given.dtype not in INDEX_DTYPES:
                raise TypeError(f"{where}: expected int64, got {given.dtype}; convert it with {name}.long()")
        return super().__call__(x, index, ptr, *args, **kwargs)  # type: ignore[misc]

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> Tensor:
        """Aggregate the rows of each group.

        Args:
            x: ``[E, F]``.
            index: int64 ``[E]``, the group of each row.
            ptr: int64 ``[groups + 1]``, where the groups begin, of sorted rows; instead of ``index``.
            dim_size: the number of groups; None: one more than the largest in ``index``.
            dim: the dimension of the rows; another one than the first runs torch_geometric's own forward.

        Returns:
            ``[groups, F']``; a group without rows gets 0.

        Raises:
            TypeError, ValueError: a tensor is not as described, or a group is out of range.
        """
        if self._falls_back(x, index, ptr, dim):
            of_groups = x.dim() == 2 and dim in (0, -2) and not (index is None and ptr is None)
            if of_groups and x.dtype.itemsize == 2 and torch.compiler.is_compiling():
                return self._in_float32(x, index, ptr, dim_size, dim)
            return super().forward(x, index, ptr, dim_size, dim)  # type: ignore[misc]
        try:
            graph = graph_of_groups(x, index, ptr, dim_size)
        except ValueError as error:  # in words of the constructor that it calls
            text = str(error).replace("Graph.from_coo: dst", "index").replace("num_dst", "dim_size")
            text = text.replace("Graph.from_csr: indptr", "ptr").replace("like src", "like x")
            raise ValueError(f"{type(self).__name__}: {text.replace('len(indices)', 'len(x)')}") from None
        values, score = self._terms(x, index, dim_size)
        heads, width = score.shape[1], values.shape[1]
        values = values.view(len(x), heads, width // heads)  # no -1, which is ambiguous without rows
        return self.attention(graph, values, score, None, negative_slope=1.0).flatten(1)

    def _in_float32(
        self, x: Tensor, index: Tensor | None, ptr: Tensor | None, dim_size: int | None, dim: int
    ) -> Tensor:
        """torch_geometric's operations, with sums in float32: in 16 bits compiled code adds one row
        after another, and a sum of ones ends at 256."""
        values, score = self._terms(x, index, dim_size)
        weight = softmax(score.float(), index, ptr, dim_size, dim)
        reduced = self.reduce(weight * values.float(), index, ptr, dim_size, dim, "sum")  # type: ignore[attr-defined]
        return reduced.to(values.dtype)

    def __prepare_scriptable__(self):
        # torch.jit.script calls this method for a module to compile in place of self. It gets a copy of
        # torch_geometric's class, which follows FusedAggregation in the MRO. A user's subclass, which may
        # change the results, is not replaced.
        if FusedAggregation not in type(self).__bases__:
            return self
        plain = copy.copy(self)
        plain.__class__ = type(self).__mro__[2]  # type: ignore[assignment]
        return plain

    def _terms(self, x: Tensor, index: Tensor | None, dim_size: int | None) -> tuple[Tensor, Tensor]:
        """Values ``[E, F']``, and their scores: ``[E, 1]``, or ``[E, F']`` for a softmax of each column."""
        raise NotImplementedError


class SoftmaxAggregation(FusedAggregation, torch_geometric.nn.aggr.SoftmaxAggregation):
    r"""Softmax aggregation (Li et al., "DeeperGCN: All You Need to Train Deeper GCNs", 2020).

    .. math::
        \mathrm{out}_i = \sum_n \mathrm{softmax}_n(t \, x_n) \circ x_n

    A drop-in for ``torch_geometric.nn.aggr.SoftmaxAggregation``: its subclass, with the same arguments,
    parameters and results, and without other tensors of the size of x than t x. Groups along the rows of a
    matrix; for others torch_geometric's own forward runs.

    Example::

        import torch
        from dfgnn.nn.pyg import SoftmaxAggregation

        index = torch.arange(600) % 100  # the group of each row
        aggregation = SoftmaxAggregation(learn=True)
        out = aggregation(torch.randn(600, 16), index)  # [100, 16]
    """

    def _terms(self, x: Tensor, index: Tensor | None, dim_size: int | None) -> tuple[Tensor, Tensor]:
        if self.channels != 1:
            self.assert_two_dimensional_input(x, 0)
        return x, self.scores(x)

    def scores(self, x: Tensor) -> Tensor:
        return scores_of(self, x)


def scores_of(module: Any, x: Tensor) -> Tensor:
    """t x of a SoftmaxAggregation; without a gradient if it has ``semi_grad`` and t is not learned."""
    score = x * module.t
    return score.detach() if module.semi_grad and not module.learn else score


class AttentionalAggregation(FusedAggregation, torch_geometric.nn.aggr.AttentionalAggregation):
    r"""Aggregation by a gate (Li et al., "Graph Matching Networks for Learning the Similarity of Graph
    Structured Objects", ICML 2019).

    .. math::
        \mathrm{out}_i = \sum_n \mathrm{softmax}_n(\mathrm{gate}(x_n)) \circ \mathrm{nn}(x_n)

    A drop-in for ``torch_geometric.nn.aggr.AttentionalAggregation``: its subclass, with the same arguments,
    parameters and results. Groups along the rows of a matrix; for others torch_geometric's own forward runs.

    Example::

        import torch
        from dfgnn.nn.pyg import AttentionalAggregation

        index = torch.arange(600) % 100  # the group of each row
        aggregation = AttentionalAggregation(torch.nn.Linear(16, 1))
        out = aggregation(torch.randn(600, 16), index)  # [100, 16]
    """

    def _terms(self, x: Tensor, index: Tensor | None, dim_size: int | None) -> tuple[Tensor, Tensor]:
        gate = (
            self.gate_nn(x) if self.gate_mlp is None else self.gate_mlp(x, batch=index, batch_size=dim_size)
        )
        if self.mlp is not None:
            x = self.mlp(x, batch=index, batch_size=dim_size)
        elif self.nn is not None:
            x = self.nn(x)
        if gate.shape not in ((len(x), 1), x.shape):
            raise ValueError(
                f"AttentionalAggregation: gate_nn: expected [{len(x)}, 1] or {list(x.shape)}, a gate for "
                f"each row or element, got {list(gate.shape)}"
            )
        return x, gate.to(x.dtype)
