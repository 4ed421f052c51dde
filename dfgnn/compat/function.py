"""DGL's built-in message and reduce functions: ``u_add_v``, ``copy_u``, ``u_mul_e``, ``sum``, ``mean``, ...

A message function names its input features and its result, ``fn.u_mul_e("h", "a", "m")``; a reduce function
the message and its result, ``fn.sum("m", "h")``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

from ..functional.ops import BINARY, REDUCERS


class Message(NamedTuple):
    """A message function: ``op`` of features of two of u, v and e, or of one of them."""

    op: str
    lhs: str
    rhs: str | None
    lhs_field: str
    rhs_field: str | None
    out: str


class Reduce(NamedTuple):
    """A reduce function, which makes a destination's feature from its edges' messages."""

    op: str
    message: str
    out: str


if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Message]: ...


def _reduce(op: str) -> Callable[[str, str], Reduce]:
    def reduce(msg: str, out: str) -> Reduce:
        return Reduce(op, msg, out)

    reduce.__name__ = reduce.__qualname__ = op
    return reduce


sum, mean, max, min = map(_reduce, REDUCERS)


def copy_u(u: str, out: str) -> Message:
    return Message("copy", "u", None, u, None, out)


def copy_e(e: str, out: str) -> Message:
    return Message("copy", "e", None, e, None, out)


copy_src, copy_edge = copy_u, copy_e  # names before DGL 1.0


def _binary(lhs: str, op: str, rhs: str) -> Callable[[str, str, str], Message]:
    def message(lhs_field: str, rhs_field: str, out: str) -> Message:
        return Message(op, lhs, rhs, lhs_field, rhs_field, out)

    message.__name__ = message.__qualname__ = f"{lhs}_{op}_{rhs}"
    return message


for _lhs, _rhs in permutations("uve", 2):
    for _op in (*BINARY, "dot"):
        globals()[f"{_lhs}_{_op}_{_rhs}"] = _binary(_lhs, _op, _rhs)
src_mul_edge, src_dot_dst = globals()["u_mul_e"], globals()["u_dot_v"]  # names before DGL 0.5
