"""Errors of calls that Python, or torch's operators, would refuse in words of their own."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from . import torch_internals as internals

F = TypeVar("F", bound=Callable[..., Any])

#: Where errors find the pages of the documentation, which no package contains.
DOCS = "https://github.com/dfgnn/dfgnn/blob/main/docs"

#: What other libraries call it -> what to write here.
_ELSEWHERE = {
    **dict.fromkeys(
        ("edge", "edge_attr", "edge_feat", "edge_feats", "edge_features", "efeat", "e"),
        "features of edges go into edge=EdgeTerm(key, value)",
    ),
    "attn_mask": "mask= takes bools, bias= what is added to the scores",
    "is_causal": "a pair that is not to be seen is no edge of the graph, or False in mask=",
    "seed": "did you mean generator?",
    "schedule": 'did you mean kernel_options={"schedule": ...}?',
    **dict.fromkeys(("num_heads", "heads"), "heads are a dimension of the tensors, [rows, heads, columns]"),
}
_OF_EDGES = {"edge_attr", "edge_feat", "edge_feats", "efeats", "edge_features"}
_OF_BLOCKS = {
    **dict.fromkeys(("mask", "attn_mask"), "key_bias or pair_bias of -inf masks keys or pairs"),
    **dict.fromkeys(("batch", "ptr", "graph"), "offsets say where blocks begin, as a batch's ptr"),
    "bias": "did you mean key_bias or pair_bias?",
}
_OF_FUNCTIONS = "mask", "bias", "weight", "scale", "sink", "generator", "kernel_options"
#: Names of one thing in several libraries.
_SYNONYMS = (
    ("in_channels", "in_feats", "in_features", "in_dim", "input_dim", "in_size", "feats", "channels",
     "d_model", "embed_dim", "in_node_feats"),
    ("out_channels", "out_feats", "out_features", "out_dim", "output_dim", "out_size", "hidden_channels",
     "hidden_dim", "hidden_size", "head_size", "head_dim", "out_node_feats"),
    ("heads", "num_heads", "n_heads", "nheads", "nhead", "num_head"),
    ("dropout", "attn_drop", "dropout_p", "attn_dropout", "p", "drop"),
    ("edge_dim", "edge_feats", "edge_in_feats", "in_edge_feats", "edge_attr", "edge_feat", "edge_features",
     "edge_channels"),
    ("edge_attr", "edge_feat", "edge_feats", "efeats", "edge_features", "edge_weight"),
    ("x", "feat", "feats", "nfeats", "features", "h", "input", "node_feats"),
    ("graph", "g", "edge_index", "adj", "adj_t"),
    ("get_attention", "return_attention", "return_attention_weights", "need_weights"),
    ("negative_slope", "alpha", "slope"),
    ("activation", "act"), ("ffn_feats", "ffn_hidden", "ffn_dim", "dim_feedforward", "ff_dim"),
    ("offsets", "cu_seqlens", "cu_seqlens_q", "cu_seq_q", "ptr", "seqlens"),
    ("key_offsets", "cu_seqlens_k", "cu_seq_k"),
    ("query", "q"), ("key", "k"), ("value", "v"), ("att", "attn", "a"),
    ("num_nodes", "n", "size", "sizes", "num_vertices", "number_of_nodes"),
    ("key", "feat", "features", "edge_attr", "attr"),
    ("attr", "edge_attr", "feat"), ("src", "row"), ("dst", "col"),
)  # fmt: skip


def unknown_argument(where: str, name: str, names: Collection[str]) -> TypeError:
    """The error of an argument ``name`` that is none of ``names``, those that ``where`` knows."""
    hint = _ELSEWHERE.get(name, "") if {"query", "value"} & {*names} and len(names) > 3 else ""
    if "edge=" in hint and "edge" not in names:
        hint = "this attention has no features of edges; dot_attention has"
    elif not hint:
        bare = name.removeprefix("edge_")
        others = (x for group in _SYNONYMS if name in group for x in group)
        like = [x for x in (bare, *others) if x in names]
        like = like or difflib.get_close_matches(bare, names, 1, 0.7)
        hint = f"did you mean {like[0]}?" if like else ""
    if "offsets" in names and not hint:
        hint = _OF_BLOCKS.get(name, "")
    if name in _OF_EDGES and "feat" in names and not _OF_EDGES & {*names}:
        hint = "this layer has no features of edges; EdgeGATConv, EGATConv and GraphTransformerConv have"
    if not hint and {"graph", "edge_index"} & {*names} and name in _OF_FUNCTIONS:
        hint = "the functions of dfgnn.functional have mask, bias, weight and more"
    expected = ", ".join(names)
    return TypeError(f"{where}: {name}: expected one of {expected}, got {name}{'; ' if hint else ''}{hint}")


def no_bool(where: str, name: str, got: Any) -> TypeError:
    return TypeError(f"{where}: {name}: expected True or False, got {got!r:.80}")


def wrong_call(
    where: str, signature: inspect.Signature, args: Any, kwargs: Any, error: TypeError
) -> TypeError | None:
    """The error of a call that does not fit the signature; None if it does. error: what Python says of it."""
    known = signature.parameters
    others = any(x.kind is x.VAR_KEYWORD for x in known.values())
    names = [x for x in known if x not in ("self", "cls", "_cls", "args", "kwargs")]
    for name in kwargs:
        refused = f"unexpected keyword argument '{name}'", "missing"
        if name not in known and (not others or any(x in str(error) for x in refused)):
            return unknown_argument(where, name, names)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        if str(error).startswith("missing a required argument: "):
            name = str(error).partition(": ")[2].strip("'")
            data = any(hasattr(x, "edge_index") and hasattr(x, "x") for x in args)
            way = "; of a Data they are data.x and data.edge_index" if data else ""
            return TypeError(
                f"{where}: {name}: expected a value, got none; the arguments are {', '.join(names)}{way}"
            )
        by_place = [x for x in names if known[x].kind is not inspect.Parameter.KEYWORD_ONLY]
        rest = "" if by_place == names else ", and all others by name"
        return TypeError(f"{where}: expected {', '.join(by_place) or 'no argument'}{rest}, got {error}")
    return None


def says_calls(function: F, where: str = "") -> F:
    """The function, whose errors of a wrong call are those of `wrong_call`."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if internals.is_dynamo_recording():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            wrong = wrong_call(where or function.__name__, inspect.signature(function), args, kwargs, error)
            if wrong is None:
                raise
            raise wrong from None

    return call  # type: ignore[return-value]
