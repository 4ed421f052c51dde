"""The layers of dfgnn.nn.pyg and torch_geometric's, as subjects of test_like_upstream.py.

A test that imports this module is skipped where torch_geometric is missing.
"""

import random
import sys
import types

import torch
from beside import BOTH, TOLERANCE, Subject, assert_same, compare, run
from edge_forms import BIPARTITE, SIZES, SPARSE, as_int32, edges, graph_edges, in_form, torch_geometric
from edge_forms import sparse_forms as sparse_forms

from dfgnn import reference
from dfgnn.nn import pyg

# Graphs, and the forms of their edges; ours alone gets them as int32.
EDGES = [
    ("random", "tensor"), ("duplicates", "int32"), ("isolated", "EdgeIndex"), ("no edges", "tensor"),
    ("no nodes", "tensor"),
]  # fmt: skip
ONCE = [
    ("self_loops", "tensor"), ("super_row", "EdgeIndex by row"), ("mixed_degrees", "int32"),
    ("power_law", "EdgeIndex by col"), ("sorted", "tensor"),
]  # fmt: skip
OF_MATRICES = [("random", "coo"), ("random", "csr")]
OF_TWO_KINDS = [
    ("fewer_sources", "tensor"), ("fewer_destinations", "EdgeIndex"), ("fewer_destinations", "coo"),
    ("fewer_destinations", "csr"),
]  # fmt: skip


def inject_dropout(monkeypatch, ours, num_edges, heads, seed=21):
    """Makes both layers drop the same attention weights: those that dfgnn's kernels drop for this seed."""
    mask = reference.dropout_mask(seed, num_edges, heads, ours.dropout)
    attention = type(ours).attention

    def drop(alpha, p, training):
        return alpha * mask.to(alpha.dtype) if training else alpha

    def seeded(*args, **kwargs):
        return attention(*args, **kwargs, generator=torch.tensor([seed]))

    replace_their_dropout(monkeypatch, ours, drop)
    ours.attention = seeded


def replace_their_dropout(monkeypatch, ours, drop):
    """Replaces F.dropout in the module of torch_geometric's layer only: were it replaced in torch itself,
    dfgnn's layer would notice and run torch_geometric's forward."""
    theirs = next(c for c in type(ours).__mro__ if c.__module__.startswith("torch_geometric."))
    functions = types.SimpleNamespace(**{**vars(torch.nn.functional), "dropout": drop})
    monkeypatch.setattr(sys.modules[theirs.__module__], "F", functions)


class PyGSubject(Subject):
    library = "pyg"
    edges, once = EDGES + OF_MATRICES, ONCE
    # Options of layers in float16, bfloat16 and under autocast, where both layers are compared with float64.
    low_args = 9, 8, 2
    low = {"default": {}}
    large = [((16, 32, 8), {})]
    asked = {"return_attention_weights": True}
    dropout = [{}]
    has_concat = True
    attributes = None  # columns of the edges' attributes, where no option says how many

    def __init__(self):
        super().__init__()
        self.theirs, self.ours = getattr(torch_geometric.nn, self.name), getattr(pyg, self.name)

    def inputs(self, edges=("random", "tensor"), dtype=torch.float64, in_channels=None, **options):
        """Arguments of forward; the edges are distinct where their form is a sparse matrix."""
        graph, form = edges
        edge_dim = options.get("edge_dim", options.get("in_edge_channels", self.attributes))
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

    def check_row(self, edges, dtype, accelerated, args=None, **options):
        layers = self.pair(*(args or self.args), dtype=dtype, accelerate=accelerated, **options)
        in_channels = (args or self.args or [9])[0]
        inputs = self.inputs(edges, dtype, in_channels, **options)
        # Edges are returned in the type that was given; and torch_geometric cannot return attention as a
        # sparse matrix that has several values per entry.
        form = edges[1]
        asked = form != "int32" and (form not in SPARSE or options.get("edge_dim") is None)
        self.check(layers, inputs, as_int32(inputs) if form == "int32" else None, asked)
        assert getattr(layers[1], "_alpha", None) is None

    def with_same_masks(self, monkeypatch, options):
        layers = self.pair(dropout=0.4, **options)
        self.inject_dropout(monkeypatch, layers[1])
        return layers, (self.inputs(**options),)

    def inject_dropout(self, monkeypatch, ours):
        src, dst = edges()
        num_edges = len(src)
        if getattr(ours, "add_self_loops", False):
            num_edges = int((src != dst).sum()) + SIZES["random"]
        inject_dropout(monkeypatch, ours, num_edges, ours.heads * getattr(ours, "dim", 1))

    def copies(self, monkeypatch, copies=500):
        edge_index, x = edges("duplicates"), torch.randn(6, self.args[0], dtype=torch.float64)
        more = [t.repeat(copies) for t in self.edge_arguments(edge_index, 6, 6, "tensor", None)[1:]]
        shifts = (torch.arange(copies) * len(x)).repeat_interleave(edge_index.shape[1])
        given = x.repeat(copies, 1), edge_index.repeat(1, copies) + shifts, *more
        return *self.pair(dropout=0.4), lambda layer: layer(*given)

    def of_many_edges(self, args, options):
        """A layer, its inputs, and how many elements a row for each edge would have."""
        layer = self.pair(*args, dtype=torch.float32, **options)[1]
        edges = (1500, "tensor") if self.name == "HGTConv" else ("super_row", "tensor")
        inputs = self.inputs(edges, torch.float32, args[0] if args else 256, **options)
        return layer, inputs, 9000 * 256


class GATConv(PyGSubject):
    options = dict(
        concat=BOTH, residual=BOTH, bias=BOTH, add_self_loops=BOTH, edge_dim=(None, 4),
        args=((6, 5), (40, 5, 2), ((6, 7), 5, 3)), negative_slope=(0.2, 0.05),
        fill_value=("mean", 0.5),
    )  # fmt: skip
    edges = EDGES + OF_MATRICES + OF_TWO_KINDS
    low = {"default": {}, "attributes": {"edge_dim": 3}}
    large = [((16, 32, 8), {}), ((16, 32, 8), {"edge_dim": 3, "add_self_loops": False})]
    dropout = [{}, {"edge_dim": 3, "concat": False}, {"add_self_loops": False}]
    lazy = [((sizes, 5, 2), {"edge_dim": -1}) for sizes in (-1, (-1, -1))]

    def adjusted(self, row):
        # torch_geometric fills in the attributes of loops only if every destination is a source, too.
        if row.get("edges", [""])[0] in BIPARTITE and not isinstance(row["fill_value"], (float, int)):
            row["fill_value"] = 0.7
        return row


class GATv2Conv(GATConv):
    options = GATConv.options | {
        "share_weights": BOTH,
        "args": ((6, 5), (6, 5, 2), ((6, 6), 5, 3), ((6, 7), 5)),
    }
    large = [((16, 32, 8), {})]
    lazy = GATConv.lazy + [((-1, 5, 2), {"edge_dim": -1, "share_weights": True})]

    def adjusted(self, row):
        row = super().adjusted(row)
        row["share_weights"] &= row.get("args", self.args)[0] != (6, 7)
        return row


class TransformerConv(PyGSubject):
    options = dict(
        concat=BOTH, beta=BOTH, bias=BOTH, root_weight=BOTH, edge_dim=(None, 4),
        args=((6, 5), (6, 5, 2), ((6, 7), 5, 3)),
    )  # fmt: skip
    edges = EDGES + OF_MATRICES + OF_TWO_KINDS
    low = {"default": {}, "attributes": {"edge_dim": 3, "beta": True}}
    large = [((16, 32, 8), {}), ((16, 32, 8), {"edge_dim": 3})]
    dropout = [{}, {"edge_dim": 3, "concat": False}]
    lazy = [((-1, 5, 2), {"edge_dim": -1, "beta": True})]


class AGNNConv(PyGSubject):
    args = low_args = ()
    options = dict(requires_grad=BOTH, add_self_loops=BOTH)
    large = [((), {})]
    asked, dropout, has_concat = {}, [], False

    def prepare(self, layer):
        layer.beta.data.fill_(1.7)

    def inputs(self, edges=("random", "tensor"), dtype=torch.float64, in_channels=9, **options):
        return super().inputs(edges, dtype, in_channels or 9, **options)


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


class SuperGATConv(PyGSubject):
    options = dict(
        attention_type=("MX", "SD"), concat=BOTH, add_self_loops=BOTH, bias=BOTH,
        edge_sample_ratio=(1.0, 0.6),
        neg_sample_ratio=(0.5, 1.5), is_undirected=BOTH, args=((6, 5), (40, 5, 2), (6, 5, 3)),
        negative_slope=(0.2, 0.05),
    )  # fmt: skip
    low = {kind: {"attention_type": kind} for kind in ("MX", "SD")}
    dropout = [{"attention_type": kind} for kind in ("MX", "SD")]
    asked = {}
    lazy = [((-1, 5, 2), {})]

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

    def copies(self, monkeypatch):
        """Copies that draw no negative samples, which do not matter here and are slow to draw."""
        theirs, ours, draw = super().copies(monkeypatch)
        for layer in (theirs, ours):
            monkeypatch.setattr(layer, "negative_sampling", lambda edge_index, *args: edge_index[:, :1])
        return theirs, ours, draw

    def inject_dropout(self, monkeypatch, ours):
        super().inject_dropout(monkeypatch, ours)
        seed = torch.tensor([21])
        attention = type(ours).dot_attention
        ours.dot_attention = lambda *args, **kwargs: attention(*args, **kwargs, generator=seed)


MODES = {"additive": "additive-self-attention", "multiplicative": "multiplicative-self-attention"}
MECHANISMS = {"within": "within-relation", "across": "across-relation"}
NUM_RELATIONS = 6


def edge_types(num_edges):
    """A random type of each edge, 0, 1, 3 or 4; no edge has type 2, and few have type 4."""
    generator = torch.Generator().manual_seed(0)
    edge_type = torch.tensor([0, 1, 1, 3])[torch.randint(4, (num_edges,), generator=generator)]
    edge_type[:3] = 4
    return edge_type


class RGATConv(PyGSubject):
    args = 6, 5, NUM_RELATIONS
    low_args = 8, 8, NUM_RELATIONS
    base = {"heads": 2}
    kinds = [
        {"attention_mode": mode, "attention_mechanism": mechanism}
        for mode in MODES.values()
        for mechanism in MECHANISMS.values()
    ]
    options = dict(
        kind=kinds, mod=(None, "additive", "scaled", "f-additive", "f-scaled"), edge_dim=(None, 4),
        decomposition=({}, {"num_bases": 3}, {"num_blocks": 2}), concat=BOTH, heads=(1, 2, 3), dim=(1, 3),
        bias=BOTH, negative_slope=(0.2, 0.05), args=((8, 4, NUM_RELATIONS),),
    )  # fmt: skip
    edges = EDGES + OF_MATRICES + OF_TWO_KINDS
    low = {
        str(k): kind | {"edge_dim": 8, "concat": k % 2 == 0, "mod": mod}
        for k, (kind, mod) in enumerate(zip(kinds, (None, "additive", "scaled", "f-additive")))
    }
    large = [((16, 32, NUM_RELATIONS), kind | {"heads": 8}) for kind in kinds]
    dropout = kinds

    def adjusted(self, row):
        if row["attention_mode"] == MODES["additive"]:
            row["dim"] = 1
        return row

    def prepare(self, layer):
        """torch_geometric leaves the parameter l2 uninitialised."""
        torch.nn.init.normal_(layer.l2)

    def edge_arguments(self, edge_index, num_src, num_dst, form, attr):
        kinds = edge_types(edge_index.shape[1])
        if form in SPARSE:
            values = kinds.flip(0) if attr is None else attr  # the argument takes precedence over values
            return in_form(edge_index, num_src, num_dst, form, values), kinds
        return (in_form(edge_index, num_src, num_dst, form), kinds) + (() if attr is None else (attr,))


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


def typed_edges(num_edges=60):
    """edge_index by relation: random edges, some repeated; some destinations have none."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for src, name, dst in RELATIONS:
        ends = [torch.randint(NODES[end] - 2, (num_edges,), generator=generator) for end in (src, dst)]
        found[src, name, dst] = torch.stack(ends)
    found["c", "x", "a"][0] %= 5
    return found


class HGTConv(PyGSubject):
    args = low_args = 8, 8, METADATA, 2
    options = dict(
        args=[
            (in_channels, out_channels, METADATA, heads)
            for in_channels, out_channels, heads in (
                (8, 8, 8),
                (12, 12, 3),
                (8, 12, 3),
                (WIDTHS, 16, 2),
                (WIDTHS, 8, 1),
            )
        ],
    )
    edges = [(1, "tensor"), (60, "EdgeIndex"), (60, "coo"), (60, "csr"), (0, "tensor")]  # edges of each type
    once = [(7, "int32"), (900, "tensor"), (60, "EdgeIndex by col"), ("no nodes", "tensor")]
    lazy = [((-1, 8, METADATA, 2), {})]
    large = [((16, 256, METADATA, 8), {})]
    asked, dropout, has_concat = {}, [], False

    def prepare(self, layer):
        """skip and p_rel start at one: they get other values."""
        for name, parameter in layer.named_parameters():
            if name.startswith(("skip", "p_rel")):
                torch.nn.init.normal_(parameter)

    def inputs(self, edges=(60, "tensor"), dtype=torch.float64, in_channels=8, **options):
        if not isinstance(in_channels, dict) and in_channels < 0:
            in_channels = WIDTHS
        sizes = dict.fromkeys(NODES, 0) if edges[0] == "no nodes" else NODES
        num_edges = 0 if edges[0] == "no nodes" else edges[0]
        given = {}
        for edge_type, index in typed_edges(num_edges=num_edges).items():
            index = torch.unique(index, dim=1) if edges[1] in SPARSE else index
            given[edge_type] = in_form(index, sizes[edge_type[0]], sizes[edge_type[2]], edges[1])
        return typed_features(in_channels, dtype, sizes), given

    def check(self, layers, inputs, ours=None, asked=True, tolerance=None):
        x, given = inputs
        if any(isinstance(index, torch_geometric.EdgeIndex) for index in given.values()):
            # torch_geometric cannot join EdgeIndex tensors of several relations: it gets plain tensors.
            inputs, ours = (x, {name: index.as_tensor() for name, index in given.items()}), inputs
        super().check(layers, inputs, ours, asked, tolerance)


class HANConv(HGTConv):
    args = low_args = 8, 8, METADATA, 2
    options = dict(args=[(sizes, 8, METADATA) for sizes in (8, WIDTHS)], heads=(1, 4))
    asked = {"return_semantic_attention_weights": True}
    large = []
    low = {}

    def prepare(self, layer):
        pass


class Unasked(PyGSubject):
    """A layer that returns no attention and holds rows of edges."""

    edges = EDGES
    asked, large, dropout, has_concat = {}, [], [], False


class ResGatedGraphConv(Unasked):
    args = 9, 5
    low_args = 8, 16
    options = dict(
        aggr=("add", "mean"), root_weight=BOTH, bias=BOTH, edge_dim=(None, 4),
        args=((9, 5), (6, 8), ((9, 4), 5)),
    )  # fmt: skip
    edges = EDGES + OF_MATRICES + OF_TWO_KINDS
    lazy = [((sizes, 5), {}) for sizes in (-1, (-1, -1))]
    low = {"default": {}, "mean": {"aggr": "mean"}}


class GATEConv(Unasked):
    args = low_args = 8, 8, 3
    attributes, dropout, copies = 3, [{}], None
    options = dict(args=((8, 8, 3), (5, 5, 3)))

    def __init__(self):
        self.name, self.ours = "GATEConv", pyg.GATEConv
        self.theirs = torch_geometric.nn.models.attentive_fp.GATEConv

    def inject_dropout(self, monkeypatch, ours):
        inject_dropout(monkeypatch, ours, 400, 1)
        mask = reference.dropout_mask(21, 400, 1, ours.dropout)
        replace_their_dropout(
            monkeypatch, ours, lambda x, p, training: x * mask.view(x.shape).to(x) if training else x
        )


class HEATConv(Unasked):
    args = low_args = 8, 8, 3, 4, 7, 6, 2  # 3 types of nodes, 4 of edges
    base = {"heads": 2}
    options = dict(
        concat=BOTH, root_weight=BOTH, bias=BOTH, heads=(1, 3), negative_slope=(0.2, 0.05),
        args=((8, 8, 3, 4, 7, 6, 2), (9, 5, 3, 4, 7, 6, 2)),
    )  # fmt: skip
    attributes, dropout, copies = 6, [{}], None

    def edge_arguments(self, edge_index, num_src, num_dst, form, attr):
        num_edges = edge_index.shape[1]
        kinds = torch.arange(num_src) * 7 % 3, edge_types(num_edges).clamp(max=3)
        return in_form(edge_index, num_src, num_dst, form), *kinds, attr


class GeneralConv(Unasked):
    args = 9, 5
    low_args = 8, 8
    base = {"attention": True, "heads": 3}
    options = dict(
        kind=(
            {},
            {"in_edge_channels": 3},
            {"in_edge_channels": 3, "directed_msg": False, "bias": False},
            {"attention_type": "dot_product"},
            {"skip_linear": True, "l2_normalize": True, "in_edge_channels": 7},
        ),
        heads=(1, 3),
    )
    edges = EDGES + OF_MATRICES + OF_TWO_KINDS
    low = {"default": {}, "attributes": {"in_edge_channels": 3}}

    def adjusted(self, row):
        if row.get("edges", [""])[0] in BIPARTITE:
            row["args"] = (9, 6), 5
            row |= {"directed_msg": True, "skip_linear": False, "attention_type": "additive"}
        return row


class FAConv(PyGSubject):
    args = (9,)
    options = dict(add_self_loops=BOTH, eps=(0.1, 0.0), cached=BOTH)
    asked = {"return_attention_weights": True}
    low, large, dropout, has_concat = {}, [], [], False

    def edge_arguments(self, edge_index, num_src, num_dst, form, attr):
        return torch.randn(num_src, 9), in_form(edge_index, num_src, num_dst, form)

    def inputs(self, edges=("random", "tensor"), dtype=torch.float64, *args, **options):
        x, x_0, *given = super().inputs(edges, dtype, *args, **options)
        return x, x_0.to(dtype), *given


class GENConv(Unasked):
    args = 9, 5
    tolerance = 1e-9
    options = dict(
        kind=(
            {},
            {"edge_dim": 3},
            {"edge_dim": 5},
            {"aggr": "softmax_sg", "t": 0.3, "edge_dim": 3},
            {"aggr": "softmax_sg"},
            {"learn_t": True, "t": 0.1, "bias": True, "norm": "layer"},
            {"learn_t": True, "msg_norm": True, "learn_msg_scale": True, "edge_dim": 3},
            {"aggr_kwargs": {"learn": True, "channels": 5}, "num_layers": 1},
        ),
        args=((9, 5), (5, 5), ((9, 6), 5), ((5, 5), 5)),
    )
    edges = EDGES + OF_TWO_KINDS[:2]
    low = {}


LAYERS = (
    *(GATConv, GATv2Conv, TransformerConv, AGNNConv, SuperGATConv, RGATConv, HGTConv, HANConv),
    *(ResGatedGraphConv, GATEConv, HEATConv, GeneralConv, FAConv, GENConv),
)
SUBJECTS = [layer() for layer in LAYERS]
