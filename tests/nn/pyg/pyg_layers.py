"""What the contract of test_contract.py has to know of each layer of dfgnn.nn.pyg: its options and inputs.

A subject makes the layer beside torch_geometric's, and inputs for both. Its attributes say what it takes.
"""

import random

import torch
from covering import EXHAUSTIVE, covering
from pyg_compare import (
    TOLERANCE,
    assert_same,
    compare,
    edges,
    inject_dropout,
    run,
    sparse_forms,
    torch_geometric,
)
from pyg_compare import pair as plain_pair

from dfgnn.nn import pyg

BOTH = True, False
STRENGTH = 3 if EXHAUSTIVE else 2  # `strength` of `covering` for the options of constructors
DTYPES = torch.float32, torch.float64
SPARSE = "coo", "csr"
EDGE_INDEX = "EdgeIndex", "EdgeIndex by row", "EdgeIndex by col"
SIZES = {"random": 50, "complete": 24, "no edges": 4, "no nodes": 0}
BIPARTITE = {"fewer_sources": (30, 80), "fewer_destinations": (80, 30)}


def graph_edges(name, distinct=False):
    """edge_index and the numbers of sources and of destinations; some nodes of most graphs are isolated."""
    if name in ("no edges", "no nodes"):
        return torch.zeros(2, 0, dtype=torch.long), SIZES[name], SIZES[name]
    edge_index = edges(name)
    if distinct:
        edge_index = torch.unique(edge_index, dim=1)
    num_nodes = SIZES.get(name, int(edge_index.max()) + 3)
    return edge_index, *BIPARTITE.get(name, (num_nodes, num_nodes))


def in_form(edge_index, num_src, num_dst, form, values=None):
    if form in SPARSE:
        return sparse_forms(edge_index, num_src, num_dst, values)[form]
    if form.startswith("EdgeIndex"):
        edge_index = torch_geometric.EdgeIndex(edge_index, sparse_size=(num_src, num_dst))
        _, _, order = form.partition(" by ")
        return edge_index.sort_by(order).values if order else edge_index
    return edge_index


class Subject:
    args = 9, 5, 2  # of the constructor
    low_args = 9, 8, 2  # of the constructor in the cases of low precision
    base = {}  # options of the constructor that are added in every case
    # Name -> options of the constructor: the variants of the layer that test_contract.py goes through.
    kinds = {"default": {}}
    # Cases of the test of all options of the constructor; "args" are its positional arguments.
    constructor = covering(dtype=DTYPES)
    graphs = "duplicates", "self_loops", "isolated", "super_row", "mixed_degrees", "power_law", "sorted"
    pairs = []  # (positional arguments, options) of layers for bipartite graphs
    states = [((9, 5, 2), {})]  # (positional arguments, options) of layers whose state_dict is compared
    lazy = []  # the same for layers that are completed by their first call
    low = {"default": {}}  # name -> options of the constructor in the cases of low precision
    # Arguments of a layer whose tensors [E, H, D] would be seen in the peak memory; None: it has them.
    large = (16, 32, 8), {}
    has_attention = True  # return_attention_weights is taken
    has_dropout = True
    has_concat = True

    def __init__(self):
        self.name = type(self).__name__
        self.theirs, self.ours = getattr(torch_geometric.nn, self.name), getattr(pyg, self.name)

    def pair(self, *args, dtype=torch.float64, **options):
        return self.prepared(
            *plain_pair(self.theirs, self.ours, *(args or self.args), dtype=dtype, **self.base | options)
        )

    def prepared(self, theirs, ours):
        """The pair of layers, with new values for parameters whose initial values would hide an error."""
        return theirs, ours

    def inputs(
        self, graph="random", form="tensor", dtype=torch.float64, in_channels=None, edge_dim=None, **options
    ):
        """Arguments of forward; the edges are distinct where ``form`` is a sparse matrix."""
        edge_index, num_src, num_dst = graph_edges(graph, form in SPARSE)
        in_channels = self.args[0] if in_channels is None else in_channels
        x = torch.randn(num_src, in_channels if isinstance(in_channels, int) else in_channels[0], dtype=dtype)
        if num_src != num_dst or not isinstance(in_channels, int):
            width = in_channels if isinstance(in_channels, int) else in_channels[1]
            x = x, torch.randn(num_dst, width, dtype=dtype)
        num_edges = edge_index.shape[1]
        attr = None if edge_dim is None else torch.randn(num_edges, edge_dim, dtype=dtype)
        return x, *self.edge_arguments(edge_index, num_src, num_dst, form, attr)

    def edge_arguments(self, edge_index, num_src, num_dst, form, attr):
        given = in_form(edge_index, num_src, num_dst, form, attr)
        return (given,) if attr is None or form in SPARSE else (given, attr)

    def forms(self):
        """(form of the edges, kind of the layer): every kind with each sparse form, one with each other."""
        kinds = list(self.kinds)
        pairs = [(form, kind) for form in SPARSE for kind in kinds]
        return pairs + [(form, kinds[k % len(kinds)]) for k, form in enumerate(EDGE_INDEX)]

    def check(self, layers, inputs, ours=None, asked=True, tolerance=None):
        """Outputs, gradients and, where it can be had, attention. ours: the same inputs in another form."""
        asked = {"return_attention_weights": True} if asked and self.has_attention else {}
        compare(*layers, *inputs, our_args=ours, tolerance=tolerance, **asked)

    def wrapped(self, layer):
        """A module whose outputs are all that the layer gives."""
        return layer

    def inject_dropout(self, monkeypatch, ours):
        src, dst = edges()
        num_edges = len(src)
        if getattr(ours, "add_self_loops", False):
            num_edges = int((src != dst).sum()) + SIZES["random"]
        inject_dropout(monkeypatch, ours, num_edges, ours.heads * getattr(ours, "dim", 1))


class GATConv(Subject):
    base = {"residual": True}
    kinds = {
        f"{'' if loops else 'no '}loops{' attributes' if edge_dim else ''}": {
            "add_self_loops": loops,
            "edge_dim": edge_dim,
        }
        for loops in BOTH
        for edge_dim in (None, 3)
    }
    constructor = covering(
        STRENGTH, concat=BOTH, residual=BOTH, bias=BOTH, add_self_loops=BOTH, edge_dim=(None, 4),
        args=((6, 5), (40, 5, 2), (6, 5, 3)), negative_slope=(0.2, 0.05), dtype=DTYPES,
    )  # fmt: skip
    pairs = [
        ((sizes, 5, 2), {"edge_dim": 3, "fill_value": 0.7, "add_self_loops": loops})
        for sizes in ((9, 6), (40, 40), 9)
        for loops in BOTH
    ]
    states = [((sizes, 5, 2), {"edge_dim": 3}) for sizes in (9, (9, 6))]
    lazy = [((sizes, 5, 2), {"edge_dim": -1}) for sizes in (-1, (-1, -1))]
    low = {"default": {}, "attributes": {"edge_dim": 3}}


class GATv2Conv(GATConv):
    constructor = covering(
        STRENGTH, concat=BOTH, residual=BOTH, bias=BOTH, add_self_loops=BOTH, share_weights=BOTH,
        edge_dim=(None, 4), args=((6, 5), (6, 5, 2), (6, 5, 3)), negative_slope=(0.2, 0.05), dtype=DTYPES,
    )  # fmt: skip
    pairs = [
        ((sizes, 5, 2), {"edge_dim": 3, "fill_value": 0.3, "share_weights": sizes == (9, 9)})
        for sizes in ((9, 6), (9, 9), 9)
    ]
    states = GATConv.states + [((9, 5, 2), {"edge_dim": 3, "share_weights": True})]
    lazy = GATConv.lazy + [((-1, 5, 2), {"edge_dim": -1, "share_weights": True})]


class TransformerConv(Subject):
    kinds = {"default": {}, "attributes": {"edge_dim": 3}}
    constructor = covering(
        STRENGTH, concat=BOTH, beta=BOTH, bias=BOTH, root_weight=BOTH, edge_dim=(None, 4),
        args=((6, 5), (6, 5, 2), (6, 5, 3)), dtype=DTYPES,
    )  # fmt: skip
    pairs = [((sizes, 5, 2), {"edge_dim": 3, "beta": True}) for sizes in ((9, 6), 9)]
    pairs += [((sizes, 5, 2), {}) for sizes in ((9, 6),)]
    states = [((sizes, 5, 2), {"edge_dim": 3, "beta": True}) for sizes in (9, (9, 6))]
    lazy = [((-1, 5, 2), {"edge_dim": -1, "beta": True})]
    low = {"default": {}, "attributes": {"edge_dim": 3, "beta": True}}


class AGNNConv(Subject):
    args = low_args = ()
    kinds = {"loops": {"add_self_loops": True}, "no loops": {"add_self_loops": False}}
    constructor = covering(requires_grad=BOTH, add_self_loops=BOTH, dtype=DTYPES)
    states = [((), {"requires_grad": requires_grad}) for requires_grad in BOTH]
    large = (), {}
    has_attention = has_dropout = has_concat = False

    def prepared(self, theirs, ours):
        theirs.beta.data.fill_(1.7), ours.beta.data.fill_(1.7)
        return theirs, ours

    def inputs(self, *args, in_channels=9, **options):
        return super().inputs(*args, in_channels=in_channels, **options)


class WithLoss(torch.nn.Module):
    """A SuperGATConv in training: also returns the loss, logits and labels that the layer keeps as
    attributes, for the same random samples each time."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        torch.manual_seed(1)
        random.seed(1)
        out = self.layer(*args, **kwargs)
        return out, self.layer.get_attention_loss(), self.layer.att_x, self.layer.att_y


class SuperGATConv(Subject):
    kinds = {
        f"{kind}{'' if loops else ' no loops'}": {"attention_type": kind, "add_self_loops": loops}
        for kind in ("MX", "SD")
        for loops in BOTH
    }
    constructor = covering(
        STRENGTH, attention_type=("MX", "SD"), concat=BOTH, add_self_loops=BOTH, bias=BOTH,
        edge_sample_ratio=(1.0, 0.6), neg_sample_ratio=(0.5, 1.5), is_undirected=BOTH,
        args=((6, 5), (40, 5, 2), (6, 5, 3)), negative_slope=(0.2, 0.05), dtype=DTYPES,
    )  # fmt: skip
    states = [((9, 5, 2), {"attention_type": kind}) for kind in ("MX", "SD")]
    lazy = [((-1, 5, 2), {})]
    low = {kind: {"attention_type": kind} for kind in ("MX", "SD")}
    has_attention = False

    def check(self, layers, inputs, ours=None, asked=True, tolerance=None):
        """Checks in eval mode, and in training mode if torch_geometric can sample from edges in this form."""
        training = [layer.training for layer in layers]
        theirs = inputs
        if isinstance(inputs[1], torch_geometric.EdgeIndex):
            theirs, ours = (inputs[0], inputs[1].as_tensor()), ours or inputs
        compare(*(layer.eval() for layer in layers), *theirs, our_args=ours, tolerance=tolerance)
        for layer, was in zip(layers, training):
            layer.train(was)
        if all(training) and inputs[1].layout == torch.strided and inputs[1].numel():
            self.check_training(layers, theirs, ours=ours, tolerance=tolerance)

    def check_training(self, layers, inputs, ours=None, tolerance=None, **kwargs):
        theirs_layer, ours_layer = layers
        assert theirs_layer.training and ours_layer.training and type(ours_layer).why_not(ours_layer) is None
        tolerance = TOLERANCE[theirs_layer.lin.weight.dtype] if tolerance is None else tolerance
        expected = run(WithLoss(theirs_layer), *inputs, **kwargs)
        assert_same(run(WithLoss(ours_layer), *(ours or inputs), **kwargs), expected, tolerance)

    def wrapped(self, layer):
        return WithLoss(layer)

    def inject_dropout(self, monkeypatch, ours):
        super().inject_dropout(monkeypatch, ours)
        seed = torch.tensor([21])
        attention = type(ours).dot_attention
        ours.dot_attention = lambda *args, **kwargs: attention(*args, **kwargs, generator=seed)


MODES = {"additive": "additive-self-attention", "multiplicative": "multiplicative-self-attention"}
MECHANISMS = {"within": "within-relation", "across": "across-relation"}
NUM_RELATIONS = 6


def edge_types(num_edges, dtype=torch.int64):
    """A random type of each edge, 0, 1, 3 or 4; no edge has type 2, and few have type 4."""
    generator = torch.Generator().manual_seed(0)
    edge_type = torch.tensor([0, 1, 1, 3])[torch.randint(4, (num_edges,), generator=generator)]
    edge_type[:3] = 4
    return edge_type.to(dtype)


def _relational_options():
    rows = covering(
        attention_mode=tuple(MODES.values()), attention_mechanism=tuple(MECHANISMS.values()),
        mod=(None, "additive", "scaled", "f-additive", "f-scaled"), edge_dim=(None, 4),
        decomposition=({}, {"num_bases": 3}, {"num_blocks": 2}), concat=BOTH, heads=(1, 2, 3), dim=(1, 3),
        bias=BOTH, negative_slope=(0.2, 0.05), args=((8, 4, NUM_RELATIONS),), dtype=DTYPES,
    )  # fmt: skip
    for row in rows:
        row |= row.pop("decomposition")
        if row["attention_mode"] == MODES["additive"]:
            row["dim"] = 1
    return rows


class RGATConv(Subject):
    args = 6, 5, NUM_RELATIONS
    low_args = 8, 8, NUM_RELATIONS
    base = {"heads": 2}
    kinds = {
        f"{mode} {mechanism}": {"attention_mode": MODES[mode], "attention_mechanism": MECHANISMS[mechanism]}
        for mode in MODES
        for mechanism in MECHANISMS
    }
    constructor = _relational_options()
    pairs = [((6, 5, NUM_RELATIONS), kind | {"mod": "scaled"}) for kind in kinds.values()]
    states = [
        ((6, 4, NUM_RELATIONS), kind | decomposition | {"edge_dim": 3})
        for kind in kinds.values()
        for decomposition in ({}, {"num_bases": 2}, {"num_blocks": 2})
    ]
    low = {
        "-".join(map(str, options.values())): options | {"edge_dim": 8}
        for options in covering(
            attention_mode=tuple(MODES.values()),
            attention_mechanism=tuple(MECHANISMS.values()),
            mod=(None, "additive", "scaled", "f-additive"),
            concat=BOTH,
        )
    }
    large = (16, 32, NUM_RELATIONS), {"heads": 8}

    def prepared(self, theirs, ours):
        """torch_geometric leaves the parameter l2 uninitialised."""
        torch.nn.init.normal_(theirs.l2)
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours

    def edge_arguments(self, edge_index, num_src, num_dst, form, attr):
        types = edge_types(edge_index.shape[1])
        if form in SPARSE:
            values = types.flip(0) if attr is None else attr  # the argument takes precedence over values
            return in_form(edge_index, num_src, num_dst, form, values), types
        return (in_form(edge_index, num_src, num_dst, form), types) + (() if attr is None else (attr,))


NODES = {"a": 20, "b": 15, "c": 30, "d": 7}
# c is only a source, and few of its nodes have edges; none leads from d; two relations join the same types.
RELATIONS = [
    ("a", "x", "b"),
    ("b", "y", "a"),
    ("a", "z", "a"),
    ("c", "x", "a"),
    ("a", "w", "b"),
    ("b", "x", "d"),
]
METADATA = list(NODES), RELATIONS
WIDTHS = {"a": 8, "b": 5, "c": 9, "d": 12}


def typed_features(widths=8, dtype=torch.float64, sizes=NODES):
    widths = widths if isinstance(widths, dict) else dict.fromkeys(sizes, widths)
    return {name: torch.randn(size, widths[name], dtype=dtype) for name, size in sizes.items()}


def typed_edges(dtype=torch.int64, num_edges=60):
    """edge_index by relation: random edges, some repeated; some destinations have none."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for src, name, dst in RELATIONS:
        ends = [torch.randint(NODES[end] - 2, (num_edges,), generator=generator) for end in (src, dst)]
        found[src, name, dst] = torch.stack(ends).to(dtype)
    found["c", "x", "a"][0] %= 5
    return found


class HGTConv(Subject):
    args = low_args = 8, 8, METADATA, 2
    constructor = covering(
        args=[
            (in_channels, out_channels, METADATA, heads)
            for in_channels in (8, 12, WIDTHS)
            for out_channels, heads in ((8, 1), (12, 3), (8, 8), (16, 2))
        ],
        dtype=DTYPES,
    )
    graphs = 1, 7, 900  # edges of each type
    states = [((in_channels, 8, METADATA, 2), {}) for in_channels in (8, WIDTHS)]
    lazy = [((-1, 8, METADATA, 2), {})]
    large = (16, 256, METADATA, 8), {}
    has_attention = has_dropout = has_concat = False

    def prepared(self, theirs, ours):
        """skip and p_rel start at one: they get other values."""
        for name, parameter in theirs.named_parameters():
            if name.startswith(("skip", "p_rel")):
                torch.nn.init.normal_(parameter)
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours

    def inputs(self, graph="random", form="tensor", dtype=torch.float64, in_channels=8, **options):
        if not isinstance(in_channels, dict) and in_channels < 0:
            in_channels = WIDTHS
        sizes = dict.fromkeys(NODES, 0) if graph == "no nodes" else NODES
        num_edges = {"random": 60, "super_row": 1500, "no edges": 0, "no nodes": 0}.get(graph, graph)
        given = {}
        for edge_type, index in typed_edges(num_edges=num_edges).items():
            index = torch.unique(index, dim=1) if form in SPARSE else index
            given[edge_type] = in_form(index, sizes[edge_type[0]], sizes[edge_type[2]], form)
        return typed_features(in_channels, dtype, sizes), given

    def check(self, layers, inputs, ours=None, asked=True, tolerance=None):
        x, given = inputs
        if any(isinstance(index, torch_geometric.EdgeIndex) for index in given.values()):
            # torch_geometric cannot join EdgeIndex tensors of several relations: it gets plain tensors.
            inputs, ours = (x, {name: index.as_tensor() for name, index in given.items()}), inputs
        super().check(layers, inputs, ours, asked, tolerance)


class Unasked(Subject):
    """A layer that returns no attention, holds rows of edges, and whose dropout is tested in its own file."""

    has_attention = has_concat = has_dropout = False
    large = None


class ResGatedGraphConv(Unasked):
    args = 9, 5
    low_args = 8, 16
    kinds = {"default": {}, "mean": {"aggr": "mean"}, "attributes": {"edge_dim": 3}}
    constructor = covering(
        aggr=("add", "mean"), root_weight=BOTH, bias=BOTH, edge_dim=(None, 4), args=((9, 5), (6, 8)),
        dtype=DTYPES,
    )  # fmt: skip
    pairs = [(((9, 4), 5), {"aggr": "mean", "edge_dim": edge_dim}) for edge_dim in (None, 3)]
    states = [((9, 5), {}), (((9, 4), 5), {"edge_dim": 3})]
    lazy = [((sizes, 5), {}) for sizes in (-1, (-1, -1))]
    low = {"default": {}, "mean": {"aggr": "mean"}}


class GATEConv(Unasked):
    args = low_args = 8, 8, 3
    constructor = covering(args=((8, 8, 3), (5, 5, 3)), dtype=DTYPES)
    states = [((8, 8, 3), {})]

    def __init__(self):
        self.name, self.ours = "GATEConv", pyg.GATEConv
        self.theirs = torch_geometric.nn.models.attentive_fp.GATEConv

    def inputs(self, *args, edge_dim=3, **options):
        return super().inputs(*args, edge_dim=edge_dim, **options)

    def forms(self):
        return [(form, "default") for form in EDGE_INDEX]


class HEATConv(Unasked):
    args = low_args = 8, 8, 3, 4, 7, 6, 2  # 3 types of nodes, 4 of edges
    base = {"heads": 2}
    kinds = {"default": {}, "mean": {"concat": False}}
    constructor = covering(
        concat=BOTH, root_weight=BOTH, bias=BOTH, heads=(1, 3), negative_slope=(0.2, 0.05),
        args=((8, 8, 3, 4, 7, 6, 2), (9, 5, 3, 4, 7, 6, 2)), dtype=DTYPES,
    )  # fmt: skip
    states = [(args, {}), (args, {"concat": False})]

    def edge_arguments(self, edge_index, num_src, num_dst, form, attr):
        num_edges = edge_index.shape[1]
        kinds = torch.arange(num_src) * 7 % 3, edge_types(num_edges).clamp(max=3)
        return in_form(edge_index, num_src, num_dst, form), *kinds, attr

    def inputs(self, *args, edge_dim=6, **options):
        return super().inputs(*args, edge_dim=edge_dim, **options)

    def forms(self):
        return [(form, "default") for form in EDGE_INDEX]


class GeneralConv(Unasked):
    args = 9, 5
    low_args = 8, 8
    base = {"attention": True, "heads": 3}
    kinds = {
        "default": {},
        "attributes": {"in_edge_channels": 3},
        "both ends": {"in_edge_channels": 3, "directed_msg": False, "bias": False},
        "products": {"attention_type": "dot_product"},
        "normalized": {"skip_linear": True, "l2_normalize": True, "in_edge_channels": 7},
    }
    constructor = [options | {"heads": 1, "dtype": torch.float32} for options in kinds.values()]
    pairs = [(((9, 6), 5), {}), (((9, 6), 5), {"in_edge_channels": 3})]
    states = [((9, 5), options) for options in kinds.values()]
    low = {"default": {}, "attributes": {"in_edge_channels": 3}}

    def inputs(self, *args, in_edge_channels=None, **options):
        return super().inputs(*args, edge_dim=in_edge_channels, **options)


LAYERS = (
    *(GATConv, GATv2Conv, TransformerConv, AGNNConv, SuperGATConv, RGATConv, HGTConv),
    *(ResGatedGraphConv, GATEConv, HEATConv, GeneralConv),
)
SUBJECTS = [layer() for layer in LAYERS]
