"""Arguments that Python passes as one tuple (`Tensors`, `Numbers`, ...) stand side by side in the operators'
schemas, in the order of the tuple's fields."""

import pytest

from dfgnn.runtime.arguments import Backward, EdgeArgs, Forward, ForwardResults, GraphArgs, Numbers, Tensors


@pytest.mark.parametrize("group", [EdgeArgs, GraphArgs, Numbers, Tensors])
def test_groups_stand_together(group):
    for schema in (Forward, Backward):
        at = schema._fields.index(group._fields[0])
        assert schema._fields[at : at + len(group._fields)] == group._fields


def test_order_of_the_groups():
    assert Forward._fields == (
        *("score", *Tensors._fields, *GraphArgs._fields, "num_dst", *Numbers._fields),
        *("return_attention", "save_positive"),
    )
    assert Backward._fields == (
        *("grad_out", "grad_attention", "score", *Tensors._fields, *ForwardResults._fields),
        *(*GraphArgs._fields, *Numbers._fields, "need"),
    )
