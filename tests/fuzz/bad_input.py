"""Calls of functions that must be refused, each with the error and the words that its message has to have;
bad_graphs.py has those of graphs and tools, bad_blocks.py of block attention, bad_layers.py of layers.

tests/fuzz/test_bad_input.py checks them, and scripts/error_table.py writes them to the page
docs/internals/errors.md when the site is built.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch

from dfgnn import Graph, functional
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


def cases():
    return list(_function_cases())
