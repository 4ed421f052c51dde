"""Numbers and orders of arguments that C++ and Python both write down."""

import re
from pathlib import Path

import pytest
import torch
from graphs import make_graph

from dfgnn.plan import cost, items, tiles
from dfgnn.runtime import arguments as _arguments
from dfgnn.runtime.arguments import Backward, EdgeArgs, Forward, ForwardResults, GraphArgs, Numbers, Tensors
from dfgnn.sparse import csr as _csr
from dfgnn.sparse import degrees as _degrees


@pytest.fixture(scope="module")
def constants():
    pairs = [pair.split("=") for pair in _arguments.ops.constants().split(";") if pair]
    return {name: int(value) for name, value in pairs}


def test_every_mirror(constants):
    lanes = {
        f"lanes_{heads}_{dtype.itemsize}_{2**k}": cost.lanes_per_head(heads, 2**k, dtype)
        for heads in (1, 2)
        for dtype in (torch.float16, torch.float32, torch.float64)
        for k in range(11)
    }
    assert constants == lanes | {
        "score_additive": _arguments.SCORES["additive"],
        "score_dot": _arguments.SCORES["dot"],
        "score_additive_v2": _arguments.SCORES["additive_v2"],
        "flag_bias_after": _arguments.BIAS_AFTER,
        "flag_feat_in_key": _arguments.FEAT_IN_KEY,
        "flag_feat_in_value": _arguments.FEAT_IN_VALUE,
        "flag_part_of_rows": _arguments.PART_OF_ROWS,
        "flag_ids_elsewhere": _arguments.IDS_ELSEWHERE,
        "need_dst": _arguments.NEED_DST,
        "need_bias": _arguments.NEED_BIAS,
        "need_gate": _arguments.NEED_GATE,
        "need_weight": _arguments.NEED_WEIGHT,
        "need_feat": _arguments.NEED_FEAT,
        "plan_numbers": len(make_graph("random").plan().launch),
        "tile_rows": tiles.ROWS,
        "tile_cols": tiles.COLUMNS,
        "warp": cost._WARP,
        "load_bytes": 16,
        "degree_bins": _degrees._DEGREE_BINS,
        "most_ids": _csr.LIMIT,
        "joins": items.JOINS,
        "most_parts": cost.MOST_PARTS,
        "wide_bytes": cost._WIDE_BYTES,
        **{
            f"group_{name}_{heads}": cost.grouped_below(heads, name == "backward")
            for name in ("forward", "backward")
            for heads in (1, 8)
        },
    }


def test_scratch_of_backward():
    """A number of the CUDA library alone, which only a GPU loads: read from its source."""
    source = Path(__file__).resolve().parents[2] / "csrc" / "torch" / "cuda.cpp"
    (found,) = re.findall(r"kMostScratch = (\d+);", source.read_text())
    assert int(found) == cost._MOST_SCRATCH


@pytest.mark.parametrize("group", [EdgeArgs, GraphArgs, Numbers, Tensors])
def test_groups_stand_together(group):
    """Arguments that Python passes as one tuple (`Tensors`, `Numbers`, ...) stand side by side in the
    operators' schemas, in the order of the tuple's fields."""
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
