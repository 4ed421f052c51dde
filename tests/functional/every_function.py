"""The calls of test_every_function.py: every function with every kind of tensor that it takes, as text whose
letters `Case` explains."""

from typing import NamedTuple

import torch

from dfgnn import functional
from dfgnn.engine import edge_projection  # patched, so that a case is folded or not whatever its sizes

B, H = 3, 2


class Case(NamedTuple):
    """A function, and its tensors as name:dimensions, which are letters: b (sets of features), n (sources),
    m (destinations), e (edges), h (heads), d (elements of a head), v (of a head of values), k (attributes),
    t (types), o (one), D and V (of all heads)."""

    function: str
    text: str
    options: dict = {}
    folded: bool | None = None

    def tensors(self, graph, d=2, v=3, k=2, dtype=torch.float64, batch=True):
        generator = torch.Generator().manual_seed(0)
        sizes = dict(b=B, n=graph.num_src, m=graph.num_dst, e=graph.num_edges, h=H, d=d, v=v, k=k, o=1)
        sizes |= dict(D=H * d, V=H * v)
        found = {}
        for name, letters in (part.split(":") for part in self.text.split()):
            shape = [sizes[x] for x in letters if batch or x != "b"]
            found[name] = torch.randn(shape, dtype=dtype, generator=generator).to(graph.device)
        return found

    @property
    def has_batch(self):
        return {part.split(":")[0] for part in self.text.split() if ":b" in part}

    def __call__(self, graph, tensors, module=functional, **more):
        """All results, as a tuple."""
        given = dict(tensors)
        if "params" in given:
            given["params"] = (given["params"],)
        found = getattr(module, self.function)(graph, **given, **self.options, **more)
        return found if isinstance(found, tuple) else (found,)

    def choose(self, monkeypatch):
        if self.folded is not None:
            monkeypatch.setattr(edge_projection, "_unfolds", self._unfolds)

    def _unfolds(self, inputs):
        terms = inputs.terms
        return not self.folded and not (terms.key_proj is None and terms.value_proj is None)


def scores(q, k, e, w):
    """A score for flex_attention; its parameter w differs between heads."""
    score = (q * k * w).sum(-1)
    return score.tanh() if e is None else score.tanh() + e.sum(-1)


QKV, QKW = "query:bmhd key:bnhd value:bnhd", "query:bmhd key:bnhd value:bnhv"
WEIGHTS = dict(return_attention=True)
CASES = {
    "gat": Case("gat_attention", "feat:bnhd score_src:bnh score_dst:bmh"),
    "gat shared": Case("gat_attention", "feat:bnhd score_src:nh score_dst:mh edge_bias:eh out_bias:hd"),
    "gat edges": Case(
        "gat_attention",
        "feat:bnhd score_src:bnh score_dst:bmh edge_bias:beh gate:beh weight:e edge_feat:behd "
        "out_bias:bhd",
        WEIGHTS,
    ),
    "gat without sources": Case(
        "gat_attention", "feat:bnhd score_dst:bmh weight:eh", {"score_src": None}
    ),
    "gat sink": Case("gat_attention", "feat:bnhd score_src:bnh score_dst:bmh sink:h"),
    "gat sink, attention": Case("gat_attention", "feat:bnhd score_src:bnh score_dst:bmh sink:h", WEIGHTS),
    "gatv2": Case("gatv2_attention", "x_src:bnhd x_dst:bmhd attn:hd edge_feat:ehd gate:e"),
    "gatv2 vectors": Case("gatv2_attention", "x_src:bnhd x_dst:bmhd attn:bhd edge_bias:eh", WEIGHTS),
    "gatv2 projected": Case(
        "gatv2_attention", "x_src:bnhd x_dst:bmhd attn:hd edge_attr:ek edge_proj:Dk gate:e"
    ),
    "gatv2 sink": Case("gatv2_attention", "x_src:bnhd x_dst:bmhd attn:hd sink:h"),
    "dot": Case("dot_attention", QKV, {"scale": 0.7}),
    "dot sink": Case("dot_attention", f"{QKV} sink:h"),
    "dot sink, attention": Case("dot_attention", f"{QKV} sink:h", WEIGHTS),
    "dot edges": Case("dot_attention", "query:bmhd key:nhd value:bnhd edge_feat:behd weight:beh"),
    "dot at edges": Case("dot_attention", "query:bmhd key:behd value:behv", {"key_at": "edges"}),
    "terms of heads": Case("dot_attention", f"{QKW} edge_feat:ehd edge_feat_value:behv"),
    "terms shared": Case("dot_attention", f"{QKW} edge_feat:ed edge_feat_value:ev"),
    "terms of heads, shared": Case("dot_attention", f"{QKW} edge_feat:behd edge_feat_value:ev"),
    "terms shared, of heads": Case("dot_attention", f"{QKW} edge_feat:ed edge_feat_value:ehv"),
    "terms in values": Case("dot_attention", f"{QKW} edge_feat_value:ehv"),
    "terms shared in values": Case("dot_attention", f"{QKW} edge_feat_value:ev"),
    "one term shared": Case("dot_attention", f"{QKV} edge_feat:ed"),
    "products": Case("edge_product_attention", f"{QKW} edge_feat:ehd", {"clamp": 3.0}),
    "products returned": Case(
        "edge_product_attention", f"{QKW} edge_feat:behd",
        {"clamp": 3.0, "return_edges": "products", **WEIGHTS},
    ),
    "products and scores": Case(
        "edge_product_attention", f"{QKW} edge_feat:ehd", {"clamp": 3.0, "return_edges": "scores"}
    ),
    "score": Case("score_attention", "score:beh value:bnhd", {"value_at": "nodes"}),
    "score at edges": Case("score_attention", "score:beh value:behd", {"value_at": "edges", **WEIGHTS}),
    "agnn": Case("agnn_attention", "x_src:bnhd x_dst:bmhd", {"beta": 0.5}),
    "agnn beta": Case("agnn_attention", "x_src:bnhd x_dst:bmhd beta:o"),
    "flex": Case("flex_attention", f"{QKV} params:hd", {"score_fn": scores}),
    "flex edges": Case("flex_attention", f"{QKV} edge_feat:ehd params:hd", {"score_fn": scores}),
    "softmax": Case("edge_softmax", "score:eh"),
    "sddmm": Case("sddmm", "query:bmhd key:bnhd"),
    "spmm": Case("spmm", "feat:bnhd weight:beh"),
    "spmm shared": Case("spmm", "feat:bnhd weight:e"),
}  # fmt: skip
PROJECTED = {
    "projections": f"{QKW} edge_attr:ek edge_proj:Dk edge_proj_value:Vk",
    "projections with biases": (
        f"{QKW} edge_attr:ek edge_proj:Dk edge_proj_bias:D edge_proj_value:Vk edge_proj_bias_value:V"
    ),
    "projection of values": f"{QKW} edge_attr:ek edge_proj_value:Vk edge_proj_bias_value:V",
    "one projection": f"{QKV} edge_attr:ek edge_proj:Dk edge_proj_bias:D",
}
for _name, _text in PROJECTED.items():
    for _folded in (True, False):
        CASES[f"{_name}, {'folded' if _folded else 'unfolded'}"] = Case(
            "dot_attention", _text, folded=_folded
        )
