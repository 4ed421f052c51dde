"""Calls of `block_attention` that must be refused, in the form of bad_input.py."""

import math
from functools import partial

import torch
from bad_input import Case

from dfgnn import functional

ROWS, OFFSETS = torch.ones(6, 2, 4), torch.tensor([0, 2, 6])
PAIRS = torch.ones(20, 2)
ON_META = {name: ROWS.to("meta") for name in ("query", "key", "value")} | {"offsets": OFFSETS.to("meta")}
#: What is wrong, the changed arguments, of which the first is at fault, the error, and its words.
WRONG = [
    ("a list", dict(query=[1.0]), TypeError, "expected a tensor, got list"),
    ("of integers", dict(query=ROWS.long()), TypeError, "expected float32"),
    ("without heads", dict(query=ROWS.flatten(1)), ValueError, "expected shape [any, any, any], got [6, 8]"),
    ("sparse", dict(query=ROWS.to_sparse()), TypeError, "layout torch.sparse_coo"),
    ("of another size", dict(key=torch.ones(6, 2, 5)), ValueError, "expected shape [any, 2, 4]"),
    ("of another dtype", dict(key=ROWS.double()), TypeError, "expected torch.float32"),
    ("on another device", dict(key=ROWS.to("meta")), ValueError, "expected device cpu"),
    ("with other rows than key", dict(value=ROWS[:5]), ValueError, "expected shape [6, 2, any]"),
    ("of floats", dict(offsets=OFFSETS.float()), TypeError, "expected torch.int32 or torch.int64"),
    ("a number", dict(offsets=torch.tensor(6)), ValueError, "expected shape [blocks + 1], got []"),
    ("missing", dict(key_offsets=None, key=ROWS[:5], value=ROWS[:5]), ValueError, "6 queries and 5 keys"),
    ("of fewer blocks", dict(key_offsets=OFFSETS[1:]), ValueError, "expected shape [3] like offsets"),
    ("a string for a bool", dict(return_attention="no"), TypeError, "expected True or False, got 'no'"),
    ("a list", dict(scale=[1.0]), TypeError, "expected a number, got list"),
    ("with other rows", dict(key_bias=torch.ones(5)), ValueError, "expected shape [6] or [6, 2]"),
    ("of integers", dict(key_bias=torch.ones(6).long()), TypeError, "expected torch.float32"),
    ("of other heads", dict(sink=torch.ones(3)), ValueError, "expected shape [2]"),
    ("a string", dict(scale="1"), TypeError, "expected a number, got str"),
    ("a vector", dict(scale=torch.ones(2)), ValueError, "expected shape [], got [2]"),
    ("a number", dict(pair_bias=3.0), TypeError, "expected a tensor, got float"),
    ("without heads", dict(pair_bias=PAIRS[:, 0]), ValueError, "expected shape [any, 2], got [20]"),
    ("of fewer pairs", dict(pair_bias=PAIRS[:19]), ValueError, "expected shape [20, 2], got [19, 2]"),
    ("of integers", dict(pair_bias=PAIRS.long()), TypeError, "expected torch.float32"),
    ("0", dict(softcap=0), ValueError, "expected a finite number above 0 or None, got 0"),
    ("infinite", dict(softcap=math.inf), ValueError, "expected a finite number above 0 or None, got inf"),
    ("a string", dict(softcap="1"), TypeError, "expected a number, got str"),
    ("a tensor", dict(softcap=torch.tensor(1.0)), TypeError, "expected a number, got Tensor"),
    ("1.5", dict(dropout_p=1.5), ValueError, "expected a probability in [0, 1], got 1.5"),
    ("a number", dict(generator=3, dropout_p=0.5), TypeError, "expected a torch.Generator"),
    ("flash attention's", dict(cu_seqlens_k=OFFSETS), TypeError, "did you mean key_offsets?"),
    ("a functions' option", dict(mask=PAIRS), TypeError, "key_bias or pair_bias of -inf"),
    ("unknown", dict(pairbias=PAIRS), TypeError, "did you mean pair_bias"),
    ("on meta", dict(return_attention=True, **ON_META), ValueError, "expected False on the device meta"),
]
for _more in ({}, dict(softcap=1.0)):  # in blocks, and over pairs
    _where = " of pairs" if _more else ""
    WRONG += [
        (
            f"decreasing{_where}",
            dict(offsets=OFFSETS[[0, 2, 1]], **_more),
            RuntimeError,
            "that never decrease, got 6 before 2 at position 1; rows offsets[b] to",
        ),
        (
            f"too large{_where}",
            dict(offsets=OFFSETS + 1, **_more),
            RuntimeError,
            "numbers in [0, 6], got 7; query has 6 rows",
        ),
        (
            f"a batch vector{_where}",
            dict(offsets=torch.tensor([0, 0, 1, 1, 1, 2]), **_more),
            RuntimeError,
            "the last is 6, the rows of query, got 6 that end with 2, which looks like a batch vector",
        ),
        (
            f"sizes{_where}",
            dict(offsets=OFFSETS.diff(), **_more),
            RuntimeError,
            "got 2, and 6 in all, which looks like sizes of blocks",
        ),
        (f"negative{_where}", dict(offsets=OFFSETS - 1, **_more), RuntimeError, "numbers in [0, 6], got -1"),
    ]


def cases():
    right = dict(query=ROWS, key=ROWS, value=ROWS, offsets=OFFSETS)
    for wrong, changes, error, words in WRONG:
        argument = next(iter(changes))
        call = partial(functional.block_attention, **{**right, **changes})
        said = "block_attention", f"{argument}: ", words
        yield Case("functional.block_attention", argument, wrong, error, said, call)
