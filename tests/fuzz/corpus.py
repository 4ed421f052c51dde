"""What the property-based tests draw: graphs, inputs with their memory layouts, options, and ways to call.

Hypothesis draws small descriptions, which a failure prints and shrinks; tensors follow from them and a seed.
"""

import copy
import math
import pickle
from dataclasses import dataclass, field

import torch
from attention import EDGES, SCORES, TERMS, function, packed
from hypothesis import strategies as st

from dfgnn import Graph, functional

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DIMS = (1, 7, 33, 300, 4, 16, 64)
HEADS = (1, 3, 8)
FUNCTIONS = (
    *("gat_attention", "gatv2_attention", "dot_attention", "agnn_attention", "flex_attention"),
    *("edge_softmax", "sddmm", "spmm"),
)


def generator(seed):
    return torch.Generator().manual_seed(seed)


# ---- graphs --------------------------------------------------------------------------------------


def _power_law(n, seed):
    """Few nodes have most of the edges, in both directions."""
    return (torch.rand(2, 12 * n, generator=generator(seed)) ** 4 * n).long()


def _super_row(n, seed):
    """More edges into one destination than any work item has."""
    src = torch.randint(n, (4500,), generator=generator(seed))
    dst = torch.where(torch.arange(4500) % 50 == 0, torch.arange(4500) % n, n // 2)
    return torch.stack([src, dst])


def _isolated(n, seed):
    """Two nodes in three have no edge, the last ones too."""
    return torch.randint(max(n // 3, 1), (2, 3 * n), generator=generator(seed)) * 3 % n


def _duplicates(n, seed):
    return torch.randint(n, (2, n), generator=generator(seed)).repeat(1, 5)


# Kind of graph -> a function (n, seed) that makes edges [2, E] of a square graph with n nodes.
SQUARE = {
    "random": lambda n, seed: torch.randint(n, (2, 6 * n), generator=generator(seed)),
    "no_edges": lambda n, seed: torch.zeros(2, 0, dtype=torch.int64),
    "self_loops": lambda n, seed: torch.arange(n).repeat(2, 1),
    "isolated": _isolated,
    "duplicates": _duplicates,
    "complete": lambda n, seed: torch.cartesian_prod(torch.arange(n), torch.arange(n)).T,
    "path": lambda n, seed: torch.stack([torch.arange(n - 1), torch.arange(1, n)]),
    "star": lambda n, seed: torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.int64)]),
    "power_law": _power_law,
    "super_row": _super_row,
    "super_source": lambda n, seed: _super_row(n, seed).flip(0),
}
#: The functions whose calls have the options of layers, too.
LAYERS = tuple(f"{score}_attention" for score in SCORES)
CONSTRUCTORS = ("coo", "edge_index", "csr", "csr_eids", "by_source")
# What is done with a graph before it is used; none of it changes the edges or their order.
PATHS = (
    *("as it is", "one_shot", "pickle", "deepcopy", "reverse twice", "batch", "used before"),
    *("used in inference mode", "no validation", "strided edges"),
)


@dataclass(frozen=True)
class GraphSpec:
    kind: str
    num_src: int
    num_dst: int
    edges: tuple = ()  # (source, destination) pairs, if kind is "listed"
    seed: int = 0
    constructor: str = "coo"
    path: str = "as it is"
    index_dtype: torch.dtype = torch.int64

    def ends(self):
        """int64 [2, E]."""
        if self.kind == "listed":
            return torch.tensor(self.edges, dtype=torch.int64).reshape(-1, 2).T.contiguous()
        if self.kind == "bipartite":
            rand = generator(self.seed)
            num_edges = 4 * max(self.num_src, self.num_dst)
            ends = [torch.randint(n, (num_edges,), generator=rand) for n in (self.num_src, self.num_dst)]
            return torch.stack(ends)
        ends = SQUARE[self.kind](self.num_src, self.seed)
        # Every third seed keeps the order in which the kind makes its edges; for some kinds they are sorted.
        if self.seed % 3:
            ends = ends[:, torch.randperm(ends.shape[1], generator=generator(self.seed))]
        return ends

    def build(self, device="cpu"):
        return self.prepared(self.constructed(self.ends().to(device, self.index_dtype)))

    def constructed(self, ends):
        sizes = dict(num_src=self.num_src, num_dst=self.num_dst, validate=self.path != "no validation")
        if self.path == "strided edges":
            ends = ends.repeat_interleave(2, dim=1)[:, ::2]
        if self.constructor == "edge_index":
            return Graph.from_edge_index(ends, **sizes)
        if self.constructor == "coo":
            return Graph.from_coo(*ends, **sizes)
        if self.constructor == "by_source":  # the CSR that is there first is the one over sources
            return Graph.from_coo(*ends.flip(0), num_src=self.num_dst, num_dst=self.num_src).reverse()
        order = ends[1].argsort(stable=True)
        counts = torch.bincount(ends[1], minlength=self.num_dst)
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(self.index_dtype)
        eids = order.to(self.index_dtype) if self.constructor == "csr_eids" else None
        validate = sizes["validate"]
        return Graph.from_csr(indptr, ends[0][order], self.num_src, eids=eids, validate=validate)

    def prepared(self, graph):
        if self.path == "one_shot":
            return graph.one_shot()
        if self.path == "pickle":
            graph.reverse_csr()
            return pickle.loads(pickle.dumps(graph))
        if self.path == "deepcopy":
            return copy.deepcopy(graph)
        if self.path == "reverse twice":
            return graph.reverse().reverse()
        if self.path == "batch":  # with a graph of no edges behind it, so that the ids stay
            return Graph.batch([graph, Graph.from_csr(graph.csr().indptr[:1], graph.csr().indices[:0])])
        if self.path in ("used before", "used in inference mode"):
            with torch.inference_mode(self.path == "used in inference mode"):
                feat = torch.ones(graph.num_src, 1, 4, device=graph.device)
                functional.dot_attention(
                    graph, feat.new_ones(graph.num_dst, 1, 4), feat, feat, return_attention=True
                )
        return graph


@st.composite
def graphs(draw, most_nodes=24):
    """Half of them are lists of edges that shrink, half are hard ones by name."""
    how = dict(
        constructor=draw(st.sampled_from(CONSTRUCTORS)),
        path=draw(st.sampled_from(PATHS)),
        index_dtype=draw(st.sampled_from((torch.int64, torch.int32))),
    )
    if draw(st.booleans()):
        num_src, num_dst = draw(st.tuples(st.integers(0, 8), st.integers(0, 8)))
        ends = st.tuples(st.integers(0, max(num_src - 1, 0)), st.integers(0, max(num_dst - 1, 0)))
        most = 30 if num_src and num_dst else 0
        return GraphSpec("listed", num_src, num_dst, tuple(draw(st.lists(ends, max_size=most))), **how)
    kind = draw(st.sampled_from(("bipartite", *SQUARE)))
    n, seed = draw(st.integers(1, most_nodes)), draw(st.integers(0, 99))
    m = draw(st.integers(1, most_nodes)) if kind == "bipartite" else n
    return GraphSpec(kind, n, m, seed=seed, **how)


# ---- inputs --------------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "strided", "offset", "transposed", "expanded")


def laid_out(x, layout):
    """The values of x in other memory; "expanded" repeats the first row."""
    if layout == "strided":
        return torch.stack([x, torch.full_like(x, math.nan)], dim=-1)[..., 0]
    if layout == "offset":  # one element behind an aligned address
        return torch.cat([x.new_full((1,), math.nan), x.flatten()])[1:].view(x.shape)
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "expanded" and len(x) > 1:
        return x[:1].expand(x.shape)
    return x


def scaled_dot(q, k, e, *params):
    score = (q * k).sum(-1) / q.shape[-1] ** 0.5
    return score if not params else score * params[0]


def additive(q, k, e, *params):
    score = torch.tanh(q + k).mean(-1)
    if e is not None:
        score = score + e.sum(-1, keepdim=True)
    return score if not params else score + params[0]


@dataclass(frozen=True)
class Call:
    """A call of one function: tensors by name with (shape, layout), other arguments, and a seed of values."""

    function: str
    dtype: torch.dtype
    tensors: dict
    wide: frozenset = frozenset()  # names of tensors in float32 beside 16-bit features
    masks: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    seed: int = 0
    special: tuple = ()  # (tensor, kind of large values)

    def inputs(self, device="cpu"):
        """Leaves by name, which want gradients, and boolean masks."""
        rand, leaves = generator(self.seed), {}
        for name, (shape, layout) in self.tensors.items():
            x = torch.randn(shape, generator=rand, dtype=torch.float64)
            if name == "att":
                x = x / max(shape[-1], 1) ** 0.5
            if self.function == "agnn_attention" and name != "beta":
                x = x + torch.where(x < 0, -0.5, 0.5)  # the gradient of x / |x| is huge around 0
            for target, kind in self.special:
                if target == name:
                    x = extreme(x, kind, self.dtype, rand)
            dtype = torch.float32 if name in self.wide and self.dtype.itemsize == 2 else self.dtype
            x = laid_out(x.to(dtype).to(device), layout)
            leaves[name] = x.detach().requires_grad_()
        masks = {
            name: (torch.rand(shape, generator=rand) < 0.7).to(device) for name, shape in self.masks.items()
        }
        return leaves, masks

    def arguments(self, leaves, masks, device):
        """All arguments after the graph, by name."""
        arguments = {**leaves, **masks, **self.options}
        if "generator" in arguments:
            arguments["generator"] = torch.tensor([arguments["generator"]], device=device)
        if self.function == "flex_attention" and "param" in arguments:
            arguments["params"] = (arguments.pop("param"),)
        return arguments

    def of(self, module):
        """The function, which takes flat names (`attention.packed`), and of a score the options of layers."""
        score = self.function.removesuffix("_attention")
        if score in SCORES:
            return function(score, module)
        call = getattr(module, self.function)
        return lambda graph, **given: call(graph, **packed(given))

    def __call__(self, module, graph, leaves, masks):
        """Results as a tuple."""
        result = self.of(module)(graph, **self.arguments(leaves, masks, graph.device))
        return result if isinstance(result, tuple) else (result,)


def extreme(x, kind, dtype, rand):
    """x with values that a softmax must survive: far from zero, or so low that they mask an edge."""
    large = 1e4 if dtype == torch.float16 else 1e6
    hidden = {"-1e9": -1e4 if dtype == torch.float16 else -1e9, "min": torch.finfo(dtype).min / 4}
    if kind == "shift up":
        return x + large
    if kind == "shift down":
        return x - 10 * large if dtype != torch.float16 else x - large
    if kind == "one value":
        return torch.full_like(x, large)
    some = torch.rand(x.shape, generator=rand) < 0.5
    return x.masked_fill(some, {**hidden, "-inf": -math.inf}[kind])


EXTREMES = ("shift up", "shift down", "one value", "-1e9", "min", "-inf")


def _maybe(draw, likely=0.3):
    return draw(st.integers(0, 99)) < 100 * likely


def _per_edge(draw, graph_edges, heads):
    return draw(st.sampled_from(((graph_edges,), (graph_edges, heads))))


@st.composite
def calls(draw, spec, functions=FUNCTIONS, dtypes=DTYPES, dropout=True, extremes=False):
    """A random call whose tensors fit the graph ``spec``."""
    name = draw(st.sampled_from(functions))
    square = spec.num_src == spec.num_dst
    num_edges = spec.ends().shape[1]
    heads = draw(st.sampled_from(HEADS))
    dim = draw(st.sampled_from([d for d in DIMS if (num_edges + 100) * heads * d < 1_500_000]))
    dtype = draw(st.sampled_from(dtypes))
    src, dst, edges = (spec.num_src, heads, dim), (spec.num_dst, heads, dim), (num_edges, heads)
    shapes, masks, options, wide = {}, {}, {}, set()

    if name == "edge_softmax":
        shapes["score"] = (num_edges, *draw(st.sampled_from([(), (heads,), (heads, 1), (2, heads), (0,)])))
    elif name == "sddmm":
        shapes = {"query": dst, "key": src}
    elif name == "spmm":
        shapes = {"weight": _per_edge(draw, num_edges, heads), "value": src}
    else:
        value_dim = draw(st.sampled_from((dim, 5))) if name in ("dot_attention", "flex_attention") else dim
        if name == "gat_attention":
            shapes = {"value": src, "score_src": src[:2], "score_dst": dst[:2]}
            wide |= {"score_src", "score_dst"} if draw(st.booleans()) else set()
            if _maybe(draw):
                del shapes["score_dst"]
                options["score_dst"] = None
        elif name == "gatv2_attention":
            shapes = {"key": src, "query": dst, "att": (heads, dim)}
        elif name == "agnn_attention":
            shapes = {"value": src}
            if not square or draw(st.booleans()):
                shapes["query"] = dst
            if draw(st.booleans()):
                shapes["beta"] = (1,)
        else:
            shapes = {"query": dst, "key": src, "value": (*src[:2], value_dim)}
        if name == "flex_attention":
            options["score_fn"] = draw(st.sampled_from((scaled_dot, additive)))
            if options["score_fn"] is additive and _maybe(draw, 0.5):
                shapes["edge_attr"] = (num_edges, 3)
            if _maybe(draw):
                shapes["param"] = (heads,)
            if num_edges <= 200:
                chunk = draw(st.sampled_from((None, 1, 7)))
                options["kernel_options"] = None if chunk is None else {"chunk_edges": chunk}
        elif name != "agnn_attention":
            score = name.removesuffix("_attention")
            if _maybe(draw):
                for term in draw(st.sampled_from(((TERMS[score],), ("bias",), (TERMS[score], "bias")))):
                    shapes[term] = edges
            if _maybe(draw):
                shapes["gate"] = _per_edge(draw, num_edges, heads)
            options["negative_slope"] = draw(st.sampled_from((0.2, 0.0, 1.0, 0.7)))
            with_edges = _maybe(draw)
            if with_edges and score != "dot":
                shared = draw(st.booleans())  # one edge term for all heads
                shapes[EDGES[score]] = (num_edges, dim) if shared else (*edges, dim)
            elif with_edges:
                places = draw(st.sampled_from((("key",), ("value",), ("both",), ("key", "value"))))
                if "both" in places:
                    value_dim = dim
                    shapes["value"] = src
                projected, shared = draw(st.booleans()), draw(st.booleans())
                width = draw(st.sampled_from((1, 3, 11)))
                for place in places:
                    size = value_dim if place == "value" else dim
                    if projected:
                        shapes |= {
                            "edge_attr": (num_edges, width),
                            f"edge_{place}_weight": (heads * size, width),
                        }
                        if draw(st.booleans()):
                            shapes[f"edge_{place}_bias"] = (heads * size,)
                    else:
                        shapes[f"edge_{place}"] = (num_edges, size) if shared else (*edges, size)
                if options["negative_slope"] != 1 and places != ("value",):
                    shapes.pop("bias", None)  # it is added behind the LeakyReLU, the key's term before it
            if name == "dot_attention" and _maybe(draw):
                options["scale"] = 0.3
        if name in LAYERS and _maybe(draw):
            shapes["out_bias"] = (heads, value_dim)
        if _maybe(draw):
            shapes["weight"] = _per_edge(draw, num_edges, heads)
        if _maybe(draw):
            masks["mask"] = _per_edge(draw, num_edges, heads)
        if dropout and _maybe(draw):
            options["dropout_p"] = draw(st.sampled_from((0.1, 0.5, 0.9, 1.0)))
            options["generator"] = draw(st.integers(0, 2**62))
        if _maybe(draw):
            options["return_attention"] = True
        wide |= {n for n in ("bias", "edge_score", "gate", "weight") if n in shapes and draw(st.booleans())}
    if name not in ("sddmm", "spmm") and _maybe(draw):
        of_kernels = options.get("kernel_options") or {}
        schedule = draw(st.sampled_from(("natural", "natural<=64")))
        options["kernel_options"] = {**of_kernels, "schedule": schedule}

    special = ()
    if extremes:
        target = "score" if name == "edge_softmax" else TERMS[name.removesuffix("_attention")]
        shapes.setdefault(target, edges)
        options.pop("negative_slope", None)
        special = ((target, draw(st.sampled_from(EXTREMES))),)
    layouts = {name: draw(st.sampled_from(LAYOUTS)) if _maybe(draw, 0.5) else "contiguous" for name in shapes}
    tensors = {name: (shape, layouts[name]) for name, shape in shapes.items()}
    seed = draw(st.integers(0, 99))
    return Call(name, dtype, tensors, frozenset(wide), masks, options, seed, special)


@st.composite
def cases(draw, **how):
    """(GraphSpec, Call)."""
    spec = draw(graphs())
    return spec, draw(calls(spec, **how))
