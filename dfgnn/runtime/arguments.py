"""The operators' arguments by name, in the order of their schemas (csrc/torch/schemas.h)."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import library as _library  # importing it loads the operators

ops = torch.ops.dfgnn


class GraphArgs(NamedTuple):
    """The arguments by which the attention operators get a graph: its CSRs and plans.

    items, splits and tiles are those of a `plan.plans.Plan`, and plan is its ``launch``. Names with rev_ are
    those of the CSR by source, which only backward needs.
    """

    indices: torch.Tensor
    eids: torch.Tensor | None
    items: torch.Tensor
    splits: torch.Tensor
    plan: list[int]
    rev_indices: torch.Tensor | None
    rev_eids: torch.Tensor | None
    rev_items: torch.Tensor | None
    rev_splits: torch.Tensor | None
    rev_plan: list[int]
    tiles: torch.Tensor | None
    rev_tiles: torch.Tensor | None


# Device type -> the function that lets the library free a graph.
_droppers: dict[str, Callable[[int], None]] = {}


class GraphHandle:
    """GraphArgs that the library has checked and stores under a number until this object is collected.

    number: the number, if the library has stored the arguments already; None: this stores them.
    """

    __slots__ = ("_drop", "args", "number")

    def __init__(self, args: GraphArgs, number: int | None = None):
        kind = args.indices.device.type
        if kind not in _droppers:
            _droppers[kind] = _library.graph_dropper(kind)
        self._drop, self.args = _droppers[kind], args
        self.number: int = ops.graph_handle(*args) if number is None else number

    def __del__(self):
        if hasattr(self, "number"):
            self._drop(self.number)


class EdgeArgs(NamedTuple):
    """The options on edges: each one None, or a tensor in the user's edge order. E edges, H heads of D
    elements."""

    edge_bias: torch.Tensor | None  # [E, H]
    edge_gate: torch.Tensor | None  # [E, 1 or H]
    edge_mask: torch.Tensor | None  # bool [E, 1 or H]
    edge_weight: torch.Tensor | None  # [E, 1 or H]
    edge_feat: torch.Tensor | None  # [E, H, D]
    seed: torch.Tensor | None  # int64 [1], the seed of dropout


NO_EDGES = EdgeArgs(None, None, None, None, None, None)


class Tensors(NamedTuple):
    """All tensors of an attention call except the graph's; the options on edges are those of EdgeArgs."""

    value: torch.Tensor
    src: torch.Tensor | None
    dst: torch.Tensor | None
    attn: torch.Tensor | None
    edge_bias: torch.Tensor | None
    edge_gate: torch.Tensor | None
    edge_mask: torch.Tensor | None
    edge_weight: torch.Tensor | None
    edge_feat: torch.Tensor | None
    seed: torch.Tensor | None
    out_bias: torch.Tensor | None


class Numbers(NamedTuple):
    """The arguments of attention that are numbers; flags: the bits that are named below."""

    negative_slope: float
    scale: float
    dropout_p: float
    flags: int


class EdgeTerms(NamedTuple):
    """What edges add to key and value: features [E, d] or [E, H, D], or None for no term, and their
    projections [H, D, d] or None. If key and value have the same tensor, it is one term."""

    key: torch.Tensor | None
    key_proj: torch.Tensor | None
    value: torch.Tensor | None
    value_proj: torch.Tensor | None


class AttentionInputs(NamedTuple):
    """One attention call whose arguments have been checked."""

    graph: Any  # a Graph, or what stands for one: RangedGraph, GraphPart, EdgeList
    score: str  # a name in `SCORES`
    tensors: Tensors
    numbers: Numbers
    return_attention: bool = False
    schedule: str = "auto"
    sink: torch.Tensor | None = None  # [H], in the accumulation type
    terms: EdgeTerms | None = None  # of dot attention; `edge_projection` computes them, the paths do not


def _named(name: str, op) -> Any:
    return namedtuple(name, [argument.name for argument in op._schema.arguments])


def _results(name: str, op) -> Any:
    return namedtuple(name, [result.name for result in op._schema.returns])


Forward = _named("Forward", ops.attention_forward.default)
ForwardResults = _results("ForwardResults", ops.attention_forward.default)
Backward = _named("Backward", ops.attention_backward.default)
BackwardResults = _results("BackwardResults", ops.attention_backward.default)


def _of_layers(name: str, of_tensors: bool) -> Any:
    names = [argument.name for argument in ops.layer_call.default._schema.arguments]
    names = [x for x in names if (names.index(x) >= names.index("x")) is of_tensors]
    return namedtuple(name, names, defaults=(None,) * (len(names) - 1))


#: The arguments of the operators of whole layers, as csrc/torch/layer_call.h declares them: what is not a
#: tensor, and the tensors.
LayerNumbers = _of_layers("LayerNumbers", False)
LayerTensors = _of_layers("LayerTensors", True)


class Score(NamedTuple):
    """What Python knows of a score besides the functions that users call."""

    number: int  # its value in csrc/core/params.h
    layer: str  # the name of its passes in plans (`plan.plans.Shape.layer`)
    reference: str  # the function of `dfgnn.reference` that computes it
    inputs: tuple[str, ...]  # the first arguments of that function, as they are called in `Tensors`
    scaled: bool = False  # whether that function has a scale


#: The only table of scores (docs/adding_a_score.md).
SCORE_TABLE = {
    "additive": Score(0, "gat", "gat_attention", ("value", "src", "dst")),
    "additive_v2": Score(2, "gatv2", "gatv2_attention", ("dst", "value", "attn")),
    "dot": Score(1, "dot", "dot_attention", ("dst", "src", "value"), scaled=True),
}
#: Name -> the operators' argument `score`; name -> the layer in plans; and the inverses.
SCORES = {name: score.number for name, score in SCORE_TABLE.items()}
PLAN_LAYERS = {name: score.layer for name, score in SCORE_TABLE.items()}
SCORE_OF_NUMBER = {score.number: name for name, score in SCORE_TABLE.items()}
SCORE_OF_LAYER = {score.layer: name for name, score in SCORE_TABLE.items()}


def draw_seed(device: torch.device, generator: torch.Generator | torch.Tensor | None = None) -> torch.Tensor:
    """The argument `seed` of operators with dropout, int64 [1]: drawn on the device, so that nothing waits
    for it, and a replayed CUDA graph draws anew; or ``generator``, where that is such a tensor."""
    if isinstance(generator, torch.Tensor):
        return generator
    return torch.randint(0, 2**62, (1,), device=device, generator=generator)


def needs_rows(score: str, negative_slope: float) -> bool:
    """Whether kernels on rows have this score, but those on tiles do not: a LeakyReLU of dot products."""
    return score == "dot" and negative_slope != 1


# Bits of the operators' arguments `flags` and `need` (csrc/torch/attention.h). BIAS_AFTER: edge_bias is added
# after leaky_relu. FEAT_IN_KEY, FEAT_IN_VALUE: edge_feat is added to keys, to values. PART_OF_ROWS: the graph
# has only some of the edges of its rows. IDS_ELSEWHERE: its edge ids are not positions in edge tensors.
# NEED_...: the gradient of dst, edge_bias, edge_gate, edge_weight or edge_feat is needed.
BIAS_AFTER, FEAT_IN_KEY, FEAT_IN_VALUE, PART_OF_ROWS, IDS_ELSEWHERE = 1, 2, 4, 8, 16
NEED_DST, NEED_BIAS, NEED_GATE, NEED_WEIGHT, NEED_FEAT = 1, 2, 4, 8, 16
