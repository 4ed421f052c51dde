"""Calls of `Graph` and of the package's tools that must be refused, in the form of bad_input.py."""

import torch
from bad_input import DST, ENDS, SRC, Case, block, square

from dfgnn import Graph, accelerate, capture, compile, convert_state_dict, explain, patch

# ---- graphs --------------------------------------------------------------------------------------


def _graph_cases():
    ptr, idx = torch.tensor([0, 1, 3]), torch.tensor([0, 1, 0])

    def case(method, argument, wrong, error, words, call):
        name = "Graph" if method == "Graph" else f"Graph.{method}"
        words = (words,) if isinstance(words, str) else words
        named = (argument,) if argument else ()
        return Case(name, argument, wrong, error, (name, *named, *words), call)

    words = "got graph[0]; graph.edge_index has edges"
    yield case("Graph", "", "indexed", TypeError, words, lambda: block()[0])
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
        ("batch", "graphs[0]", "edges", "Graph.from_edge_index, from_pyg", lambda: Graph.batch([ENDS])),
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
    four, ones = torch.arange(4), torch.ones(3).long()
    for of, argument, wrong, error, words, value in (
        (graph, "method", "unknown", ValueError, "got 'random'", "random"),
        (graph, "method", "None", ValueError, "got NoneType", None),
        (graph, "method", "one permutation for two sides", ValueError, "expected", four),
        (graph, "method[0]", "too long", ValueError, "[4], got [5]", (torch.arange(5), torch.arange(3))),
        (graph, "method[1]", "no permutation", ValueError, "none that is 0", (four, ones)),
        (square(), "order", "no permutation", ValueError, "got", torch.tensor([0, 0, 1, 2])),
        (square(), "method", "a tuple", TypeError, "got tuple", (four, four)),
        (square(), "method", "of floats", TypeError, "got torch.float32", torch.rand(4)),
        (square(), "method", "too long", ValueError, "expected shape [4], got [5]", torch.arange(5)),
        (square(), "method", "on meta", ValueError, "on meta, which has none", four.to("meta")),
    ):
        yield case("reorder", argument, wrong, error, words, lambda of=of, value=value: of.reorder(value))
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
        ("compile", "options", "misspelt", ValueError, "got max_autotun; did you mean max_autotune?",
         lambda: compile(torch.nn.Linear(1, 1), options={"max_autotun": True})),
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
    return [*_graph_cases(), *_tool_cases()]
