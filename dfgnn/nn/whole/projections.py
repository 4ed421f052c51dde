"""The linear projections of a fused layer and their gradients.

The call of a product costs a small graph on a GPU more than the product itself. There, projections of the
same features are joined: three or more are one batched product, and the gradients of two or more are one
product over all of them side by side.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import ops as _ops
from ...runtime import torch_internals as internals
from .padding import cut_rows, pad_columns, pad_rows
from .spec import LayerTensors

__all__ = ["EDGE", "KEY", "QUERY", "SKIP", "VALUE", "Projections", "projections_of"]

_linear = internals.linear

# Positions in LayerTensors. VALUE to EDGE are those of weights, each of which is followed by its bias.
VALUE, KEY, QUERY, SKIP, EDGE, _EDGE_ATTR, _OUT_BIAS = map(
    LayerTensors._fields.index,
    ("value_weight", "key_weight", "query_weight", "skip_weight", "edge_weight", "edge_attr", "out_bias"),
)
_WEIGHTS = VALUE, KEY, QUERY, SKIP, EDGE

# Projections are joined if the result of each has at most this number of elements. For larger results the
# product takes longer than its call, and joining would cost a copy of the gradients.
_MOST_JOINED = 2**22


def joins(x: Tensor, width: int) -> bool:
    return x.is_cuda and x.shape[0] * width <= _MOST_JOINED


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product a b in this dtype; on a GPU in one launch."""
    if a.is_cuda and a.dtype.itemsize == 2 and dtype is torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return _ops.as_type(a.mm(b), dtype)


class Projections(NamedTuple):
    heads: int
    size: int  # columns of a head, without padding
    padding: int  # zero columns that are added to a head
    #: Groups of projections that are joined (a group may be one projection): the position of their features
    #: in LayerTensors, and those of their weights.
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    any_joined: bool  # whether a group has several projections
    #: Whether the skip connection's rows are a part of a batched product. Then the layer's result is a new
    #: tensor: written in place of these rows, it would keep the memory of the whole product alive.
    skip_is_shared: bool

    def pad(self, x: Tensor) -> Tensor:
        """Rows [n, H * size] with the padding."""
        return pad_columns(x, self.heads, self.size, self.padding) if self.padding else x

    def forward(self, t: LayerTensors) -> tuple[dict[int, Tensor], list[Tensor | None]]:
        """The padded rows, by the positions of their weights; and for each group the weight as it was
        multiplied (joined, padded, in x's dtype), or None if backward makes it again."""
        rows: dict[int, Tensor] = {}
        used: list[Tensor | None] = []
        for end, places in self.groups:
            x = t[end]
            if len(places) > 1:
                used.append(self._joined_forward(t, x, places, rows))
                continue
            (at,) = places
            weight, bias = t[at], t[at + 1]
            if self.padding or weight.dtype is not x.dtype:
                weight = self._prepared(weight, x.dtype)
            if bias is not None and (self.padding or bias.dtype is not x.dtype):
                bias = self._prepared(bias, x.dtype)
            rows[at] = _linear(x, weight, bias)
            used.append(weight)
        return rows, used

    def _prepared(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = _ops.as_type(x, dtype)
        return pad_rows(x, self.size, self.padding) if self.padding else x

    def _joined_forward(self, t: LayerTensors, x: Tensor, places: tuple[int, ...], rows: dict[int, Tensor]):
        # The results are padded, not the weights: padding the results takes one launch, and backward, which
        # puts the gradients side by side anyway, leaves the padding out there.
        if len(places) == 2:  # two single products take less time than a joined one
            for at in places:
                weight, bias = _joined(t, x, (at,)), _joined(t, x, (at + 1,))
                rows[at] = self.pad(_linear(x, weight, bias))
            return None
        weight = _joined(t, x, places)
        bias = _joined(t, x, [at + 1 for at in places])
        # A batched product gives contiguous rows for each projection, as kernels need them. In the result of
        # one wide product there would be gaps between the rows of a projection.
        by_place = weight.view(len(places), -1, x.shape[1]).transpose(1, 2)
        same = x.expand(len(places), *x.shape)
        if bias is None:
            results = torch.bmm(same, by_place)
        else:
            results = torch.baddbmm(bias.view(len(places), 1, -1), same, by_place)
        if self.padding:
            results = self.pad(results).view(len(places), x.shape[0], -1)
        rows.update(zip(places, results.unbind()))
        return weight

    def backward(self, t: LayerTensors, grads: dict[int, Any], used, need, found: list, biased=None) -> None:
        """Writes the gradients of features, weights and biases into ``found``. grads: the gradients of the
        rows, by position; None if not wanted. biased: the result of `shares_sum`."""
        for group, weight in zip(self.groups, used):
            end, places = group
            x, g = t[end], grads[places[0]]
            if g is None:
                continue
            if len(places) > 1:
                of_result = grads[_OUT_BIAS] if group is biased else None
                g = self._joined_backward(t, group, [grads[at] for at in places], of_result, need, found)
            else:
                (at,) = places
                if need[at]:
                    found[at] = product(g.t(), x, t[at].dtype)
                    if self.padding:
                        found[at] = cut_rows(found[at], self.size, self.padding)
                if need[at + 1]:
                    found[at + 1] = g.sum(0, dtype=t[at + 1].dtype)
                    if self.padding:
                        found[at + 1] = cut_rows(found[at + 1], self.size, self.padding)
            if need[end]:
                weight = _joined(t, x, places) if weight is None else weight
                before = found[end]
                found[end] = g.mm(weight) if before is None else before.addmm_(g, weight)

    def shares_sum(self, t: LayerTensors, grad: Tensor) -> Any:
        """The group whose biases' gradients are summed together with that of the result's bias, or None."""
        if self.padding or grad.dtype is not t.x.dtype:
            return None
        for group in self.groups:
            end, places = group
            if len(places) == 1 or t[end].shape[0] != grad.shape[0]:
                continue
            bias = t[places[0] + 1]
            if bias is not None and bias.dtype is t.out_bias.dtype:
                return group
        return None

    def _joined_backward(self, t: LayerTensors, group, grads: list, of_result, need, found: list) -> Tensor:
        """Puts the gradients of several weights and biases into ``found``, and returns those of the rows,
        side by side. of_result: the gradient of the result, whose bias is summed with those of the
        projections."""
        end, places = group
        biases = [at + 1 for at in places]
        if of_result is not None:
            together = torch.cat([*grads, of_result], 1)
            biases.append(_OUT_BIAS)
            g = together[:, : -of_result.shape[1]]
        elif self.padding:
            by_head = self.heads, self.size + self.padding
            together = g = torch.cat([g.unflatten(1, by_head)[..., : self.size] for g in grads], 1).flatten(1)
        else:
            together = g = torch.cat(grads, 1)
        learning = [t[at] for at in places if need[at]]
        if learning:
            _hand_out(product(g.t(), t[end], learning[0].dtype), places, need, found)
        learning = [t[at] for at in biases if need[at]]
        if learning:
            _hand_out(together.sum(0, dtype=learning[0].dtype), biases, need, found)
        return g


def _joined(t: LayerTensors, x: Tensor, places) -> Any:
    """Weights or biases, one after the other, in x's dtype; None if there are none."""
    tensor = t[places[0]]
    if tensor is None:
        return None
    return _ops.as_type(torch.cat([t[at] for at in places]) if len(places) > 1 else tensor, x.dtype)


def _hand_out(whole: Tensor, places, need, found: list) -> None:
    """Puts the parts of a joined gradient into ``found``, each at its position."""
    width = whole.shape[0] // len(places)
    for k, at in enumerate(places):
        if need[at]:
            found[at] = whole[k * width : (k + 1) * width]


def projections_of(t: LayerTensors, heads: int, size: int, padding: int, with_edges: bool) -> Projections:
    """The layer's projections. with_edges: attributes of edges are projected like the features."""
    end, joined = 0 if t.x_dst is None else 1, (False, False)
    if t.query_weight is not None or t.key_weight is not None or t.skip_weight is not None:
        joined = joins(t.x, heads * size), t.x_dst is not None and joins(t.x_dst, heads * size)
    has_no_bias = (
        t.value_bias is None,
        None if t.key_weight is None else t.key_bias is None,
        None if t.query_weight is None else t.query_bias is None,
        None if t.skip_weight is None else t.skip_bias is None,
        t.edge_bias is None if with_edges and t.edge_weight is not None else None,
    )
    return _grouped(heads, size, padding, end, joined, has_no_bias)


@cache
def _grouped(heads: int, size: int, padding: int, end: int, joined, has_no_bias) -> Projections:
    """The projections in groups of the same features, where these are joined, and with or without bias.
    has_no_bias: for each of `_WEIGHTS`, or None if the layer has no such projection; end: the position of the
    destinations' features, x (0) or x_dst (1); joined: for x and x_dst."""
    groups: dict[Any, tuple[int, tuple[int, ...]]] = {}
    for place, of, no_bias in zip(_WEIGHTS, (0, 0, end, end, _EDGE_ATTR), has_no_bias):
        if no_bias is not None:
            key = (of, no_bias) if of != _EDGE_ATTR and joined[of] else place
            groups[key] = of, (*groups.get(key, (of, ()))[1], place)
    joint = [places for _, places in groups.values() if len(places) > 1]
    skip_is_shared = any(len(places) > 2 and SKIP in places for places in joint)
    return Projections(heads, size, padding, tuple(groups.values()), bool(joint), skip_is_shared)
