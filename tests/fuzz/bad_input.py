"""Calls of functions and graphs that must be refused, each with the error and the words that its message has
to have; bad_layers.py has those of layers.

tests/fuzz/test_bad_input.py checks them, and scripts/error_table.py writes them to the page
docs/internals/errors.md when the site is built.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch

from dfgnn import Graph, accelerate, capture, compile, convert_state_dict, explain, functional, patch
from dfgnn.functional import EdgeTerm, Projected

N_SRC, N_DST, HEADS, DIM = 4, 3, 2, 8
SRC, DST = torch.tensor([0, 1, 2, 3, 1]), torch.tensor([0, 0, 1, 1, 1])
EDGES, ENDS = len(SRC), torch.stack([SRC, DST])


@dataclass(frozen=True)
class Case:
    """where: the function that is called. argument: the name of the wrong one. wrong: what is wrong with it,
    in words for the table of errors."""

    where: str
    argument: str
    wrong: str
    error: type
    words: tuple
    call: object

    def __str__(self):
        return f"{self.where}-{self.argument}-{self.wrong}".replace(" ", "_")


def block():
    """4 sources, 3 destinations, of which the last has no edge."""
    return Graph.from_coo(SRC, DST, num_src=N_SRC, num_dst=N_DST)


def square():
    return Graph.from_coo(SRC, DST, num_nodes=N_SRC).add_self_loops()


def rand(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


# ---- functions -----------------------------------------------------------------------------------

_SRC, _DST = (N_SRC, HEADS, DIM), (N_DST, HEADS, DIM)
_PER_EDGE = {"bias": (EDGES, HEADS), "weight": (EDGES,), "mask": (EDGES,), "sink": (HEADS,)}
# Tensors by name with right shapes; the first one says which dtype the others have.
FUNCTIONS = {
    "gat_attention": {"value": _SRC, "score_src": _SRC[:2], "score_dst": _DST[:2], **_PER_EDGE},
    "gatv2_attention": {"query": _DST, "key": _SRC, "att": (HEADS, DIM), **_PER_EDGE},
    "dot_attention": {"query": _DST, "key": _SRC, "value": _SRC, **_PER_EDGE},
    "agnn_attention": {"value": _SRC, "query": _DST, **_PER_EDGE},
    "flex_attention": {
        "query": _DST, "key": _SRC, "value": _SRC, "edge_attr": (EDGES, 3), "mask": (EDGES,),
        "weight": (EDGES,), "sink": (HEADS,),
    },
    "edge_product_attention": {
        "query": _DST, "key": _SRC, "value": _SRC, "edge_attr": (EDGES, HEADS, DIM),
        "bias": (EDGES, HEADS), "mask": (EDGES,), "weight": (EDGES,),
    },
    "score_attention": {
        "value": _SRC, "score": (EDGES, HEADS), "mask": (EDGES,), "weight": (EDGES,), "sink": (HEADS,),
    },
    "edge_softmax": {"score": (EDGES, HEADS), "sink": (HEADS,)},
    "sddmm": {"query": _DST, "key": _SRC},
    "spmm": {"value": _SRC, "weight": (EDGES, HEADS)},
}  # fmt: skip
_NUMBERS = {
    "gat_attention": ["negative_slope"],
    "gatv2_attention": ["negative_slope"],
    "dot_attention": ["scale"],
    "edge_product_attention": ["clamp"],
}
_ATTENTION = [name for name in FUNCTIONS if name.endswith("attention")]


def score_fn(q, k, e):
    return (q * k).sum(-1)


def arguments(function):
    """Right arguments of the function, which a case changes."""
    made = {"graph": block()}
    if function == "flex_attention":
        made["score_fn"] = score_fn
    for name, shape in FUNCTIONS[function].items():
        made[name] = rand(*shape, dtype=torch.bool if name == "mask" else torch.float32)
    return made


def _function_case(function, argument, wrong, error, *words, **changes):
    def call():
        return getattr(functional, function)(**{**arguments(function), **changes})

    return Case(f"functional.{function}", argument, wrong, error, (f"{function}: {argument}: ", *words), call)


def _tensor_cases(function):
    tensors = FUNCTIONS[function]
    first = next(iter(tensors))
    for argument, shape in tensors.items():
        right = arguments(function)[argument]

        def case(wrong, error, got, value, expected="expected", argument=argument):
            return _function_case(
                function, argument, wrong, error, expected, f"got {got}", **{argument: value}
            )

        yield case("a list", TypeError, "list", right.tolist())
        yield case("of integers", TypeError, "torch.int64", right.long())
        if argument != "mask":
            yield case("complex", TypeError, "torch.complex64", right.to(torch.complex64))
        yield case("one row too many", ValueError, "", torch.cat([right, right[:1]]))
        yield case("a number", ValueError, "[]", right.flatten()[0])
        if shape[1:2] == (HEADS,) and argument != first:
            yield case("of one head", ValueError, "", right[:, :1])
        if shape[2:] == (DIM,) and argument not in ("value", first) and function != "flex_attention":
            yield case("of half the size", ValueError, "", right[..., : DIM // 2])
        if shape == (EDGES, HEADS) and argument != "score":  # score may have any dimensions after the first
            yield case("[E, H, 1]", ValueError, "[5, 2, 1]; ", right[..., None], "expected")
        if argument != "score" and shape != (EDGES,) and function != "flex_attention":
            yield case("one dimension more", ValueError, "", right[..., None].expand(*shape, 2))
        yield case("sparse", TypeError, "layout torch.sparse_coo", right.to_sparse())
        on_meta = right.to("meta")
        if argument != first:
            yield case("on another device", ValueError, "meta", on_meta, "expected device cpu (the graph's)")
        elif len(tensors) > 1:  # features on meta alone ask for shapes, so that the next tensor is at fault
            yield _function_case(
                function, list(tensors)[1], f"on another device than {first}", ValueError,
                f"expected device meta like {first}", "got cpu", **{first: on_meta},
            )  # fmt: skip
        if argument not in (first, "mask"):
            yield case("of another dtype", TypeError, "torch.float64", right.double())


def _function_cases():
    for function in FUNCTIONS:
        dgl_graph = type("DGLGraph", (), {"canonical_etypes": []})()
        for wrong, words, graph in (
            ("None", ("expected a dfgnn.Graph, a DGLGraph or an edge_index, got",), None),
            ("lists", ("got list", "Graph.from_edge_index(edge_index"), [SRC.tolist(), DST.tolist()]),
            ("an edge_index of floats", ("got Tensor of torch.float32", "edge_index.long()"), ENDS.float()),
            ("features", ("got Tensor", "comes before the features"), rand(N_SRC, HEADS, DIM)),
            ("a DGLGraph", ("got DGLGraph", "Graph.from_dgl(g)"), dgl_graph),
        ):
            yield _function_case(function, "graph", wrong, TypeError, *words, graph=graph)
        case = _function_case(function, "graph", "an edge_index [E, 2]", ValueError, graph=ENDS.T)
        yield dataclasses.replace(case, words=("edge_index: expected shape [2, *], got [5, 2]; transpose",))
        if function != "edge_softmax":  # it has no nodes' tensors that ids could exceed
            more = torch.stack([SRC + 1, DST])
            case = _function_case(function, "graph", "an edge_index of more nodes", ValueError, graph=more)
            yield dataclasses.replace(
                case, words=(f"{function}: edge_index[0]: expected values in", "got 4", "num_src=")
            )
        unknown = _function_case(function, "edge_weight", "no argument", TypeError, edge_weight=None)
        words = ("expected one of", "got edge_weight", "did you mean weight?")
        if function in (*_ATTENTION, "spmm") and function != "spmm":
            yield dataclasses.replace(unknown, words=words)
        yield from _tensor_cases(function)
    for function in FUNCTIONS:
        argument = "score_fn" if function == "flex_attention" else "weight" if function == "spmm" else ""
        argument = argument or ("score" if function == "score_attention" else next(iter(FUNCTIONS[function])))
        words = f"{function}: {argument}: expected a value, got none", "the arguments are graph, "
        call = lambda function=function: getattr(functional, function)(block())  # noqa: E731
        yield Case(f"functional.{function}", argument, "missing", TypeError, words, call)
    for function in _ATTENTION:
        words = "True or False, got 'no'"
        yield _function_case(
            function, "return_attention", "a string", TypeError, words, return_attention="no"
        )
        unknown = _function_case(function, "num_heads", "no argument", TypeError, num_heads=2)
        yield dataclasses.replace(unknown, words=("got num_heads; heads are a dimension of the tensors",))
        for wrong, p in (("below 0", -0.1), ("above 1", 1.5), ("nan", math.nan)):
            yield _function_case(
                function, "dropout_p", wrong, ValueError, "a probability in [0, 1]", f"got {p}", dropout_p=p
            )
        yield _function_case(
            function, "dropout_p", "a string", TypeError, "a number", "got str", dropout_p="0.5"
        )
        for argument in _NUMBERS.get(function, ()):
            for wrong, got, value in (
                ("a string", "str", "0.5"), ("a list", "list, [0.5]", [0.5]),
                ("a pair", "a tensor of shape [2]", torch.ones(2)),
            ):  # fmt: skip
                if argument != "scale" or wrong != "a pair":  # of edges
                    yield _function_case(
                        function, argument, wrong, TypeError, "a number", f"got {got}", **{argument: value}
                    )
        first = next(iter(FUNCTIONS[function]))
        shape = FUNCTIONS[function][first]
        for wrong, size in (("no heads", (shape[0], 0, DIM)), ("heads of size 0", (shape[0], HEADS, 0))):
            if function != "flex_attention":  # its query may have any shape after the heads
                yield _function_case(
                    function, first, wrong, ValueError, f"got {list(size)}", **{first: rand(*size)}
                )
    for function in (*_ATTENTION, "edge_softmax"):
        argument = 'kernel_options["schedule"]'
        for wrong, error, words, schedule in (
            ("unknown", ValueError, ("expected", "got 'fastest'"), "fastest"),
            ("no string", TypeError, ("expected", "got int"), 3),
            ("a bound too small", ValueError, ("expected", "got 'natural<=1'"), "natural<=1"),
            ("not on the CPU", ValueError, ("'packed' is not available",), "packed"),
        ):
            case = _function_case(
                function, argument, wrong, error, *words, kernel_options={"schedule": schedule}
            )
            yield dataclasses.replace(case, words=("schedule", *words))
    attr, weight, bias = rand(EDGES, 3), rand(HEADS * DIM, 3), rand(HEADS * DIM)
    feat, number = rand(EDGES, HEADS, DIM), rand(EDGES, HEADS)
    with_schedules, products = (*_ATTENTION, "edge_softmax"), ("edge_product_attention",)
    shedule, of_edges = {"shedule": "natural"}, ("got [5, 2, 8]", "graph.edges_as_sources()")
    no_seed = torch.zeros(0, dtype=torch.int64)
    for functions, argument, wrong, error, words, value in (
        (with_schedules, "kernel_options", "a string", TypeError, ("a dict or None", "got str"), "natural"),
        (with_schedules, "kernel_options", "an unknown key", ValueError,
         ("the keys schedule", "got shedule"), shedule),
        (_ATTENTION, "generator", "a number", TypeError, ("a torch.Generator or a tensor", "got int"), 3),
        (_ATTENTION, "generator", "of no element", ValueError, ("expected shape [1]", "got [0]"), no_seed),
        (products, "clamp", "0", ValueError, ("expected a number above 0", "got 0.0"), 0.0),
        (products, "return_edges", "unknown", ValueError, ("'products' or 'scores'", "got 'all'"), "all"),
        (("dot_attention",), "key", "of edges", ValueError, of_edges, feat),
        (("score_attention",), "value", "of edges", ValueError, of_edges, feat),
        (("gatv2_attention",), "att", "as layers have it", ValueError,
         ("got [1, 2, 8]; att.squeeze(0) has the",), rand(1, HEADS, DIM)),
        (("dot_attention",), "scale", "of nodes", ValueError, ("[5] or [5, 2]", "got [4, 2]"),
         rand(N_SRC, HEADS)),
        (("agnn_attention",), "query", "None for a bipartite graph", ValueError,
         ("expected a tensor", "got None"), None),
        (("flex_attention",), "score_fn", "no function", TypeError,
         ("a function, the second argument", "got int"), 3),
        (("score_attention",), "value", "swapped with the score", ValueError,
         ("are score and value swapped?",), rand(EDGES, HEADS)),
        (("edge_softmax",), "score", "of nodes", ValueError, ("it has a row per edge",), rand(N_SRC, HEADS)),
        (("spmm",), "value", "swapped with the weight", ValueError, ("are the two swapped?",), rand(EDGES)),
    ):  # fmt: skip
        for function in functions:
            more = {"weight": rand(*_SRC)} if function == "spmm" else {}
            yield _function_case(function, argument, wrong, error, *words, **{argument: value}, **more)
    for cls, argument, wrong, words, call in (
        ("EdgeTerm", "edge_attr", "no argument", "of key, value, score, got edge_attr; did you mean key?",
         lambda: EdgeTerm(edge_attr=feat)),
        ("EdgeTerm", "", "too many", "expected key, value, score, got too many",
         lambda: EdgeTerm(*[feat] * 4)),
        ("Projected", "weight", "missing", "expected a value, got none", lambda: Projected(attr)),
        ("Projected", "lin", "no argument", "expected one of attr, weight, bias, got lin",
         lambda: Projected(attr, lin=weight)),
    ):  # fmt: skip
        yield Case(f"functional.{cls}", argument, wrong, TypeError, (f"{cls}: {argument}", words), call)
    for place, function in (
        ("key", "dot_attention"), ("value", "dot_attention"), ("key", "gatv2_attention"),
        ("value", "gat_attention"),
    ):  # fmt: skip
        for argument, wrong, error, words, term in (
            ("", "a list", TypeError, ("a tensor or Projected", "got list"), feat.tolist()),
            ("", "of integers", TypeError, ("got torch.int64",), feat.long()),
            ("", "of one head", ValueError, ("[5, 2, 8] or [5, 8]", "got [5, 1, 8]"), feat[:, :1]),
            (".attr", "a list", TypeError, ("got list",), Projected(attr.tolist(), weight)),
            (".attr", "of integers", TypeError, ("got torch.int64",), Projected(attr.long(), weight)),
            (".attr", "too short", ValueError, ("got [4, 3]",), Projected(attr[1:], weight)),
            (".attr", "without features", ValueError, ("got [5, 0]",), Projected(attr[:, :0], weight)),
            (".weight", "None", TypeError, ("got NoneType",), Projected(attr, None)),
            (".weight", "transposed", ValueError, ("[16, 3], got [3, 16]",), Projected(attr, weight.T)),
            (".bias", "a matrix", ValueError, ("got [16, 1]",), Projected(attr, weight, bias[:, None])),
        ):
            yield _function_case(
                function, f"edge.{place}{argument}", wrong, error, "expected", *words,
                edge=EdgeTerm(**{place: term}),
            )  # fmt: skip
    for function, argument, wrong, error, words, edge in (
        ("dot_attention", "edge", "a tensor", TypeError, "EdgeTerm(x, x) adds x to keys and values", feat),
        ("gat_attention", "edge", "a tensor", TypeError, "EdgeTerm(score=...)", number),
        ("dot_attention", "edge.score", "not there", ValueError, "bias is added", EdgeTerm(score=number)),
        ("gatv2_attention", "edge.value", "not there", ValueError, "spmm", EdgeTerm(value=feat)),
        ("gat_attention", "edge.key", "not there", ValueError, "EdgeTerm(score=...)", EdgeTerm(feat)),
        ("gat_attention", "edge.score", "of features", ValueError, "[5, 2]", EdgeTerm(score=feat)),
    ):
        yield _function_case(function, argument, wrong, error, "expected", words, edge=edge)
    sets = rand(3, *_SRC)
    for argument, wrong, words, changes in (
        ("score_src", "of other sets", "a batch of 3", dict(value=sets, score_src=rand(4, *_SRC[:2]))),
        ("edge.score", "of other dimensions", "a batch of 3",
         dict(value=sets, edge=EdgeTerm(score=rand(2, 3, EDGES, HEADS)))),
        ("value", "a set with one row too few", "shape", dict(value=sets[:, 1:])),
    ):  # fmt: skip
        yield _function_case("gat_attention", argument, wrong, ValueError, f"expected {words}", **changes)
    for wrong, error, function, got in (
        ("a result of another shape", ValueError, lambda q, k, e: (q * k).sum(-1)[:, :1], "got [edges, 1]"),
        ("no result", TypeError, lambda q, k, e: None, "got NoneType"),
        (
            "of two arguments",
            TypeError,
            lambda q, k: (q * k).sum(-1),
            "q, k and e (None without edge_attr), got",
        ),
        ("a result of integers", TypeError, lambda q, k, e: (q * k).sum(-1).long(), "got torch.int64"),
        ("captures a parameter", ValueError, lambda q, k, e: (q * k).sum(-1) * _PARAMETER, "captures"),
    ):
        yield _function_case("flex_attention", "score_fn", wrong, error, got, score_fn=function)
    yield _function_case(
        "flex_attention", "params[0]", "a number", TypeError, "expected a tensor, got float", params=(0.5,)
    )
    for wrong, error, got, chunk in (
        ("zero", ValueError, "got 0", 0),
        ("a float", TypeError, "got float", 2.5),
    ):
        argument = 'kernel_options["chunk_edges"]'
        options = {"chunk_edges": chunk}
        yield _function_case("flex_attention", argument, wrong, error, got, kernel_options=options)
    for wrong, error, words, beta in (
        ("a string", TypeError, "got str", "1"),
        ("of another shape", ValueError, "got [5]", rand(5)),
    ):
        yield _function_case("agnn_attention", "beta", wrong, error, "expected", words, beta=beta)


_PARAMETER = torch.ones((), requires_grad=True)


# ---- graphs --------------------------------------------------------------------------------------


def _graph_cases():
    ptr, idx = torch.tensor([0, 1, 3]), torch.tensor([0, 1, 0])

    def case(method, argument, wrong, error, words, call):
        name = "Graph" if method == "Graph" else f"Graph.{method}"
        words = (words,) if isinstance(words, str) else words
        named = (argument,) if argument else ()
        return Case(name, argument, wrong, error, (name, *named, *words), call)

    yield case("Graph", "", "called itself", TypeError, "expected one of", lambda: Graph(1, 2))
    for attribute, words in (
        ("number_of_nodes", "got number_of_nodes; did you mean num_nodes?"),
        ("in_degree", "got in_degree; did you mean in_degrees?"),
        ("ndata", "got ndata; features are tensors"),
    ):
        call = lambda attribute=attribute: getattr(block(), attribute)  # noqa: E731
        yield case("Graph", "", f"asked for {attribute}", AttributeError, words, call)
    yield case(
        "from_edge_index", "num_vertices", "no argument", TypeError, "did you mean num_nodes?",
        lambda: Graph.from_edge_index(ENDS, num_vertices=4),
    )  # fmt: skip
    for method, argument, wrong, words, call in (
        ("from_coo", "row", "no argument", "did you mean src?", lambda: Graph.from_coo(row=SRC, col=DST)),
        ("from_dgl", "graph", "edges", "Graph.from_edge_index takes edges", lambda: Graph.from_dgl(ENDS)),
        ("batch", "graphs", "two arguments", "too many positional", lambda: Graph.batch(block(), block())),
        ("add_self_loops", "fill_value", "no argument", "expected one of remove_existing",
         lambda: block().add_self_loops(fill_value=1.0)),
        ("in_degrees", "", "with an argument", "too many positional", lambda: block().in_degrees(1)),
        ("reorder", "method", "missing", "expected a value, got none", lambda: block().reorder()),
        ("from_scipy", "matrix", "an array", "coo_matrix(matrix)", lambda: Graph.from_scipy(ENDS.numpy())),
        ("from_edge_index", "edge_index", "an adjacency matrix", "adj.nonzero().t()",
         lambda: Graph.from_edge_index(torch.eye(4, dtype=torch.bool))),
        ("from_pyg", "data", "a dict", 'data["edge_index"]', lambda: Graph.from_pyg({"edge_index": ENDS})),
    ):  # fmt: skip
        yield case(method, argument, wrong, TypeError, words, call)
    yield case(
        "from_coo", "dst", "missing", TypeError, "expected a value, got none", lambda: Graph.from_coo(SRC)
    )
    coo, csr, edge_index = Graph.from_coo, Graph.from_csr, Graph.from_edge_index
    for method, argument, make in (
        ("from_coo", "src", lambda x: coo(x, idx)),
        ("from_coo", "dst", lambda x: coo(idx, x)),
        ("from_csr", "indptr", lambda x: csr(x, idx)),
        ("from_csr", "indices", lambda x: csr(ptr, x)),
        ("from_csr", "eids", lambda x: csr(ptr, idx, eids=x)),
    ):
        right = {"indptr": ptr}.get(argument, idx)
        for wrong, error, value, got in (
            ("a list", TypeError, right.tolist(), "got list"),
            ("of floats", TypeError, right.float(), "got torch.float32"),
            ("of int16", TypeError, right.short(), f"got torch.int16; convert it with {argument}.long()"),
            ("of bools", TypeError, right.bool(), "got torch.bool"),
            ("a matrix", ValueError, right[None], f"got [1, {len(right)}]"),
            ("a number", ValueError, right[0], "got []"),
            ("sparse", TypeError, right.to_sparse(), "got layout torch.sparse_coo"),
        ):
            call = lambda make=make, value=value: make(value)  # noqa: E731
            yield case(method, argument, wrong, error, ("expected", got), call)
    for argument, wrong, error, words, value in (
        ("edge_index", "None", TypeError, "got NoneType", None),
        ("edge_index", "[E, 2]", ValueError, ("shape [2, *]", "got [3, 2]"), torch.stack([idx, idx], 1)),
        ("edge_index", "of floats", TypeError, "got torch.float32", torch.zeros(2, 3)),
        ("edge_index[0]", "negative", ValueError, "got -1 at position 1", torch.tensor([[0, -1], [0, 0]])),
        ("edge_index[1]", "too large", ValueError, ("num_dst=3", "got 3"), torch.tensor([[0, 1], [0, 3]])),
    ):
        yield case("from_edge_index", argument, wrong, error, words, lambda value=value: edge_index(value, 3))
    cached, one_edge = Graph.cached, torch.tensor([[1], [0]])
    for argument, wrong, error, words, value, size in (
        ("edge_index", "a list", TypeError, "got list", [[0], [0]], None),
        ("edge_index", "a Graph", TypeError, "got a Graph", block(), None),
        ("edge_index", "of floats", TypeError, "got torch.float32", torch.zeros(2, 3), None),
        ("edge_index[0]", "too large", ValueError, ("got 1", "1 rows were given"), one_edge, 1),
        ("num_nodes", "a string", TypeError, "got str", one_edge, "2"),
        ("num_nodes", "negative", ValueError, "got -1", one_edge, -1),
    ):
        yield case("cached", argument, wrong, error, words, lambda v=value, s=size: cached(v, s))
    for argument, wrong, error, words, sizes in (
        ("num_src", "negative", ValueError, "got -1", dict(num_src=-1)),
        ("num_src", "a float", TypeError, "got float", dict(num_src=2.0)),
        ("num_src", "a bool", TypeError, "got bool", dict(num_src=True)),
        ("num_dst", "2**31", ValueError, "got 2147483648", dict(num_dst=2**31)),
        ("num_nodes", "beside num_src", TypeError, "got both", dict(num_nodes=2, num_src=2)),
        ("src", "beyond num_src", ValueError, ("num_src=1", "got 1"), dict(num_src=1)),
    ):
        yield case("from_coo", argument, wrong, error, words, lambda sizes=sizes: coo(idx, idx, **sizes))
    yield case("from_coo", "dst", "of another length", ValueError, "got 2", lambda: coo(idx, idx[:2]))
    without = "expected values", "on meta, which has none"
    on_meta, edges_on_meta = idx.to("meta"), torch.zeros(2, 3, dtype=torch.int64, device="meta")
    for method, argument, call in (
        ("from_coo", "src", lambda: coo(on_meta, idx)),
        ("from_coo", "dst", lambda: coo(idx, on_meta)),
        ("from_csr", "indptr", lambda: csr(ptr.to("meta"), idx)),
        ("from_csr", "indices", lambda: csr(ptr, on_meta)),
        ("from_csr", "eids", lambda: csr(ptr, idx, eids=on_meta)),
        ("from_edge_index", "edge_index", lambda: edge_index(edges_on_meta, 3)),
    ):
        yield case(method, argument, "on meta, without values", ValueError, without, call)
    for argument, wrong, words, values in (
        ("indptr", "not from 0", "got 1", (ptr + 1, idx)),
        ("indptr", "falling", "do not decrease", (torch.tensor([0, 2, 1, 3]), idx)),
        ("indptr", "not up to E", "got 3", (ptr, idx[:2])),
        ("indptr", "empty", "got 0", (ptr[:0], idx[:0])),
        ("indices", "negative", "got -2", (ptr, idx - 2)),
    ):
        yield case("from_csr", argument, wrong, ValueError, words, lambda values=values: csr(*values))
    large, one = torch.tensor([0, 2**31]), torch.zeros(1, dtype=torch.int64)
    halves, sparse = coo(idx, idx, num_src=2**30, num_dst=2), torch.ones(2, 2, 2).to_sparse()
    of_sparse, sizes = Graph.from_torch_sparse, "num_nodes, num_src, num_dst"
    for method, argument, wrong, error, words, call in (
        ("from_csr", "eids", "repeated", ValueError, "more than once", lambda: csr(ptr, idx, eids=idx)),
        ("from_csr", "eids", "too few", ValueError, "got [2]", lambda: csr(ptr, idx, eids=idx[:2])),
        ("from_csr", "eids", "too large", ValueError, "got 3", lambda: csr(ptr, idx, eids=idx + 2)),
        ("from_csr", "destination 0", "of 2**31 edges", ValueError, "expected fewer than 2**31 edges",
         lambda: csr(large, one.expand(2**31), validate=False)),
        ("from_edge_index", "max(edge_index[0]) + 1", "2**31", ValueError, "got 2147483649",
         lambda: edge_index(torch.stack([large, large]))),
        ("batch", "num_src", "2**31", ValueError, "got 2147483648", lambda: Graph.batch([halves] * 2)),
        ("from_scipy", "matrix", "a tensor", TypeError, "got Tensor", lambda: Graph.from_scipy(idx)),
        ("from_torch_sparse", "matrix", "dense", TypeError, "torch.strided", lambda: of_sparse(torch.eye(3))),
        ("from_torch_sparse", "matrix", "None", TypeError, "NoneType", lambda: of_sparse(None)),
        ("from_torch_sparse", "matrix", "of 3 dimensions", ValueError, "2 sparse dimensions, got",
         lambda: of_sparse(sparse)),
        ("from_pyg", sizes, "beside a sparse one", ValueError, "which has sizes",
         lambda: Graph.from_pyg(torch.eye(3).to_sparse(), num_nodes=3)),
        ("from_dgl", "graph", "a tensor", TypeError, "got Tensor", lambda: Graph.from_dgl(idx)),
        ("from_pyg", "data", "a list", TypeError, "got list", lambda: Graph.from_pyg([0, 1])),
        ("batch", "graphs", "empty", ValueError, "got none", lambda: Graph.batch([])),
        ("batch", "graphs", "a graph", TypeError, "got Graph", lambda: Graph.batch(block())),
        ("batch", "graphs[1]", "a tensor", TypeError, "got Tensor", lambda: Graph.batch([block(), idx])),
    ):  # fmt: skip
        yield case(method, argument, wrong, error, words, call)

    graph = block()
    for argument, wrong, error, words, options in (
        ("layer", "unknown", ValueError, "got 'gcn'", dict(layer="gcn")),
        ("schedule", "unknown", ValueError, "got 'best'", dict(schedule="best")),
        ("num_heads", "zero", ValueError, "got 0", dict(num_heads=0)),
        ("num_heads", "a string", ValueError, "got '4'", dict(num_heads="4")),
        ("head_dim", "negative", ValueError, "got -4", dict(head_dim=-4)),
        ("dtype", "of integers", ValueError, "got torch.int64", dict(dtype=torch.int64)),
    ):
        yield Case("Graph.plan", argument, wrong, error, (argument, words), lambda o=options: graph.plan(**o))
    for argument, wrong, error, words, options in (
        ("layer", "unknown", ValueError, "got 'gcn'", dict(layer="gcn")),
        ("num_heads", "zero", ValueError, "got 0", dict(num_heads=0)),
        ("head_dim", "a float", ValueError, "got 1.5", dict(head_dim=1.5)),
        ("dtype", "of integers", ValueError, "got torch.int64", dict(dtype=torch.int64)),
        ("seconds", "zero", ValueError, "got 0", dict(seconds=0)),
    ):
        yield case(
            "autotune", argument, wrong, error, words, lambda options=options: graph.autotune(**options)
        )
    for wrong, error, words, device in (
        ("unknown", ValueError, "got 'nowhere'", "nowhere"),
        ("None", TypeError, "got None", None),
        ("a float", TypeError, "got 1.5", 1.5),
    ):
        yield case("to", "device", wrong, error, words, lambda device=device: graph.to(device))
    for argument, wrong, error, words, value in (
        ("method", "unknown", ValueError, "got 'random'", "random"),
        ("method", "None", ValueError, "got NoneType", None),
        ("method", "one permutation for two sides", ValueError, "expected", torch.arange(4)),
        ("method[0]", "too long", ValueError, "[4], got [5]", (torch.arange(5), torch.arange(3))),
        (
            "method[1]",
            "no permutation",
            ValueError,
            "none that is 0",
            (torch.arange(4), torch.ones(3).long()),
        ),
    ):
        yield case("reorder", argument, wrong, error, words, lambda value=value: graph.reorder(value))
    yield case(
        "reorder",
        "order",
        "no permutation",
        ValueError,
        "got",
        lambda: square().reorder(torch.tensor([0, 0, 1, 2])),
    )
    for wrong, error, words, value in (
        ("a tuple", TypeError, "got tuple", (torch.arange(4), torch.arange(4))),
        ("of floats", TypeError, "got torch.float32", torch.rand(4)),
        ("too long", ValueError, "expected shape [4], got [5]", torch.arange(5)),
        ("on meta", ValueError, "on meta, which has none", torch.arange(4, device="meta")),
    ):
        yield case("reorder", "method", wrong, error, words, lambda value=value: square().reorder(value))
    reordering = square().reorder("degree")
    for method in ("permute", "restore"):
        for wrong, error, words, value in (
            ("a list", TypeError, "got list", [1.0]),
            ("of another size", ValueError, "got shape [7, 2]", torch.ones(7, 2)),
            ("on another device", ValueError, "like the graph, got meta", torch.ones(4, 2, device="meta")),
        ):
            call = lambda method=method, value=value: getattr(reordering, method)(value)  # noqa: E731
            yield Case(f"Reordering.{method}", "x", wrong, error, (f"Reordering.{method}", "x", words), call)


# ---- the rest of the package ---------------------------------------------------------------------


def _tool_cases():
    def case(where, argument, wrong, error, words, call):
        return Case(where, argument, wrong, error, (where, argument, words), call)

    yield case(
        "explain", "layer_or_function", "a list", TypeError, "a module or a function, got list",
        lambda: explain([torch.nn.Linear(1, 1)]),
    )  # fmt: skip
    for argument, wrong, words, options in (
        ("capacities", "a number", "a list of pairs (nodes, edges)", dict(capacities=100)),
        ("capacities", "a pair", "a list of pairs (nodes, edges)", dict(capacities=(100, 300))),
    ):
        call = lambda options=options: capture(len, torch.nn.Linear(1, 1), **options)  # noqa: E731
        yield case("capture", argument, wrong, TypeError, words, call)
    for where, argument, wrong, error, words, call in (
        ("accelerate", "model", "a path", TypeError, "the file's state_dict", lambda: accelerate("model.pt")),
        ("accelerate", "inplace", "no argument", TypeError, "expected one of model",
         lambda: accelerate(torch.nn.Linear(1, 1), inplace=True)),
        ("patch", "library", "missing", TypeError, "expected a value, got none", lambda: patch()),
        ("patch", "library", "a list", ValueError, "got ['pyg']", lambda: patch(["pyg"])),
        ("compile", "mode", "unknown", ValueError, "got 'best'",
         lambda: compile(torch.nn.Linear(1, 1), mode="best")),
        ("compile", "options", "a list", TypeError, "a dict or None, got list",
         lambda: compile(torch.nn.Linear(1, 1), options=["best"])),
    ):  # fmt: skip
        yield case(where, argument, wrong, error, words, call)
    yield case("accelerate", "model", "a class", TypeError, "got type", lambda: accelerate(torch.nn.Linear))
    yield case("patch", "library", "unknown", ValueError, "got 'jax'", lambda: patch("jax"))
    yield case(
        "convert_state_dict", "to", "unknown", ValueError, "got 'jax'", lambda: convert_state_dict({}, "jax")
    )
    yield case(
        "convert_state_dict", "state_dict", "a module", TypeError, "got Linear",
        lambda: convert_state_dict(torch.nn.Linear(1, 1), "pyg"),
    )  # fmt: skip


def cases():
    return [*_function_cases(), *_graph_cases(), *_tool_cases()]
