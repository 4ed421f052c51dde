"""Checks the arguments of the public functions, and raises their errors: the graph, or an object that one can
be made of, the tensors, and what edges add to keys, values and scores. Also changes tensors so that they fit
the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph import Graph, GraphPart
from ..graph import cache as graph_cache
from ..graph import constructors as _constructors
from ..graph.of_dgl import is_dgl, of_dgl
from ..runtime import library as _library
from ..runtime import ops as _ops
from ..runtime import torch_internals as internals
from ..runtime.arguments import FEAT_IN_KEY, FEAT_IN_VALUE, NO_EDGES, EdgeArgs, EdgeTerms, draw_seed
from ..runtime.attention_options import AttentionResult, EdgeTerm, Projected
from ..runtime.eager import in_autocast, transformed, without_autocast
from ..sparse.csr import no_tensor
from . import compiler_graph
from .compiler_graph import EdgeList, is_traced

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


_NO_NUMBERS = str, bytes, list, tuple, dict, set, type(None)


class Settings(NamedTuple):
    """The options of a call as the operators take them."""

    edge: EdgeArgs
    sink: Tensor | None
    schedule: str
    out_bias: Tensor | None


class FeatureChecker:
    """Raises errors that name the function, the argument, what was expected and what came. first: the name of
    the features with whose dtype and device the other tensors are compared."""

    def __init__(self, function: str, first: str, features):
        self.function = function
        if not isinstance(features, Tensor):
            raise TypeError(f"{function}: {first}: {no_tensor(first, features)}")
        if features.dtype not in DTYPES:
            what = f"expected float32, float64, float16 or bfloat16, got {features.dtype}"
            raise TypeError(f"{function}: {first}: {what}; convert it with {first}.float()")
        self.dtype = features.dtype
        self.acc = torch.float64 if features.dtype == torch.float64 else torch.float32
        self.device = features.device
        self.whose = f"(the {first}'s)"  # device, for errors

    def error(self, kind, argument: str, expected: str, got) -> Exception:
        return kind(f"{self.function}: {argument}: expected {expected}, got {got}")

    def tensor(self, name: str, x, shapes, dtypes=None) -> None:
        """Raises unless x is a dense tensor of one of these shapes and dtypes on the right device. None in a
        shape matches any size >= 1, or as the first one any."""
        if not isinstance(x, Tensor):
            raise TypeError(f"{self.function}: {name}: {no_tensor(name, x)}")
        dtypes = dtypes or (self.dtype,)
        if x.dtype not in dtypes:
            expected = " or ".join(str(d) for d in dict.fromkeys(dtypes))
            raise self.error(TypeError, name, expected, f"{x.dtype}; convert it with {name}.to({dtypes[0]})")
        if x.device != self.device:
            way = f"{x.device}; move it with {name}.to({str(self.device)!r})"
            raise self.error(ValueError, name, f"device {self.device} {self.whose}", way)
        if x.layout != torch.strided:
            raise self.error(
                TypeError, name, "a dense tensor", f"layout {x.layout}; {name}.to_dense() is one"
            )
        if x.shape not in shapes and not any(_fits(x.shape, shape) for shape in shapes):
            raise ValueError(f"{self.function}: {name}: {wrong_shape(name, x, shapes)}")

    def number(self, name: str, x) -> None:
        """Raises TypeError for what is no number; torch's operators would take a string for one."""
        if isinstance(x, _NO_NUMBERS):
            raise self.error(TypeError, name, "a number", f"{type(x).__name__}, {x!r:.80}")
        if isinstance(x, Tensor) and x.numel() != 1:
            raise self.error(TypeError, name, "a number", f"a tensor of shape {list(x.shape)}")


class Checker(FeatureChecker):
    """The checks of functions on a graph."""

    def __init__(self, function: str, graph, first: str, features):
        if not isinstance(graph, (Graph, EdgeList, GraphPart)):
            raise TypeError(
                f"{function}: graph: {no_graph(graph, 'a dfgnn.Graph, a DGLGraph or an edge_index')}"
            )
        super().__init__(function, first, features)
        #: The graph, or for features on the device meta what stands for it.
        self.graph = compiler_graph.on_meta(graph, features)
        self.device = self.graph.device
        # A Graph of values has another device than features on meta.
        self.whose = "(the graph's)" if self.graph is graph else f"like {first}"

    def settings(self, options: dict[str, Any], heads: int, dim: int, dropout_p: float = 0.0) -> Settings:
        """Checks the options that attention functions share (`runtime.attention_options`) and layers';
        [E] tensors become [E, 1], and with dropout there is a seed. dim: columns of a head of values."""
        given = {name: x for name, x in options.items() if x is not None}
        seed = self._seed(dropout_p, given.pop("generator", None))
        schedule = self.kernel_options(given.pop("kernel_options", None)).get("schedule", "auto")
        floats, num_edges = (self.dtype, self.acc), self.graph.num_edges
        per_edge, per_head = (num_edges,), (num_edges, heads)
        for name in ("bias", "gate", "mask", "weight"):
            if name in given:
                shapes = [per_head] if name == "bias" else [per_edge, per_head]
                self.tensor(name, given[name], shapes, (torch.bool,) if name == "mask" else floats)
        bias, gate, weight = (self.in_use(given.pop(name, None)) for name in ("bias", "gate", "weight"))
        mask, sink, out_bias = (given.pop(name, None) for name in ("mask", "sink", "out_bias"))
        if given:
            raise TypeError(f"{self.function} has no option {', '.join(given)}")
        if sink is not None:
            self.tensor("sink", sink, [(heads,)], floats)
            sink = _ops.as_type(sink, self.acc)
        if out_bias is not None:
            self.tensor("out_bias", out_bias, [(heads, dim)])
        if seed is bias is gate is mask is weight is None:
            return Settings(NO_EDGES, sink, schedule, out_bias)
        edge = EdgeArgs(bias, _column(gate), _column(mask), _column(weight), None, seed)
        return Settings(edge, sink, schedule, out_bias)

    def _seed(self, dropout_p: Any, generator: Any) -> Tensor | None:
        """The seed of dropout, int64 [1]; None without dropout."""
        self.number("dropout_p", dropout_p)
        if not 0 <= dropout_p <= 1:
            raise self.error(ValueError, "dropout_p", "a probability in [0, 1]", dropout_p)
        if isinstance(generator, torch.Generator):
            if generator.device.type != self.device.type:
                what = f"one on {self.device} {self.whose}"
                raise self.error(ValueError, "generator", what, f"one on {generator.device}")
        elif isinstance(generator, Tensor):
            self.tensor("generator", generator, [(1,)], (torch.int64,))
        elif generator is not None:
            what = "a torch.Generator or a tensor, the seed"
            raise self.error(TypeError, "generator", what, type(generator).__name__)
        return None if dropout_p == 0 else draw_seed(self.device, generator)

    def kernel_options(self, given: Any, known: tuple[str, ...] = ("schedule",)) -> dict[str, Any]:
        """The dict ``kernel_options``, or an empty one."""
        if given is None:
            return {}
        if not isinstance(given, dict):
            raise self.error(TypeError, "kernel_options", "a dict or None", type(given).__name__)
        unknown = [name for name in given if name not in known]
        if unknown:
            raise self.error(ValueError, "kernel_options", f"the keys {', '.join(known)}", unknown[0])
        if not isinstance(given.get("schedule", ""), str):
            what = type(given["schedule"]).__name__
            raise self.error(TypeError, 'kernel_options["schedule"]', "a string", what)
        return given

    def in_use(self, x: Any) -> Any:
        """The edge tensor x. In a graph of fixed capacity the rows of unused edges, which kernels neither
        read nor write, are set to 0, and so is their gradient."""
        if x is None or torch.compiler.is_compiling():  # operators on traced graphs set these rows to 0
            return x
        return compiler_graph.in_use(self.graph.edge_mask, x)

    def results(self, out: Tensor, attention: Any, size: int, return_attention: bool) -> Any:
        """What a public function returns: ``out`` cut to heads of ``size`` columns, without padding, and the
        attention if asked for, in the dtype of the features."""
        out = without_padding(out, size)
        if not return_attention:
            return out
        return AttentionResult(out, _ops.as_type(self.in_use(attention), self.dtype))


def no_graph(got: Any, expected: str) -> str:
    """What an error says if something else was passed for a graph, and what to do about it."""
    text = f"expected {expected}, got {type(got).__name__}"
    if isinstance(got, Tensor) and (got.is_floating_point() or got.is_complex()):
        if got.dim() == 2 and got.shape[0] == 2:
            return f"{text} of {got.dtype}; edge_index.long() has ids"
        return f"{text} of {got.dtype}; the graph comes before the features"
    if isinstance(got, (Tensor, tuple, list)):
        return f"{text}; dfgnn.Graph.from_edge_index(edge_index, num_nodes=...) makes one of [2, E] edges"
    if hasattr(got, "canonical_etypes"):
        return f"{text}; dfgnn.Graph.from_dgl(g) makes one, which is to be kept"
    return text


#: What arguments of the functions are, for errors of their shapes.
_MEANS = {
    "query": "a row [H, D] per destination",
    "key": "a row [H, D] per source, as of the query",
    "value": "a row [H, D] per source, with as many heads as the scores",
    **dict.fromkeys(("bias", "edge_bias"), "a number per edge and head"),
    "mask": "a truth value per edge, or per edge and head",
    "weight": "a number per edge, or per edge and head",
    "scale": "a number per edge, or per edge and head",
    "sink": "a number per head",
    "score": "a number per edge and head",
    "score_src": "a number per source and head",
    "score_dst": "a number per destination and head",
    "edge.score": "a number per edge and head",
    **dict.fromkeys(
        ("edge.key", "edge.value"),
        "a row [H, D] or [D] per edge; Projected(attr, weight) makes it of another size",
    ),
}


def wrong_shape(name: str, x: Tensor, shapes) -> str:
    """What an error says of a tensor that has none of the shapes. None in a shape matches any size >= 1."""
    text = " or ".join("[" + ", ".join("any" if n is None else str(n) for n in s) + "]" for s in shapes)
    text = f"expected shape {text}, got {list(x.shape)}"
    for at, rest in ((-1, x.shape[:-1]), (0, x.shape[1:])):
        if x.dim() and x.shape[at] == 1 and any(_fits(rest, shape) for shape in shapes):
            return f"{text}; {name}.squeeze({at}) has the shape"
    for shape in shapes:
        sizes = tuple(shape)[1:]
        per_row = x.dim() == 2 and len(sizes) == 2 and None not in sizes and shape[0] in (None, x.shape[0])
        if per_row and x.shape[1] == sizes[0] * sizes[1]:
            return f"{text}; {name}.unflatten(1, {sizes}) has the shape"
    return f"{text}; it has {_MEANS[name]}" if name in _MEANS else text


def _fits(shape, wanted) -> bool:
    if len(shape) != len(wanted):
        return False
    pairs = enumerate(zip(shape, wanted))
    return all(size == n if n is not None else size >= 1 or not k for k, (size, n) in pairs)


def _column(x: Tensor | None) -> Tensor | None:
    return x.unsqueeze(1) if x is not None and x.dim() == 1 else x


def for_device(check: Checker, *tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors as the device's kernels need them. CUDA kernels load 16 bytes at a time and take one head
    size: heads are padded with zero columns."""
    kind = check.device.type
    if kind in ("cpu", "meta"):
        return tensors
    if kind != "cuda":
        raise check.error(ValueError, "graph", "a graph on cpu or cuda", check.device)
    _library.require_cuda_library()
    step = 16 // check.dtype.itemsize
    sizes = {t.shape[-1] for t in tensors if t is not None}
    size = -(-max(sizes) // step) * step
    if sizes == {size}:
        return tensors
    return tuple(
        t if t is None or t.shape[-1] == size else torch.nn.functional.pad(t, (0, size - t.shape[-1]))
        for t in tensors
    )


def with_feat(edge: EdgeArgs, feat: Tensor | None) -> EdgeArgs:
    return edge if feat is edge.edge_feat else edge._replace(edge_feat=feat)


def without_padding(out: Tensor, size: int) -> Tensor:
    # An unpadded tensor is not sliced, because the backward of a slice copies the gradient.
    return out[..., :size] if out.shape[-1] > size else out


def refuse_transforms_of_shared_graphs(*tensors: Tensor | None) -> None:
    """Raises NotImplementedError where torch.func, forward mode or a compiler meets a graph that several
    processes share, whose rows they do not see."""
    in_transform = transformed(*tensors)
    if in_transform or torch.compiler.is_compiling():
        what = "torch.func and forward mode" if in_transform else "compilers"
        raise NotImplementedError(f"{what} do not know graphs that several processes share")


# ---- what functions take for a graph ----------------------------------------------------------------------


#: What public functions take for a graph: a Graph, DGLGraph, ``edge_index``, sparse tensor or GraphPart.
GraphLike: TypeAlias = Graph | GraphPart | Tensor | Any


def given_graph(function: str, given: Any, src: Any = None, dst: Any = None) -> Any:
    """The graph of a function's first argument: the argument itself if it is a Graph, GraphPart or EdgeList;
    the cached Graph of a DGLGraph or ``edge_index``; while a compiler records, an EdgeList. Anything else is
    returned unchanged, and `Checker` raises an error.

    The sizes of an ``edge_index`` are the numbers of rows of src and dst, tensors with a row per source and
    per destination. Without ``dst`` there are as many destinations as sources. Without both, the largest
    id + 1 is the number of nodes.
    """
    graph = given
    if isinstance(given, Tensor) or hasattr(given, "sparse_sizes"):
        if isinstance(given, Tensor) and _is_features(given):
            return given
        return _of_edges(function, given, _rows(src), _rows(dst))
    if not isinstance(given, (Graph, EdgeList, GraphPart)):
        graph = getattr(given, "dfgnn_graph", None)  # the Graph of a DGLGraph of dfgnn.compat
        if not isinstance(graph, Graph):
            if not is_dgl(given):
                return given
            if torch.compiler.is_dynamo_compiling():
                internals.graph_break(
                    f"{function}: graph: expected a dfgnn.Graph (Graph.from_dgl) or an edge_index, as "
                    "torch.compile cannot look into DGL's, got one"
                )
            graph = of_dgl(given)
    return graph


def _of_edges(function: str, edge_index: Any, num_src: int | None, num_dst: int | None) -> Any:
    if num_src is None or not (isinstance(edge_index, Tensor) and edge_index.layout == torch.strided):
        if is_traced(edge_index) and num_src is None:
            raise ValueError(
                f"{function}: graph: expected a Graph, which knows its sizes, where a compiler records and "
                "edge_index has no values that would tell, got an edge_index"
            )
        return Graph.cached(edge_index)  # a sparse tensor knows its sizes
    size = num_src, num_src if num_dst is None else num_dst
    if is_traced(edge_index):
        return EdgeList(edge_index, *size, where=function)
    told = (
        "the tensors have {}, one per node; Graph.cached(edge_index, num_src=..., num_dst=...) states others"
    )
    find = graph_cache.graph_of_uncompiled if torch.compiler.is_compiling() else graph_cache.graph_of
    return find(edge_index, *size, where=function, sizes=told)[0]


def _is_features(x: Tensor) -> bool:
    return x.layout == torch.strided and (x.is_floating_point() or x.is_complex())


def _rows(x: Any) -> int | None:
    """How many rows a tensor has, if it is one."""
    return x.shape[0] if isinstance(x, Tensor) and x.dim() else None


def _cached(edge_index: Any, num_src: int | None, num_dst: int | None) -> Any:
    """See `Graph.cached`; of an ``edge_index`` without values, what stands for the graph."""
    if num_src is not None and num_dst is not None and is_traced(edge_index):
        return EdgeList(edge_index, num_src, num_dst, where="Graph.cached")
    return graph_cache.cached(edge_index, num_src, num_dst)


_constructors.make_cached = _cached  # constructors.py cannot import this module


# ---- the argument ``edge``, what edges add to keys, values and scores -------------------------------------


#: The places of an `EdgeTerm`, and what a function that lacks one says about it.
_INSTEAD = {
    "key": "EdgeTerm(score=...) is added to the score of both ends",
    "value": "return_attention=True and spmm over graph.edges_as_sources() add it to the result",
    "score": "bias is added to the score",
}


class EdgeSorted(NamedTuple):
    """How the engine takes the edges' terms of keys and values: either as one tensor of features that the
    attention operators add, or as terms that `edge_projection` computes, or not at all."""

    feat: Tensor | None = None  # [E, H, D], the operators' edge_feat
    flags: int = 0  # the bits FEAT_IN_KEY, FEAT_IN_VALUE: what feat is added to
    terms: EdgeTerms | None = None  # the terms that `edge_projection` computes
    key_bias: Tensor | None = None  # [H, D], to be added to the nodes' keys
    value_bias: Tensor | None = None  # [H, D], to be added to the nodes' values


def given_terms(check: Checker, edge: Any, places: tuple[str, ...]) -> EdgeTerm:
    """The argument, whose other places are None."""
    if not isinstance(edge, EdgeTerm):
        what = " or ".join(f"EdgeTerm({name}=...)" for name in places)
        both = "; EdgeTerm(x, x) adds x to keys and values" if "key" in places and "value" in places else ""
        raise check.error(TypeError, "edge", what, f"{type(edge).__name__}{both}")
    for name, x in edge._asdict().items():
        if x is not None and name not in places:
            raise check.error(ValueError, f"edge.{name}", "None", f"{type(x).__name__}; {_INSTEAD[name]}")
    return _cast(edge, check.dtype)


def _cast(edge: EdgeTerm, dtype: Any) -> EdgeTerm:
    """The terms with projections as autocast would cast the linear layer whose parameters they hold."""
    done: dict[int, Any] = {}

    def cast(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != dtype:
            return done.setdefault(id(x), x.to(dtype))
        return x

    def term(x: Any) -> Any:
        if isinstance(x, Projected) and isinstance(x.attr, Tensor) and in_autocast(x.attr):
            return done.setdefault(id(x), Projected(*map(cast, x)))
        return x

    return EdgeTerm(*map(term, edge))


def check_term(check: Checker, name: str, x: Any, heads: int, size: int | None) -> None:
    """Raises unless x is a term of the edges for heads of this size; None: one number per head."""
    num_edges, where = check.graph.num_edges, f"edge.{name}"
    if isinstance(x, Projected):
        check.tensor(f"{where}.attr", x.attr, [(num_edges, None)])
        rows = heads if size is None else heads * size
        check.tensor(f"{where}.weight", x.weight, [(rows, x.attr.shape[1])])
        if x.bias is not None:
            check.tensor(f"{where}.bias", x.bias, [(rows,)])
    elif not isinstance(x, Tensor):
        raise check.error(TypeError, where, "a tensor or Projected(attr, weight, bias)", type(x).__name__)
    elif size is None:
        check.tensor(where, x, [(num_edges, heads)], (check.dtype, check.acc))
    else:
        check.tensor(where, x, [(num_edges, heads, size), (num_edges, size)])


def projected(check: Checker, x: Tensor | Projected, heads: int, size: int | None) -> Tensor:
    """A term that has been checked, as a tensor [E, H, D], or [E, H] of numbers."""
    if isinstance(x, Projected):
        # Kernels take rows of the features' dtype, which `_cast` has given the projection; autocast would
        # round the product. Unused edges are zeroed before and after the product: before, because their
        # attributes may be NaN; after, because kernels do not write their gradients.
        with without_autocast(x.attr):
            rows = check.in_use(F.linear(check.in_use(x.attr), x.weight, x.bias))
        return rows if size is None else rows.unflatten(1, (heads, size))
    rows = check.in_use(x)
    return rows if size is None or rows.dim() == 3 else rows.unsqueeze(1).expand(-1, heads, -1)


def sort_out(check: Checker, edge: EdgeTerm | None, heads: int, dim: int, value_dim: int) -> EdgeSorted:
    """Checks the terms of keys and values of dot attention and sorts them. dim, value_dim: sizes of a head of
    keys and of values."""
    if edge is None:
        return EdgeSorted()
    key, value, _ = given_terms(check, edge, ("key", "value"))
    for name, x, size in (("key", key, dim), ("value", value, value_dim)):
        if x is not None:
            check_term(check, name, x, heads, size)
    flags = (FEAT_IN_KEY if key is not None else 0) | (FEAT_IN_VALUE if value is not None else 0)
    if not flags:
        return EdgeSorted()
    one = value if key is None or key is value else key if value is None else None
    if isinstance(one, Tensor) and (one.dim() == 3 or heads == 1):
        return EdgeSorted(check.in_use(one if one.dim() == 3 else one.unsqueeze(1)), flags)
    # By identity, so that what key and value share is one tensor for the engine, too.
    feats: dict[Any, Tensor] = {}
    weights: dict[int, Tensor] = {}

    def of_engine(x: Tensor | Projected | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if x is None:
            return None, None, None
        feat, weight, bias = x if isinstance(x, Projected) else (x, None, None)
        which = id(feat), weight is None
        if which not in feats:
            one_head = weight is None and heads == 1 and feat.dim() == 2
            feats[which] = check.in_use(feat.unsqueeze(1) if one_head else feat)
        if weight is None:
            return feats[which], None, bias
        if id(weight) not in weights:
            weights[id(weight)] = weight.unflatten(0, (heads, -1))
        return feats[which], weights[id(weight)], bias

    key_feat, key_proj, key_bias = of_engine(key)
    value_feat, value_proj, value_bias = of_engine(value)
    # The bias of a projection is the same for all edges, so that it is added to the nodes' keys or values.
    biases = (None if b is None else b.unflatten(0, (heads, -1)) for b in (key_bias, value_bias))
    return EdgeSorted(None, 0, EdgeTerms(key_feat, key_proj, value_feat, value_proj), *biases)
