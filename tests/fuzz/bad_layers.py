"""Calls of layers that must be refused, as those of functions and graphs in bad_input.py."""

import inspect

import torch
from bad_input import DST, EDGES, N_SRC, SRC, Case, block, rand, square

from dfgnn import nn


def _where(layer):
    """The name by which a layer, or its class, is imported, without the package's."""
    cls = layer if isinstance(layer, type) else type(layer)
    library = cls.__module__.split(".")[2]
    return f"nn.{library}.{cls.__name__}" if library in ("dgl", "pyg") else f"nn.{cls.__name__}"


def _layer_cases():
    x, loops = rand(N_SRC, 6), square()
    e = rand(loops.num_edges, 5)
    layers = {
        "GATConv": (nn.dgl.GATConv(6, 4, 2), (x,)),
        "GATv2Conv": (nn.dgl.GATv2Conv(6, 4, 2), (x,)),
        "DotGatConv": (nn.dgl.DotGatConv(6, 4, 2), (x,)),
        "AGNNConv": (nn.dgl.AGNNConv(), (x,)),
        "EdgeGATConv": (nn.dgl.EdgeGATConv(6, 5, 4, 2), (x, e)),
        "EGATConv": (nn.dgl.EGATConv(6, 5, 4, 3, 2), (x, e)),
        "GraphTransformerConv": (nn.GraphTransformerConv(6, 4, 2), (x,)),
        "EdgeGraphTransformerConv": (nn.EdgeGraphTransformerConv(6, 5, 4, 2), (x, e)),
    }
    for layer, (module, inputs) in layers.items():

        def case(argument, wrong, error, words, graph, *inputs, layer=layer, module=module, **options):
            words = (f"{layer}: {argument}: ", *words)
            return Case(
                _where(module), argument, wrong, error, words, lambda: module(graph, *inputs, **options)
            )

        feat, rest = "nfeats" if layer == "EGATConv" else "feat", inputs[1:]
        edge_index, pair = torch.stack([SRC, DST]), (x, x[1:])
        few = rand(len(SRC), 5)[: len(rest) * len(SRC)]
        lists, arrays = "got list; torch.tensor(", "got ndarray; torch.from_numpy("
        without = "in-edges", "allow_zero_in_degree"
        rows = [
            (
                "graph",
                "an edge_index",
                TypeError,
                ("got Tensor", "from_edge_index(edge_index"),
                edge_index,
                *inputs,
            ),
            ("graph", "the features", TypeError, ("got Tensor", "comes before"), x, loops, *rest),
            (
                "graph",
                "a destination without edges",
                nn.ZeroInDegreeError,
                without,
                block(),
                x,
                *(few,) * len(rest),
            ),
            (feat, "a list", TypeError, (lists,), loops, x.tolist(), *rest),
            (feat, "an array", TypeError, (arrays,), loops, x.numpy(), *rest),
            (feat, "missing", TypeError, ("expected a value, got none",), loops),
            (feat, "of integers", TypeError, ("got torch.int64", "float()"), loops, x.long(), *rest),
            (feat, "one row too few", ValueError, ("[4, *, F]", "got [3, 6]"), loops, x[1:], *rest),
            (feat, "one row too many", ValueError, ("got [5, 6]",), loops, x[[0, 0, 1, 2, 3]], *rest),
            (feat, "of one dimension", ValueError, ("got [4]",), loops, x[:, 0], *rest),
            (f"{feat}[1]", "of a pair of wrong sizes", ValueError, ("got [3, 6]",), loops, pair, *rest),
            (feat, "three tensors", ValueError, ("a pair", "got 3"), loops, (x, x, x), *rest),
        ]
        if layer != "AGNNConv":  # it has no weights, so that any width and dtype is right
            of_float64 = "torch.float32", "got torch.float64"
            rows += [
                (feat, "of another width", ValueError, ("6 features", "got 7"), loops, rand(N_SRC, 7), *rest),
                (feat, "of float64", TypeError, of_float64, loops, x.double(), *rest),
            ]
        if rest:
            edges = {"EGATConv": "efeats", "EdgeGATConv": "edge_feat"}.get(layer, "edge_attr")
            rows += [
                (edges, "one row too few", ValueError, ("got [8, 5]",), loops, x, e[1:]),
                (edges, "of another width", ValueError, ("5 features", "got 4"), loops, x, e[:, 1:]),
                (edges, "of integers", TypeError, ("got torch.int64",), loops, x, e.long()),
            ]
        yield from (case(*row) for row in rows)
        words = "expected one of graph, ", "got mask; the functions"
        yield case("mask", "an argument of the functions", TypeError, words, loops, *inputs, mask=None)
        asks = "return_attention" if "GraphTransformer" in layer else "get_attention"
        if asks in inspect.signature(module.forward).parameters:
            words = ("expected True or False, got 'no'",)
            yield case(asks, "a string", TypeError, words, loops, *inputs, **{asks: "no"})
    per_edge = (
        ("GATConv", "edge_weight", "[E, 1]", rand(9, 1), "squeeze(-1)"),
        ("GATConv", "edge_weight", "[E, H, 1]", rand(9, 2, 1), "squeeze(-1)"),
        ("EGATConv", "edge_weight", "[E, H, 1]", rand(9, 2, 1), "squeeze(-1)"),
        ("GraphTransformerConv", "edge_bias", "[E, H, 1]", rand(9, 2, 1), "squeeze(-1)"),
        ("GraphTransformerConv", "edge_weight", "too short", rand(8), "got [8]"),
        ("GraphTransformerConv", "edge_bias", "without heads", rand(9), "expected shape [9, 2], got [9]"),
    )
    for layer, argument, wrong, value, words in per_edge:
        module, inputs = layers[layer]
        call = lambda m=module, i=inputs, a=argument, v=value: m(loops, *i, **{a: v})  # noqa: E731
        yield Case(_where(module), argument, wrong, ValueError, (f"{layer}: {argument}: ", words), call)
    hgt = nn.dgl.HGTConv(6, 4, 2, 2, 2)
    types, kinds = torch.zeros(N_SRC, dtype=torch.int64), torch.zeros(loops.num_edges, dtype=torch.int64)
    for argument, wrong, error, words, inputs in (
        ("x", "one row too few", ValueError, "got [3, 6]", (x[1:], types, kinds)),
        ("x", "of another width", ValueError, "got [4, 7]", (rand(N_SRC, 7), types, kinds)),
        ("x", "of integers", TypeError, "got torch.int64", (x.long(), types, kinds)),
        ("x", "of float64", TypeError, "layer.to(", (x.double(), types, kinds)),
        ("ntype", "too long", ValueError, "got [9]", (x, kinds, kinds)),
        ("ntype", "of floats", TypeError, "got torch.float32", (x, types.float(), kinds)),
        ("ntype", "too large", ValueError, "got 2", (x, types + 2, kinds)),
        ("etype", "too short", ValueError, "got [4]", (x, types, types)),
        ("etype", "negative", ValueError, "got -1", (x, types, kinds - 1)),
    ):
        call = lambda inputs=inputs: hgt(loops, *inputs)  # noqa: E731
        yield Case("nn.dgl.HGTConv", argument, wrong, error, (f"HGTConv: {argument}", words), call)
    transformer = nn.GraphTransformerLayer(6, 2)
    for wrong, error, words, value in (
        ("a list", TypeError, "got list", x.tolist()),
        ("of another width", ValueError, "got [4, 7]", rand(N_SRC, 7)),
        ("of one dimension", ValueError, "got [4]", x[:, 0]),
    ):
        call = lambda value=value: transformer(loops, value)  # noqa: E731
        yield Case(
            "nn.GraphTransformerLayer", "feat", wrong, error, ("GraphTransformerLayer: feat", words), call
        )
    sets = rand(2, N_SRC, 6)
    for wrong, words, feat, bias in (
        ("of other heads", "[E, 2] or [2, E, 2], got [9, 4]", sets, rand(9, 4)),
        ("of other sets", "expected 2 sets like feat, got 3", sets, rand(3, 9, 2)),
    ):
        call = lambda feat=feat, bias=bias: transformer(loops, feat, bias)  # noqa: E731
        words = ("GraphTransformerLayer: edge_bias: ", words)
        yield Case("nn.GraphTransformerLayer", "edge_bias", wrong, ValueError, words, call)
    convs = nn.GraphTransformerConv(6, 4, 2), nn.GraphTransformerConv(6, 4, 2, edge_dim=5)
    for wrong, words, conv, attr in (
        ("without edge_dim", "None without edge_dim, got [9, 5]; make the layer with edge_dim=", convs[0], e),
        ("None", "expected [9, 5], got None", convs[1], None),
        ("of another width", "expected [9, 5], got [9, 4]", convs[1], e[:, 1:]),
    ):
        call = lambda conv=conv, attr=attr: conv(loops, x, edge_attr=attr)  # noqa: E731
        words = ("GraphTransformerConv: edge_attr: ", words)
        yield Case("nn.GraphTransformerConv", "edge_attr", wrong, ValueError, words, call)
    yield Case(
        "nn.EdgeGraphTransformerLayer", "edge_attr", "None", TypeError,
        ("EdgeGraphTransformerLayer: edge_attr: ", "got NoneType"),
        lambda: nn.EdgeGraphTransformerLayer(6, 2)(loops, x, None),
    )  # fmt: skip
    for cls in (nn.GraphTransformerLayer, nn.EdgeGraphTransformerLayer):
        for argument, wrong, words, options in (
            ("feats", "no multiple of the heads", "a multiple of num_heads=3, got 10", dict(feats=10)),
            ("norm", "unknown", "'batch', 'layer' or None, got 'graph'", dict(feats=12, norm="graph")),
        ):
            call = lambda cls=cls, options=options: cls(num_heads=3, **options)  # noqa: E731
            yield Case(
                _where(cls), argument, wrong, ValueError, (f"{cls.__name__}: {argument}: ", words), call
            )


def _constructor_cases(layers):
    """Cases of wrong arguments of constructors. layers: (name, class, right arguments) of each."""
    for layer, cls, right in layers:
        names = ("heads", "num_heads") if "num_heads" in right else ("num_heads", "heads")
        other, name = names
        for argument, wrong, error, words, changes in (
            (other, "the other library's name", TypeError, f"called {name}", {name: None, other: 2}),
            (name, "zero", ValueError, "at least 1, got 0", {name: 0}),
            ("n_head", "no argument", TypeError, "got n_head; did you mean", {"n_head": 2}),
            *(
                (flag, "a string", TypeError, "True or False, got 'no'", {flag: "no"})
                for flag in ("bias", "residual", "add_self_loops", "allow_zero_in_degree")
                if flag in inspect.signature(cls).parameters
            ),
            *(
                (drop, wrong, kind, got, {drop: value})
                for drop in ("dropout", "attn_drop")
                if drop in inspect.signature(cls).parameters
                for wrong, kind, got, value in (
                    ("above 1", ValueError, "a probability in [0, 1], got 1.5", 1.5),
                    ("a string", TypeError, "a number, got '0.5'", "0.5"),
                )
            ),
            *(
                (width, "a string", TypeError, "an integer, got '6'", {width: "6"})
                for width in ("in_feats", "in_channels", "out_feats", "out_channels")
                if width in right
            ),
            *(
                (width, "missing", TypeError, "expected a value, got none", {width: None})
                for width in ("in_feats", "in_channels")
                if width in right
            ),
            (name, "a float", TypeError, "an integer, got 2.0", {name: 2.0}),
            *(
                (size, "zero", ValueError, "at least 1, got 0; is it hidden // heads", {size: 0})
                for size in ("out_feats", "out_channels")
                if size in right
            ),
        ):
            options = {key: value for key, value in (right | changes).items() if value is not None}
            yield Case(
                _where(cls), argument, wrong, error, (f"{layer}: {argument}: ", words),
                lambda cls=cls, options=options: cls(**options),
            )  # fmt: skip


def _dgl_constructor_cases():
    sizes = dict(in_feats=6, out_feats=4, num_heads=2)
    yield from _constructor_cases(
        [
            ("GATConv", nn.dgl.GATConv, sizes),
            ("GATv2Conv", nn.dgl.GATv2Conv, sizes),
            ("DotGatConv", nn.dgl.DotGatConv, sizes),
            ("EdgeGATConv", nn.dgl.EdgeGATConv, sizes | dict(edge_feats=5)),
            ("GraphTransformerConv", nn.GraphTransformerConv, sizes),
            ("GraphTransformerLayer", nn.GraphTransformerLayer, dict(feats=8, num_heads=2)),
        ]
    )
    for layer in ("GATConv", "GATv2Conv", "EdgeGATConv"):
        cls = getattr(nn.dgl, layer)
        options = sizes | dict(activation="relu") | (dict(edge_feats=5) if layer == "EdgeGATConv" else {})
        yield Case(
            f"nn.dgl.{layer}", "activation", "a string", TypeError,
            (f"{layer}: activation: ", "torch.nn.functional.relu", "got 'relu'"),
            lambda cls=cls, options=options: cls(**options),
        )  # fmt: skip
    yield Case(
        "nn.dgl.GATConv", "edge_feat", "no argument", TypeError,
        ("GATConv: edge_feat: ", "this layer has no features of edges; EdgeGATConv"),
        lambda: nn.dgl.GATConv(6, 4, 2)(square(), rand(N_SRC, 6), edge_feat=rand(9, 5)),
    )  # fmt: skip
    yield Case(
        "nn.dgl.EdgeGATConv", "edge_dim", "no argument", TypeError,
        ("EdgeGATConv: edge_dim: ", "did you mean edge_feats?"),
        lambda: nn.dgl.EdgeGATConv(6, edge_dim=5, out_feats=4, num_heads=2),
    )  # fmt: skip
    yield Case(
        "nn.dgl.GlobalAttentionPooling", "gate_nn", "None", TypeError,
        ("GlobalAttentionPooling: gate_nn: ", "a module such as"),
        lambda: nn.dgl.GlobalAttentionPooling(None),
    )  # fmt: skip
    yield Case(
        "nn.dgl.GATConv", "in_channels", "torch_geometric's name", TypeError,
        ("GATConv: in_channels: ", "called in_feats", "dfgnn.nn.pyg"),
        lambda: nn.dgl.GATConv(in_channels=6, out_feats=4, num_heads=2),
    )  # fmt: skip


def _pyg_cases():
    try:
        from dfgnn.nn import pyg
    except ImportError:
        return
    x, edges = rand(N_SRC, 6), torch.stack([SRC, DST])
    layers = {
        "GATConv": pyg.GATConv(6, 4, 2),
        "GATv2Conv": pyg.GATv2Conv(6, 4, 2),
        "TransformerConv": pyg.TransformerConv(6, 4, 2),
        "AGNNConv": pyg.AGNNConv(),
        "SuperGATConv": pyg.SuperGATConv(6, 4, 2),
        "GENConv": pyg.GENConv(6, 4),
        "ResGatedGraphConv": pyg.ResGatedGraphConv(6, 4),
    }
    for layer, module in layers.items():

        def case(argument, wrong, error, words, *inputs, layer=layer, module=module):
            words = (f"{layer}: {argument}", *words)
            return Case(f"nn.pyg.{layer}", argument, wrong, error, words, lambda: module(*inputs))

        yield case("x", "a list", TypeError, ("got list; torch.tensor(x)",), x.tolist(), edges)
        yield case("x", "an array", TypeError, ("got ndarray; torch.from_numpy(x)",), x.numpy(), edges)
        yield case("edge_index", "missing", TypeError, (": expected a value, got none",), x)
        flags = inspect.signature(module.forward).parameters
        if "return_attention_weights" in flags:
            call = lambda module=module: module(x, edges, return_attention_weights="no")  # noqa: E731
            words = f"{layer}: return_attention_weights: expected True or False, got 'no'"
            yield Case(f"nn.pyg.{layer}", "return_attention_weights", "a string", TypeError, (words,), call)
        if "size" in flags and layer != "GENConv":
            call = lambda module=module: module((x, x), edges, size="4")  # noqa: E731
            words = f"{layer}: size: expected a pair (num_src, num_dst) or None, got '4'"
            yield Case(f"nn.pyg.{layer}", "size", "a string", TypeError, (words,), call)
        yield case("x", "of one dimension", ValueError, ("got [4]",), x[:, 0], edges)
        yield case("x", "of integers", TypeError, ("got torch.int64", "float()"), x.long(), edges)
        yield case("x", "swapped with edge_index", TypeError, ("swapped",), edges, x)
        if layer != "AGNNConv":  # it has no weights, so that any width and dtype is right
            yield case("x", "of another width", ValueError, ("6 features", "got 7"), rand(N_SRC, 7), edges)
            yield case("x", "of float64", TypeError, ("torch.float32", "layer.to("), x.double(), edges)
        yield case("edge_index", "a list", TypeError, ("got list",), x, edges.tolist())
        yield case("edge_index", "[E, 2]", ValueError, ("got [5, 2]", "transpose it"), x, edges.T)
        yield case("edge_index", "of floats", TypeError, ("got torch.float32", ".long()"), x, edges.float())
        yield case("edge_index", "beyond the nodes", ValueError, ("got 3", "x has 3 rows"), x[:3], edges)
        yield case("edge_index", "negative", ValueError, ("got -1",), x, edges - 1)
        yield case("x", "of another size than a Graph", ValueError, ("3 destination rows",), x, block())
    attr = rand(EDGES, 5)
    for layer, argument, wrong, error, words, value in (
        ("GATConv", "edge_attr", "one row too few", ValueError, "got [4, 5]", attr[1:]),
        ("GATConv", "edge_attr", "complex", TypeError, "got torch.complex64", attr.to(torch.complex64)),
        ("TransformerConv", "edge_attr", "of integers", TypeError, "got torch.int64", attr.long()),
        ("TransformerConv", "edge_attr", "of another width", ValueError, "5 features", rand(EDGES, 4)),
        ("TransformerConv", "edge_attr", "None", ValueError, "got None", None),
        ("GATv2Conv", "edge_attr", "one row too few", ValueError, "got [4, 5]", attr[1:]),
        ("GATConv", "edge_attr", "a number", TypeError, "got float", 3.0),
    ):
        module = getattr(pyg, layer)(6, 4, 2, edge_dim=5)
        call = lambda module=module, value=value: module(x, edges, value)  # noqa: E731
        yield Case(f"nn.pyg.{layer}", argument, wrong, error, (f"{layer}: {argument}: ", words), call)
    without = "TransformerConv", "None in a layer without edge_dim, or a tensor that broadcasts to [5, 2, 4]"
    for layer, words in (without, ("GATv2Conv", "None in a layer without edge_dim")):
        module = getattr(pyg, layer)(6, 4, 2)
        call = lambda module=module: module(x, edges, attr[:, :3])  # noqa: E731
        words = (f"{layer}: edge_attr: ", words)
        yield Case(f"nn.pyg.{layer}", "edge_attr", "without edge_dim", ValueError, words, call)
        call = lambda module=module: module((x, None), edges)  # noqa: E731
        words = (f"{layer}: x", "got None for x[1]")
        yield Case(f"nn.pyg.{layer}", "x", "of sources alone", ValueError, words, call)
    # The mean that loops get would make numbers of integers.
    no_loops = pyg.GATConv(6, 4, 2, edge_dim=5, add_self_loops=False)
    yield Case(
        "nn.pyg.GATConv", "edge_attr", "of integers, without loops", TypeError,
        ("GATConv: edge_attr: ", "got torch.int64", ".float()"), lambda: no_loops(x, edges, attr.long()),
    )  # fmt: skip
    yield from _pyg_typed_cases(x, edges)
    sizes = dict(in_channels=6, out_channels=4, heads=2)
    names = "GATConv", "GATv2Conv", "TransformerConv", "SuperGATConv"
    yield from _constructor_cases([(name, getattr(pyg, name), sizes) for name in names])
    yield Case(
        "nn.pyg.GATConv", "in_feats", "DGL's name", TypeError,
        ("GATConv: in_feats: ", "called in_channels", "dfgnn.nn.dgl"),
        lambda: pyg.GATConv(in_feats=6, out_channels=4),
    )  # fmt: skip


def _pyg_typed_cases(x, edges):
    """Cases of layers that need attributes or types of edges."""
    from torch_geometric.data import Data

    from dfgnn.nn import pyg

    gps = pyg.GPSConv(6, None, heads=2)
    rgat = pyg.RGATConv(6, 4, 3)
    for wrong, words, kinds in (
        ("too short", "got [4]", torch.zeros(4, dtype=torch.int64)),
        ("too large", "got 3", torch.full((EDGES,), 3)),
    ):
        call = lambda kinds=kinds: rgat(x, edges, kinds)  # noqa: E731
        yield Case("nn.pyg.RGATConv", "edge_type", wrong, ValueError, ("RGATConv: edge_type", words), call)
    hgt = pyg.HGTConv(6, 4, (["a"], [("a", "r", "a")]), heads=2)
    for wrong, error, words, value in (
        ("of another width", ValueError, "6 features", rand(N_SRC, 7)),
        ("of float64", TypeError, "layer.to(", x.double()),
        ("a list", TypeError, "got list", x.tolist()),
    ):
        call = lambda value=value: hgt({"a": value}, {("a", "r", "a"): edges})  # noqa: E731
        yield Case("nn.pyg.HGTConv", "x_dict", wrong, error, ("HGTConv: x_dict['a']: expected", words), call)
    han = pyg.HANConv(6, 4, (["a"], [("a", "r", "a")]), heads=2)
    for layer in (hgt, han):
        name = type(layer).__name__
        for argument, wrong, error, words, inputs in (
            ("x_dict", "a tensor", TypeError, "expected a dict, of each node type", (x, {})),
            ("edge_index_dict", "a tensor", TypeError, "expected a dict, of each edge", ({"a": x}, edges)),
        ):
            call = lambda layer=layer, inputs=inputs: layer(*inputs)  # noqa: E731
            yield Case(f"nn.pyg.{name}", argument, wrong, error, (f"{name}: {argument}: ", words), call)
    for argument, wrong, words, inputs in (
        ("x_dict", "of no metadata", "node types of the metadata ['a'], got b", ({"b": x}, {})),
        ("edge_index_dict", "a string", "got 'a__r__a'", ({"a": x}, {"a__r__a": edges})),
        ("edge_index_dict", "of no metadata", "got ('a', 'q', 'a')", ({"a": x}, {("a", "q", "a"): edges})),
        ("x_dict", "without features", "expected features of 'a' too", ({}, {("a", "r", "a"): edges})),
    ):
        call = lambda inputs=inputs: han(*inputs)  # noqa: E731
        yield Case("nn.pyg.HANConv", argument, wrong, ValueError, (f"HANConv: {argument}: ", words), call)
    for layer, argument, options in (
        ("SuperGATConv", "attention_type", {}), ("RGATConv", "attention_mode", dict(num_relations=2)),
        ("RGATConv", "attention_mechanism", dict(num_relations=2)),
    ):  # fmt: skip
        cls, options = getattr(pyg, layer), options | {argument: "mlp"}
        call = lambda cls=cls, options=options: cls(6, 4, **options)  # noqa: E731
        words = f"{layer}: {argument}: expected one of ", "got 'mlp'"
        yield Case(f"nn.pyg.{layer}", argument, "unknown", ValueError, words, call)
    index, names = torch.zeros(N_SRC), ("softmx", "did you mean 'softmax'?")
    for layer, argument, wrong, error, words, call in (
        ("SoftmaxAggregation", "index", "of floats", TypeError, "torch.float32; convert it with index.long()",
         lambda: pyg.SoftmaxAggregation()(x, index)),
        ("SoftmaxAggregation", "x", "an array", TypeError, "torch.from_numpy(x)",
         lambda: pyg.SoftmaxAggregation()(x.numpy(), index.long())),
        ("SoftmaxAggregation", "index", "an array", TypeError, "torch.from_numpy(index)",
         lambda: pyg.SoftmaxAggregation()(x, index.long().numpy())),
        ("AttentionalAggregation", "gate_nn", "None", TypeError, "a module such as",
         lambda: pyg.AttentionalAggregation(None)),
        ("SoftmaxAggregation", "index", "beyond dim_size", ValueError, "in [0, dim_size=4), got 5",
         lambda: pyg.SoftmaxAggregation()(x, index.long() + 5, dim_size=4)),
        ("AttentionalAggregation", "ptr", "too short", ValueError, "len(x) = 4, got 2",
         lambda: pyg.AttentionalAggregation(torch.nn.Linear(6, 1))(x, ptr=torch.tensor([0, 2]))),
        ("GATConv", "fill_value", "misspelt", ValueError, "one of mean, add,",
         lambda: pyg.GATConv(6, 4, edge_dim=5, fill_value="average")),
        ("HGTConv", "metadata", "swapped", ValueError, "as data.metadata() has them, got",
         lambda: pyg.HGTConv(6, 4, ([("a", "r", "a")], ["a"]))),
        ("HANConv", "metadata", "of nodes alone", ValueError, "got ['a']", lambda: pyg.HANConv(6, 4, ["a"])),
        ("HGTConv", "out_channels", "no multiple", ValueError, "a multiple of heads=2, got 9",
         lambda: pyg.HGTConv(6, 9, (["a"], [("a", "r", "a")]), heads=2)),
        ("GPSConv", "channels", "no multiple", ValueError, "a multiple of heads=4, got 6",
         lambda: pyg.GPSConv(6, None, heads=4)),
        ("GPSConv", "batch", "unsorted", ValueError, "got 1 before 0 at position 1",
         lambda: gps(x, edges, torch.tensor([0, 1, 0, 1]))),
        ("FAConv", "x_0", "of another width", ValueError, "expected shape [4, 6], as x, got [4, 5]",
         lambda: pyg.FAConv(6)(x, x[:, :5], edges)),
        ("RGATConv", "edge_type", "one-hot", ValueError, "edge_type.argmax(1)",
         lambda: rgat(x, edges, torch.eye(5, 3, dtype=torch.int64))),
        ("TransformerConv", "edge_index", "a Data", TypeError, "data.x and data.edge_index",
         lambda: pyg.TransformerConv(6, 4)(Data(x=x, edge_index=edges))),
        ("GENConv", "aggr", "misspelt", ValueError, names[1], lambda: pyg.GENConv(6, 4, aggr=names[0])),
        ("GPSConv", "act", "misspelt", ValueError, names[1], lambda: pyg.GPSConv(6, None, act=names[0])),
        ("GATEConv", "out_channels", "other than in_channels", ValueError, "expected in_channels=6",
         lambda: pyg.GATEConv(6, 4, 5)(x, edges, rand(EDGES, 5))),
        ("ResGatedGraphConv", "edge_attr", "without edge_dim", ValueError, "make the layer with edge_dim=",
         lambda: pyg.ResGatedGraphConv(6, 4)(x, edges, rand(EDGES, 5))),
    ):  # fmt: skip
        yield Case(f"nn.pyg.{layer}", argument, wrong, error, (f"{layer}: {argument}: ", words), call)
    for wrong, words, value in (
        ("of floats", "got torch.float32", torch.zeros(N_SRC)), ("a list", "got list", [0] * N_SRC),
    ):  # fmt: skip
        call = lambda value=value: gps(x, edges, value)  # noqa: E731
        yield Case("nn.pyg.GPSConv", "batch", wrong, TypeError, ("GPSConv: batch: expected", words), call)
    relation = "a", "r", "a"
    named = {"a": x}
    for wrong, error, words, x_dict, given in (
        ("empty", ValueError, "edge_index_dict: expected at least one edge type", named, {}),
        (
            "of no metadata",
            ValueError,
            "expected edge types of the metadata",
            named,
            {("a", "q", "a"): edges},
        ),
        ("without features", ValueError, "x_dict: expected features of 'a' too", {}, {relation: edges}),
        ("a list", TypeError, "edge_index: expected a", named, {relation: edges.tolist()}),
        ("of one row", ValueError, "edge_index: expected shape [2, *]", named, {relation: edges[:1]}),
        ("of floats", TypeError, "edge_index: expected dtype", named, {relation: edges.float()}),
        (
            "negative",
            ValueError,
            "'r', 'a']: edge_index[0]: expected values in",
            named,
            {relation: edges - 1},
        ),
    ):
        call = lambda x_dict=x_dict, given=given: hgt(x_dict, given)  # noqa: E731
        yield Case("nn.pyg.HGTConv", "edge_index_dict", wrong, error, ("HGTConv: ", words), call)
    attr, kinds, types = rand(EDGES, 5), torch.zeros(EDGES, dtype=torch.int64), torch.zeros(N_SRC).long()
    right = {
        "GATEConv": (pyg.GATEConv(6, 6, 5), dict(edge_attr=attr)),
        "HEATConv": (
            pyg.HEATConv(6, 4, 2, 3, 2, 5, 4, heads=2),
            dict(node_type=types, edge_type=kinds, edge_attr=attr),
        ),
        "RGATConv": (pyg.RGATConv(6, 4, 3, edge_dim=5), dict(edge_type=kinds, edge_attr=attr)),
        "GeneralConv": (pyg.GeneralConv(6, 4, attention=True), {}),
        "RGATConv with bases": (pyg.RGATConv(6, 4, 3, num_bases=2), dict(edge_type=kinds)),
        "RGATConv with blocks": (pyg.RGATConv(6, 4, 3, num_blocks=2), dict(edge_type=kinds)),
    }
    for layer, argument, wrong, error, words, value in (
        *(
            (layer, "edge_attr", *case)
            for layer in ("GATEConv", "HEATConv")
            for case in (
                ("None", ValueError, "got None", None),
                ("a list", TypeError, "got list", attr.tolist()),
                ("one row too few", ValueError, "got [4, 5]", attr[1:]),
                ("of another width", ValueError, "5 features per row", attr[:, 1:]),
                ("of one dimension", ValueError, "got 1 in [5, 1]", attr[:, 0]),
                ("complex", TypeError, "got torch.complex64", attr.to(torch.complex64)),
                ("of float64", TypeError, "edge_attr.to(torch.float32)", attr.double()),
            )
        ),
        # GATEConv promotes them, as torch_geometric's does.
        ("HEATConv", "edge_attr", "of integers", TypeError, "got torch.int64", attr.long()),
        ("HEATConv", "edge_type", "a list", TypeError, "got list", kinds.tolist()),
        ("HEATConv", "edge_type", "of floats", TypeError, "got torch.float32", kinds.float()),
        ("HEATConv", "edge_type", "too short", ValueError, "got [4]", kinds[1:]),
        ("HEATConv", "edge_type", "too large", ValueError, "[0, 3), got 3", kinds + 3),
        ("HEATConv", "edge_type", "negative", ValueError, "got -1", kinds - 1),
        ("HEATConv", "node_type", "None", TypeError, "got NoneType", None),
        ("HEATConv", "node_type", "of floats", TypeError, "got torch.float32", types.float()),
        ("HEATConv", "node_type", "too long", ValueError, "got [5]", kinds),
        ("HEATConv", "node_type", "too large", ValueError, "[0, 2), got 2", types + 2),
        ("HEATConv", "node_type", "negative", ValueError, "got -1", types - 1),
        *(
            (layer, "x", *case)
            for layer in ("HEATConv", "RGATConv", "RGATConv with bases", "RGATConv with blocks")
            for case in (
                ("of another width", ValueError, "6 features", rand(N_SRC, 7)),
                ("of float64", TypeError, "layer.to(", x.double()),
            )
        ),
        ("RGATConv", "edge_attr", "of float64", TypeError, "layer.to(", attr.double()),
        ("RGATConv", "edge_attr", "a number", TypeError, "got float", 3.0),
        ("RGATConv", "edge_attr", "one row too few", ValueError, "got [4, 5]", attr[1:]),
        ("RGATConv", "edge_type", "None", ValueError, "edge_index has no values, got None", None),
        ("RGATConv", "edge_type", "a list", TypeError, "got list", kinds.tolist()),
        ("RGATConv", "edge_type", "of floats", TypeError, "got torch.float32", kinds.float()),
        ("RGATConv", "edge_type", "negative", ValueError, "got -1", kinds - 1),
        ("RGATConv", "x", "of sources alone", ValueError, "features of the destinations, too", (x, None)),
        ("RGATConv with bases", "edge_attr", "without edge_dim", ValueError, "expected None", attr),
        *(
            (layer, argument, *case)
            for layer in ("GATEConv", "HEATConv", "RGATConv", "GeneralConv")
            for argument, *case in (
                ("x", "a list", TypeError, "got list", x.tolist()),
                ("x", "None", TypeError, "got NoneType", None),
                ("x", "of four dimensions", ValueError, "[N, F] or [B, N, F]", x[None, None]),
                ("edge_index", "of floats", TypeError, "got torch.float32", edges.float()),
                ("edge_index", "of one row", ValueError, "got [1, 5]", edges[:1]),
                ("edge_index", "a list", TypeError, "got list", edges.tolist()),
                ("edge_index", "negative", ValueError, "got -1", edges - 1),
            )
        ),
    ):
        module, options = right[layer]
        options = {"x": x, "edge_index": edges} | options | {argument: value}
        call = lambda module=module, options=options: module(**options)  # noqa: E731
        raised = f"{layer.split()[0]}: {argument}", words
        yield Case(f"nn.pyg.{layer}", argument, wrong, error, raised, call)


def cases():
    return [*_layer_cases(), *_dgl_constructor_cases(), *_pyg_cases()]
