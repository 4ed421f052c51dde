"""The calls of test_every_function.py: every function with every kind of tensor that it takes, as text whose
letters `Case` explains."""

from typing import NamedTuple

import attention
import torch

from dfgnn import functional
from dfgnn.engine import edge_projection  # patched, so that a case is folded or not whatever its sizes

B, H = 3, 2


class Case(NamedTuple):
    """A function, and its tensors as name:dimensions, which are letters: b (sets of features), n (sources),
    m (destinations), e (edges), h (heads), d (elements of a head), v (of a head of values), k (attributes),
    t (types), o (one), p (pairs of blocks), D and V (of all heads). The names are flat (`attention.packed`).
    function: a public one's name, or that of a score, whose function takes the options of layers, too.
    Attention within blocks takes the graph's nodes in three blocks."""

    function: str
    text: str
    options: dict = {}
    folded: bool | None = None
    at_edges: bool = False  # whether the sources' rows are those of the edges

    def tensors(self, graph, d=2, v=3, k=2, dtype=torch.float64, batch=True, h=H):
        generator = torch.Generator().manual_seed(0)
        sizes = dict(b=B, n=graph.num_src, m=graph.num_dst, e=graph.num_edges, h=h, d=d, v=v, k=k, o=1)
        sizes |= dict(D=h * d, V=h * v)
        if self.in_blocks:
            queries, keys = (ends_of_blocks(n).diff() for n in (graph.num_dst, graph.num_src))
            sizes["p"] = int((queries * keys).sum())
        found = {}
        for name, letters in (part.split(":") for part in self.text.split()):
            shape = [sizes[x] for x in letters if batch or x != "b"]
            x = torch.randn(shape, dtype=torch.float64, generator=generator)
            # Scores and projections of the size of 1.
            x = x / shape[-1] ** 0.5 if name == "att" or name.endswith("_weight") else x
            found[name] = x.to(graph.device, dtype)
        return found

    @property
    def has_batch(self):
        return {part.split(":")[0] for part in self.text.split() if ":b" in part}

    @property
    def in_blocks(self):
        return self.function == "block_attention"

    def __call__(self, graph, tensors, module=functional, **more):
        """All results, as a tuple."""
        given = dict(tensors)
        if "params" in given:
            given["params"] = (given["params"],)
        if self.at_edges:
            graph = graph.edges_as_sources()
        scores = self.function in attention.SCORES
        call = attention.function(self.function, module) if scores else getattr(module, self.function)
        where = (graph,)
        if self.in_blocks:
            where, device = (), given["query"].device
            given |= dict(offsets=ends_of_blocks(graph.num_dst, device))
            given |= dict(key_offsets=ends_of_blocks(graph.num_src, device))
        found = call(*where, **attention.packed({**given, **self.options, **more}))
        return tuple(x for x in found if x is not None) if isinstance(found, tuple) else (found,)

    def choose(self, monkeypatch):
        if self.folded is not None:
            monkeypatch.setattr(edge_projection, "_unfolds", self._unfolds)

    def _unfolds(self, inputs):
        terms = inputs.terms
        return not self.folded and not (terms.key_proj is None and terms.value_proj is None)


def ends_of_blocks(num_nodes, device="cpu"):
    """The offsets of three blocks, of which the second is the longest."""
    return torch.tensor([0, num_nodes // 4, num_nodes - num_nodes // 4, num_nodes], device=device)


def scores(q, k, e, w):
    """A score for flex_attention; its parameter w differs between heads."""
    score = (q * k * w).sum(-1)
    return score.tanh() if e is None else score.tanh() + e.sum(-1)


QKV, QKW = "query:bmhd key:bnhd value:bnhd", "query:bmhd key:bnhd value:bnhv"
WEIGHTS = dict(return_attention=True)
CASES = {
    "gat": Case("gat", "value:bnhd score_src:bnh score_dst:bmh"),
    "gat shared": Case("gat", "value:bnhd score_src:nh score_dst:mh edge_score:eh out_bias:hd"),
    "gat edges": Case(
        "gat",
        "value:bnhd score_src:bnh score_dst:bmh edge_score:beh gate:beh weight:e edge_value:behd "
        "out_bias:bhd",
        WEIGHTS,
    ),
    "gat without sources": Case(
        "gat", "value:bnhd score_dst:bmh weight:eh", {"score_src": None}
    ),
    "gat sink": Case("gat", "value:bnhd score_src:bnh score_dst:bmh sink:h"),
    "gat sink, attention": Case("gat", "value:bnhd score_src:bnh score_dst:bmh sink:h", WEIGHTS),
    "gatv2": Case("gatv2", "key:bnhd query:bmhd att:hd edge_key:ehd gate:e"),
    "gatv2 vectors": Case("gatv2", "key:bnhd query:bmhd att:bhd bias:eh", WEIGHTS),
    "gatv2 projected": Case(
        "gatv2", "key:bnhd query:bmhd att:hd edge_attr:ek edge_key_weight:Dk gate:e"
    ),
    "gat projected": Case(
        "gat", "value:bnhd score_src:bnh score_dst:bmh edge_attr:ek edge_score_weight:hk edge_score_bias:h"
    ),
    "gatv2 sink": Case("gatv2", "key:bnhd query:bmhd att:hd sink:h"),
    "dot": Case("dot_attention", QKV, {"scale": 0.7}),
    "dot sink": Case("dot_attention", f"{QKV} sink:h"),
    "dot sink, attention": Case("dot_attention", f"{QKV} sink:h", WEIGHTS),
    "dot edges": Case("dot_attention", "query:bmhd key:nhd value:bnhd edge_both:behd weight:beh"),
    "dot at edges": Case("dot_attention", "query:bmhd key:behd value:behv", at_edges=True),
    "terms of heads": Case("dot_attention", f"{QKW} edge_key:ehd edge_value:behv"),
    "terms shared": Case("dot_attention", f"{QKW} edge_key:ed edge_value:ev"),
    "terms of heads, shared": Case("dot_attention", f"{QKW} edge_key:behd edge_value:ev"),
    "terms shared, of heads": Case("dot_attention", f"{QKW} edge_key:ed edge_value:ehv"),
    "term in keys": Case("dot_attention", f"{QKW} edge_key:ehd"),
    "term shared in keys": Case("dot_attention", f"{QKW} edge_key:ed"),
    "terms in values": Case("dot_attention", f"{QKW} edge_value:ehv"),
    "terms shared in values": Case("dot_attention", f"{QKW} edge_value:ev"),
    "one term shared": Case("dot_attention", f"{QKV} edge_both:ed", WEIGHTS),
    "products": Case("edge_product_attention", f"{QKW} edge_attr:ehd", {"clamp": 3.0}),
    "products returned": Case(
        "edge_product_attention", f"{QKW} edge_attr:behd",
        {"clamp": 3.0, "return_edges": "products", **WEIGHTS},
    ),
    "products and scores": Case(
        "edge_product_attention", f"{QKW} edge_attr:ehd", {"clamp": 3.0, "return_edges": "scores"}
    ),
    "score": Case("score_attention", "score:beh value:bnhd"),
    "score at edges": Case("score_attention", "score:beh value:behd", WEIGHTS, at_edges=True),
    "agnn": Case("agnn_attention", "value:bnhd query:bmhd", {"beta": 0.5}),
    "agnn beta": Case("agnn_attention", "value:bnhd query:bmhd beta:o"),
    "flex": Case("flex_attention", f"{QKV} params:hd", {"score_fn": scores}),
    "flex edges": Case("flex_attention", f"{QKV} edge_attr:ehd params:hd", {"score_fn": scores}),
    "blocks": Case("block_attention", "query:mhd key:nhd value:nhv key_bias:n sink:h"),
    "blocks of pairs": Case(
        "block_attention", "query:mhd key:nhd value:nhv pair_bias:ph key_bias:nh", WEIGHTS
    ),
    "blocks, softcap": Case("block_attention", "query:mhd key:nhd value:nhv key_bias:nh", {"softcap": 2.0}),
    "softmax": Case("edge_softmax", "score:eh"),
    "softmax sink": Case("edge_softmax", "score:eh sink:h"),
    "sddmm": Case("sddmm", "query:bmhd key:bnhd"),
    "spmm": Case("spmm", "value:bnhd weight:beh"),
    "spmm shared": Case("spmm", "value:bnhd weight:e"),
}  # fmt: skip
PROJECTED = {
    "projections": f"{QKW} edge_attr:ek edge_key_weight:Dk edge_value_weight:Vk",
    "projections with biases": (
        f"{QKW} edge_attr:ek edge_key_weight:Dk edge_key_bias:D edge_value_weight:Vk edge_value_bias:V"
    ),
    "projection of keys": f"{QKW} edge_attr:ek edge_key_weight:Dk edge_key_bias:D",
    "term of heads, projection": f"{QKW} edge_key:ehd edge_attr:ek edge_value_weight:Vk",
    "projection of values": f"{QKW} edge_attr:ek edge_value_weight:Vk edge_value_bias:V",
    "one projection": f"{QKV} edge_attr:ek edge_both_weight:Dk edge_both_bias:D",
}
for _name, _text in PROJECTED.items():
    for _folded in (True, False):
        CASES[f"{_name}, {'folded' if _folded else 'unfolded'}"] = Case(
            "dot_attention", _text, folded=_folded
        )
