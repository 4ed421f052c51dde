"""Makes a layer's call one operator call: decides whether one operator (`engine.autograd`) can compute the
layer, and passes it the layer's tensors.

A layer describes itself by a `LayerSpec`, and names in ``FUSED_OPTIONS`` the options of its constructor that
the spec takes care of. `fused_layer` computes the layer if the spec describes it completely: if the
projections are plain linear modules without hooks, and the operators take such tensors. Everything else is
computed operation by operation, which supports every option.
"""

from __future__ import annotations

import inspect
import threading
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...engine import paths
from ...engine.argument_checks import DTYPES
from ...engine.autograd import Kind, Layer, run
from ...engine.paths import declined
from ...functional.dot import dot
from ...functional.gat import gat, gatv2
from ...graph import Graph
from ...runtime import ops as _ops
from ...runtime import torch_internals as internals
from ...runtime.arguments import (
    PLAN_LAYERS,
    SCORE_OF_NUMBER,
    SCORES,
    LayerNumbers,
    LayerTensors,
    draw_seed,
    needs_rows,
)
from ...runtime.attention_options import EdgeTerm
from ...runtime.eager import in_autocast, is_eager, runs_eagerly
from ...runtime.rules import recorded_gradients
from .._errors import check_numbers, check_parameters, check_sizes
from .._linear import all_hooked, plain_linear
from . import gated
from .spec import LayerSpec, spelled
from .traced import folds, traced_layer

# Reasons why a layer is not computed by one operator, as :func:`dfgnn.explain` prints them.
_CHANGED = "the attention, an option of the layer or a hook on all modules is not known to the fused layer"
_PROJECTION = (
    "a projection is no plain linear module, but one with hooks, a parametrization or a forward of its own"
)
_TENSORS = "features and parameters are not plain 2-d tensors of one dtype on the graph's device"
_AUTOCAST = "autocast is active, under which gates are computed operation by operation"
_EDGES = "the edges' attributes or their projection do not fit the fused layer"

#: Device type -> the bytes that kernels load at a time; a head is padded to a multiple of these.
_LOAD = {"cpu": 1, "cuda": 16}
#: Device type -> the most elements of each of several projections whose gradients are one product. The call
#: of a product costs a small graph on a GPU more than the product. Larger ones take longer than their calls,
#: and joining would cost a copy.
_MOST_JOINED = {"cpu": 0, "cuda": 2**22}
_PLAIN = (nn.Parameter, Tensor)
_learns = attrgetter("requires_grad")
_NONE = None, None
_NO_EDGES = None, None, None
_NO_VECTORS = None, None, None
#: Score -> the function that a layer calls if it is not fused. If the layer's attribute `attention` is
#: another function, the fused layer would not compute the same.
_FUNCTIONS = {
    "additive": gat,
    "additive_v2": gatv2,
    "dot": dot,
}


@cache
def knows_all_of(cls: type) -> bool:
    """Whether a class's ``FUSED_OPTIONS`` names all options of its constructor. A class without that name is
    not fused, nor one whose constructor has more options, as that of a newer library may have."""
    owner = next((c for c in cls.__mro__ if "FUSED_OPTIONS" in vars(c)), None)
    if owner is None:
        return False
    options = inspect.signature(owner.__init__).parameters.values()  # type: ignore[misc]
    named = {x.name for x in options if x.kind is not inspect.Parameter.VAR_KEYWORD}
    return named <= {"self", *vars(owner)["FUSED_OPTIONS"].split()}


def _known_to_compilers(cls: type) -> bool:
    return knows_all_of(cls)


_known_to_compilers._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see `_fused_or_upstream`


def is_first_rows(x_dst: Tensor, x: Tensor) -> bool:
    """Whether x_dst is x, or ``x[:num_dst]``, as samplers give a block's destinations. It must be so for
    autograd, too, so that the gradient of x includes that of x_dst."""
    return x_dst is x or (is_eager(x) and is_eager(x_dst) and has_first_rows(x_dst, x))


def has_first_rows(x_dst: Tensor, x: Tensor) -> bool:
    """`is_first_rows` of plain tensors."""
    if x_dst is x:
        return True
    if (
        x.layout is not torch.strided
        or x_dst.layout is not torch.strided
        or x_dst.data_ptr() != x.data_ptr()
        or (x_dst.dtype, x_dst.device, x_dst.dim()) != (x.dtype, x.device, x.dim())
        or (x_dst.stride(), x_dst.shape[1:]) != (x.stride(), x.shape[1:])
        or x_dst.shape[0] > x.shape[0]
    ):
        return False
    if not torch.is_grad_enabled() or not (x.requires_grad or x_dst.requires_grad):
        return True
    node = x_dst.grad_fn
    if node is None or node.name() != "SliceBackward0" or x_dst._backward_hooks or x_dst.retains_grad:
        return False
    return x.requires_grad and node.next_functions[0] == tuple(torch.autograd.graph.get_gradient_edge(x))[:2]


def can_fuse(graph: Any, x: Tensor, weight: Tensor, autocast: bool = False) -> bool:
    """Whether features and one of their weights are eager tensors of one dtype on the graph's device.
    autocast: x has been cast to autocast's dtype, and the weight will be."""
    return (
        is_eager(x)
        and type(graph) is Graph
        and x.dim() == 2
        and x.shape[1] == weight.shape[1]
        and (x.dtype is weight.dtype or autocast and weight.is_floating_point())
        and x.dtype in DTYPES
        and x.layout is torch.strided
        and x.device == graph._device == weight.device
        and (x.device.type == "cpu" or x.device.type == "cuda" and _ops.on_device(x))
    )


class _Kind(Kind):
    __slots__ = ()

    def formula(self, graph: Graph, *tensors: Tensor) -> Tensor:
        """The layer in plain operations."""
        return _formula(self.numbers, graph, self.named(tensors))

    def gradients(self, graph, handle, tensors, need, grad, out, kept):
        return recorded_gradients(partial(self.formula, graph), tensors, need, grad)


def _formula(n: Any, graph: Graph, t: Any) -> Tensor:
    """The layer in plain operations. n, t: `LayerNumbers` and `LayerTensors`."""
    score = SCORE_OF_NUMBER[n.score]
    x_dst = t.x if t.x_dst is None else t.x_dst
    features = {"value": t.x, "key": t.x, "query": x_dst, "skip": x_dst, "edge": t.edge_attr}

    def project(name):
        weight, bias, x = getattr(t, name + "_weight"), getattr(t, name + "_bias"), features[name]
        if weight is None:
            return None
        if name == "edge" and score == "additive":  # project to the scores' terms, [E, H]
            weight = (t.attn_edge.view(n.heads, 1, -1) @ weight.unflatten(0, (n.heads, -1))).squeeze(1)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def attend(*rows):
        by_edge = rows[3]
        rows = [None if x is None else x.unflatten(1, (n.heads, -1)) for x in rows[:3]]
        if by_edge is not None and score != "additive":
            by_edge = by_edge.unflatten(1, (n.heads, -1))
        out = _attention(graph, n, t, *rows, by_edge).flatten(1)
        return out if t.out_bias is None else out + t.out_bias

    return spelled(score, project, attend).to(n.dtype)


def _attention(graph: Graph, n: Any, t: Any, value, key, query, edges) -> Tensor:
    """The attention of rows [n, H, D] in plain operations, without the bias."""
    score = SCORE_OF_NUMBER[n.score]
    options: dict[str, Any] = {"dropout_p": n.dropout_p, "generator": t.seed}
    if score == "additive":
        query = value[: graph.num_dst] if query is None else query
        src, dst = (
            (rows * attn.view(value.shape[1:])).sum(-1)
            for rows, attn in ((value, t.attn), (query, t.attn_dst))
        )
        if edges is not None:
            options["edge"] = EdgeTerm(score=edges)
        return gat(graph, value, src, dst, negative_slope=n.negative_slope, **options)
    query = value[: graph.num_dst] if query is None else query
    if score == "additive_v2":
        attn = t.attn.view(value.shape[1:]).to(value.dtype)
        edge = None if edges is None else EdgeTerm(edges)
        return gatv2(graph, query, value, attn, negative_slope=n.negative_slope, edge=edge, **options)
    key = value if key is None else key
    edge = None if edges is None else EdgeTerm(edges, edges)
    return dot(graph, query, key, value, scale=n.scale, edge=edge, **options)


def _draws_seed(layer: Any, spec: LayerSpec, graph: Any, x: Tensor) -> bool:
    return (
        spec.dropout_p > 0 and type(graph) is Graph and layer.attention in _FUNCTIONS.values() and is_eager(x)
    )


def fused_layer(
    layer: Any,
    spec: LayerSpec,
    graph: Any,
    x: Tensor,
    x_dst: Tensor | None = None,
    with_attention: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """The result ``[num_dst, H * D]`` of a layer that ``spec`` describes, or None if it is to be computed
    operation by operation; and a seed of dropout.

    x_dst: None for x, or for its first rows if ``value`` also projects the query. with_attention: the caller
    wants the attention, too. It then computes that separately, operation by operation, so that the result
    does not depend on it. Both have to drop the same weights, for which the seed is returned; it is None if
    nothing is dropped, or if the caller's computation is the only one.
    """
    if internals.is_dynamo_recording() or internals.compiler._is_compiling_flag:
        function = _FUNCTIONS.get(spec.score)
        changed = getattr(layer, "attention", function) is not function or all_hooked()
        if with_attention or changed or not _known_to_compilers(type(layer)):
            return _NONE
        refuse_parameters(layer, spec)
        return traced_layer(spec, graph, x, x_dst), None
    seed = None
    if with_attention and _draws_seed(layer, spec, graph, x):
        seed = draw_seed(graph._device)
    check_numbers(layer, spec.negative_slope, spec.dropout_p)
    found = checked_tensors(layer, spec, graph, x, x_dst)
    if type(found) is str:
        refuse_parameters(layer, spec)
        return declined("layer", found), seed
    t, dtype = found
    if spec.dropout_p > 0:
        t = t._replace(seed=draw_seed(graph._device) if seed is None else seed)
    if paths.recorder is not None:
        paths.recorder.took("layer", type(layer).__name__)
    if spec.score == "gate":
        return gated.gated_layer(spec, graph, t), None
    _made.by = layer
    return computed(spec, graph, t, dtype), seed


_made = threading.local()  # `by`: the layer of this thread that was fused last; `call`: how


def made_by(layer: Any) -> Call | None:
    """The `Call` that computed this layer, if it was the last that was fused. It is told once."""
    by, call, _made.by, _made.call = getattr(_made, "by", None), getattr(_made, "call", None), None, None
    return call if by is layer else None


class Call:
    """What the operator computes of a layer, for all calls with arguments of the same kind: the layer's
    parameters, and the numbers of `LayerNumbers` that are not the graph's.

    t: checked `LayerTensors` of one such call. dtype: that of the result.
    """

    def __init__(self, spec: LayerSpec, t: Any, dtype: torch.dtype):
        kind = t.x.device.type
        size = t.value_weight.shape[0] // spec.heads
        padding = -size % max(_LOAD[kind] // t.x.dtype.itemsize, 1)
        self.drops, self.score = spec.dropout_p > 0, spec.score
        self.edge_dtype = None if t.edge_attr is None else t.edge_attr.dtype
        has_ids = (
            self.drops
            or t.edge_attr is not None
            or (spec.score == "dot" and needs_rows(spec.score, spec.negative_slope))
        )
        # What the planner and the operator get, but whether gradients are wanted.
        self.shape = spec.heads, size + padding, t.x.dtype, PLAN_LAYERS[spec.score], "auto", has_ids
        self.numbers = LayerNumbers(
            score=SCORES[spec.score],
            heads=spec.heads,
            padding=padding,
            most_joined=_MOST_JOINED[kind],
            negative_slope=spec.negative_slope,
            scale=spec.scale,
            dropout_p=spec.dropout_p,
            dtype=dtype,
            unwritten=False,
            train=False,
            need_dst=False,
        )
        at = LayerTensors._fields.index("edge_attr")
        linears, others = t[2:at], t[at + 1 : -1]  # all but x, x_dst, edge_attr, seed
        self.value_weight, self.given = t.value_weight, [x is not None for x in t]
        self.linears, self.others = (tuple([x for x in some if x is not None]) for some in (linears, others))
        # Whether the destinations' features are read, and whether they are projected like the sources'.
        self.two_ends, self.one_query = spec.query is not None or spec.skip is not None, spec.query is None
        self.parameters = *self.linears, *self.others
        # (whether x_dst is given, whether rows stay unwritten, whether to train) -> the kind of the call.
        self.kinds: dict[tuple[bool, bool, bool], Kind] = {}

    def run(
        self, graph: Graph, x: Tensor, x_dst: Tensor | None, edge_attr: Tensor | None, seed: Tensor | None
    ) -> Tensor:
        """The result [num_dst, H * D]."""
        tensors = (x, *self.linears) if x_dst is None else (x, x_dst, *self.linears)
        tensors = (*tensors, *self.others) if edge_attr is None else (*tensors, edge_attr, *self.others)
        train = torch.is_grad_enabled() and any(map(_learns, tensors))
        if seed is not None:
            tensors = *tensors, seed
        handle = graph._planner.handle(*self.shape, train)
        how = x_dst is not None, edge_attr is not None and graph.edge_mask is not None, train
        kind = self.kinds.get(how) or self._kind(*how)
        if train:
            return Layer.at_once(kind, graph, handle, *tensors)
        return run(kind, handle, tensors)[0]

    def _kind(self, two: bool, unwritten: bool, train: bool) -> Kind:
        given = [*self.given[:1], two, *self.given[2:-1], self.drops]
        numbers = self.numbers._replace(unwritten=unwritten, train=train)
        kind = self.kinds[two, unwritten, train] = _Kind(numbers, tuple(given))
        return kind


def computed(spec: LayerSpec, graph: Graph, t: Any, dtype: torch.dtype) -> Tensor:
    """The layer's result [num_dst, H * D] in this dtype, from `LayerTensors` that have been checked."""
    call = _made.call = Call(spec, t, dtype)
    return call.run(graph, t.x, t.x_dst, t.edge_attr, t.seed)


def refuse_parameters(layer: Any, spec: LayerSpec) -> None:
    """Raises an error that names it if a parameter of the layer has another shape than the layer's own."""
    check_sizes(layer)
    size = layer.out_channels if hasattr(layer, "out_channels") else getattr(layer, "out_feats", None)
    if isinstance(size, int):
        linears = spec.value, spec.key, spec.query, None if spec.edges is None else spec.edges[1]
        check_parameters(layer, spec.heads, size, spec.vectors, linears)


def checked_tensors(layer: Any, spec: LayerSpec, graph: Any, x: Tensor, x_dst: Tensor | None) -> Any:
    """The layer's tensors without a seed, in the dtype of the computation, and the dtype of the result; or
    the reason, in words, why the layer is not fused. No compiler is recording."""
    score, _, value, key, query, skip, of_edges, vectors, bias, *_, wide, _ = spec
    function = _FUNCTIONS.get(score)
    cls: type = type(layer)
    if getattr(layer, "attention", function) is not function or not knows_all_of(cls) or all_hooked():
        return _CHANGED
    additive, parameters = score == "additive", []
    for linear in (value, key, query, skip):
        found: Any = _NONE if linear is None else plain_linear(linear)
        if found is None:
            return _PROJECTION
        parameters += found
    weight, of_value, of_keys, _, of_queries, query_bias, of_skip, _ = parameters
    if additive and (of_value is not None or query_bias is not None):
        return _PROJECTION
    if type(graph) is not Graph or not runs_eagerly(x) or x.dim() != 2 or x.layout is not torch.strided:
        return _TENSORS
    dtype, autocast = x.dtype, False
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # not `in_autocast`, a frame
        if score == "gate":
            return _AUTOCAST
        attr = None if of_edges is None or additive else of_edges[0]
        x, x_dst, autocast, dtype = cast_by_autocast(graph, x, x_dst, weight, attr)
    own, device, (width, features) = x.dtype, graph._device, weight.shape
    dtypes = (own, torch.float32) if autocast or additive else (own,)
    at_dst = features if x_dst is None else x_dst.shape[-1]
    if (
        own not in DTYPES
        or x.device != device
        or x.shape[1] != features
        or not (weight.dtype is own or autocast)  # the vectors of an additive layer alone may be wider
        or not (x.is_cpu or _ops.on_device(x))
        or (of_keys is not None and of_keys.shape != weight.shape)
        or (of_queries is not None and of_queries.shape != (width, at_dst))
        or (of_skip is not None and of_skip.shape != (width, at_dst))
        or (x_dst is not None and not _fits_destinations(graph, x_dst, of_queries, of_skip, autocast))
        # The destinations' term is a product of matrices of one dtype.
        or (additive and of_queries is not None and not of_queries.dtype is vectors[1].dtype is own)
        or not _are_sized(width, spec.heads, vectors, bias)
    ):
        return _TENSORS
    if not _are_plain(x, (*parameters, *vectors, bias), dtypes):
        return _TENSORS
    edges: Any = _NO_EDGES
    if of_edges is not None:
        edges = (_scored_edges if additive else _projected_edges)(spec, graph, x, dtypes)
        if edges is None:
            return _EDGES
    attn = (*vectors, *_NO_VECTORS)[:3]
    tensors = LayerTensors(x, x_dst, *parameters, *edges, *attn, bias)
    if wide is not None:
        wide = wide.dtype if isinstance(wide, Tensor) else wide
        dtype = dtype if wide is dtype else torch.promote_types(dtype, wide)
    if score == "gate":
        reason = gated.why_not(graph, tensors)
        if reason is not None:
            return reason
    return tensors, dtype


def _fits_destinations(graph: Any, x_dst: Tensor, of_queries: Any, of_skip: Any, autocast: bool) -> bool:
    weight = of_skip if of_queries is None else of_queries
    return weight is None or can_fuse(graph, x_dst, weight, autocast)


def _are_sized(width: int, heads: int, vectors: tuple[Tensor, ...], bias: Tensor | None) -> bool:
    """Whether there are heads, and attention vectors and bias have the shapes of these heads."""
    if not 0 < heads <= width or bias is not None and bias.shape != (width,):
        return False
    shape = 1, heads, width // heads
    return all(vector.shape == shape for vector in vectors)


def _are_plain(x: Tensor, tensors: tuple[Tensor | None, ...], dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether these parameters are ordinary tensors of one of the types, on the device of x."""
    return all(
        t is None or (type(t) in _PLAIN and t.dtype in dtypes and t.device == x.device) for t in tensors
    )


# ---- in which dtype a fused layer computes under autocast -------------------------------------------------

# Under autocast a small layer of float32 features is computed in float32, because each cast is a launch,
# whose time counts there. A layer is small if a projection has at most the first number of multiplications,
# and at most the second number of elements are gathered along edges.
_MOST_PRODUCTS, _MOST_GATHERED = 2**30, 2**24


def _is_small(graph: Any, x: Tensor, weight: Tensor, attr: Tensor | None) -> bool:
    width = weight.shape[0]
    return (
        x.shape[0] * weight.numel() <= _MOST_PRODUCTS
        and graph.num_edges * width <= _MOST_GATHERED
        and (attr is None or attr.numel() * width <= _MOST_PRODUCTS)
    )


def cast_by_autocast(
    graph: Any, x: Tensor, x_dst: Tensor | None, weight: Tensor, attr: Tensor | None = None
) -> tuple[Tensor, Tensor | None, bool, torch.dtype]:
    """(x, x_dst, whether their dtype is autocast's, the dtype that a linear layer would return): x and x_dst
    are in the dtype of the layer's computation under autocast. attr: attributes of edges that are projected,
    too."""
    if x.dtype == torch.float64:
        return x, x_dst, False, x.dtype
    dtype = torch.get_autocast_dtype(x.device.type)
    all_wide = x.dtype is weight.dtype is torch.float32 and (x_dst is None or x_dst.dtype is torch.float32)
    if all_wide and _is_small(graph, x, weight, attr):
        return x, x_dst, False, dtype
    if x_dst is not None and x_dst.dtype is not dtype:
        x_dst = x_dst.to(dtype)
    return x if x.dtype is dtype else x.to(dtype), x_dst, True, dtype


# ---- attributes of edges: each function returns them, and the weight and bias of their projection ----------

CAST_BY_AUTOCAST = torch.float32, torch.float16, torch.bfloat16
_Edges = tuple[Tensor, Tensor, Tensor | None]


def _scored_edges(spec: LayerSpec, graph: Graph, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> _Edges | None:
    """The attributes of an additive layer's edges, of which its scores have a term."""
    attr, linear = spec.edges  # type: ignore[misc]
    plain, attn = plain_linear(linear), spec.vectors[2]
    if plain is None or plain[1] is not None or not is_eager(attr) or attr.dim() != 2:
        return None
    weight = plain[0]
    if attr.shape[1] != weight.shape[1] or not _are_plain(x, (weight,), dtypes):
        return None
    if in_autocast(x) and attr.is_floating_point():
        attr = attr.to(weight.dtype)
    if not attr.dtype == weight.dtype == attn.dtype or attr.device != x.device:
        return None
    return attr, weight, None


def _projected_edges(
    spec: LayerSpec, graph: Graph, x: Tensor, dtypes: tuple[torch.dtype, ...]
) -> _Edges | None:
    """The attributes whose projections a layer adds to keys, and with dot products to values."""
    attr, linear = spec.edges  # type: ignore[misc]
    plain = plain_linear(linear)
    if plain is None or not is_eager(attr):
        return None
    weight, bias = plain
    is_cast = attr.dtype in CAST_BY_AUTOCAST and in_autocast(x)
    if is_cast and attr.dtype is not x.dtype:
        attr = attr.to(x.dtype)
    if not (
        attr.dtype is x.dtype
        and len(attr) == graph.num_edges
        and can_fuse(graph, attr, weight, len(dtypes) > 1)
        and _are_plain(x, (weight, bias), dtypes)
        and not folds(attr, spec.heads, len(weight), spec.score)
    ):
        return None
    return attr, weight, bias
