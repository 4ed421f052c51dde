"""Whole layers and models of PyG and DGL, as they are and after ``dfgnn.accelerate``.

Both sides get the same edges, with self loops where the layer would add them, so that a step waits for
nothing and can be captured in a CUDA graph on either side. ``fresh``: a new edge_index tensor at each step.
"""

import copy
import dataclasses
import functools
import itertools
import os
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dfgnn
from dfgnn.bench import yardsticks
from dfgnn.bench.attention import Bench
from dfgnn.bench.compare import Contestant, Step, captured, compare, significant
from dfgnn.bench.workloads import LAYERS as WORKLOADS

FEATURES = {"Cora": 1_433, "CiteSeer": 3_703, "PubMed": 500, "ogbn-arxiv": 128, "arxiv": 128}
CLASSES = {"Cora": 7, "CiteSeer": 6, "PubMed": 3, "ogbn-arxiv": 40, "arxiv": 40}
EDGE_FEATURES, RELATIONS = 16, 4
WITHOUT_PYG = "plain PyTorch"


# ---- models of several layers ----------------------------------------------------------------------------


class Model(nn.Module):
    """PyG's layers of one kind with heads side by side and an ELU between them; the last has one head."""

    def __init__(self, case: dict[str, Any], features: int, classes: int):
        super().__init__()
        from torch_geometric import nn as library

        heads, size, count = case["heads"], case["head_dim"], case["layers"]
        options = {} if case["layer"] == "TransformerConv" else {"add_self_loops": False}
        if case.get("dropout"):
            options["dropout"] = case["dropout"]
        self.convs = nn.ModuleList(
            getattr(library, case["layer"])(
                heads * size if k else features,
                classes if k == count - 1 else size,
                heads=1 if k == count - 1 else heads,
                **options,
            )
            for k in range(count)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.elu(conv(x, edge_index))
        return self.convs[-1](x, edge_index)


# ---- PyG's layers without propagate -----------------------------------------------------------------------


def in_plain_torch(model: nn.Module) -> nn.Module:
    """The model, whose GATConv, GATv2Conv and TransformerConv compute with their own weights in operations of
    PyTorch alone: what users get who leave PyG's message passing, and what a compiler makes most of.

    Layers as the cases make them: heads side by side, no loops appended, no features of edges, no dropout."""
    for layer in model.modules():
        if (forward := PLAIN.get(type(layer).__name__)) is not None:
            assert layer.concat and not layer.dropout and getattr(layer, "edge_dim", None) is None, layer
            layer.__class__ = type("Plain", (type(layer),), {"forward": forward})
    return model


def attend(score: Tensor, value: Tensor, edge_index: Tensor) -> Tensor:
    """Softmax of scores [E, H] by destination and sums of value [N, H, D], which are divided at the nodes.
    Rows are taken by index_select: the gradient of x[index] is a sort, which takes twice as long."""
    (src, dst), size = edge_index, value.shape[:2]
    top = score.new_full(size, -torch.inf)
    top = top.scatter_reduce(0, dst.unsqueeze(1).expand_as(score), score.detach(), "amax")
    weight = (score - top.index_select(0, dst)).exp()
    total = weight.new_zeros(size).index_add(0, dst, weight)
    rows = weight.unsqueeze(2) * value.index_select(0, src)
    out = torch.zeros_like(value).index_add(0, dst, rows.to(value.dtype))
    return (out / total.clamp(min=1e-16).unsqueeze(2)).flatten(1)


def _rows(layer, *projections: nn.Module, x: Tensor) -> list[Tensor]:
    return [lin(x).view(-1, layer.heads, layer.out_channels) for lin in projections]


def _gat(layer, x: Tensor, edge_index: Tensor) -> Tensor:
    (value,), (src, dst) = _rows(layer, layer.lin, x=x), edge_index
    of_src, of_dst = ((value * weight).sum(-1) for weight in (layer.att_src, layer.att_dst))
    both = of_src.index_select(0, src) + of_dst.index_select(0, dst)
    score = F.leaky_relu(both, layer.negative_slope)
    return attend(score, value, edge_index) + layer.bias


def _gatv2(layer, x: Tensor, edge_index: Tensor) -> Tensor:
    (key, query), (src, dst) = _rows(layer, layer.lin_l, layer.lin_r, x=x), edge_index
    both = key.index_select(0, src) + query.index_select(0, dst)
    score = (F.leaky_relu(both, layer.negative_slope) * layer.att).sum(-1)
    return attend(score, key, edge_index) + layer.bias


def _transformer(layer, x: Tensor, edge_index: Tensor) -> Tensor:
    query, key, value = _rows(layer, layer.lin_query, layer.lin_key, layer.lin_value, x=x)
    src, dst = edge_index
    score = (query.index_select(0, dst) * key.index_select(0, src)).sum(-1) / layer.out_channels**0.5
    return attend(score, value, edge_index) + layer.lin_skip(x)


PLAIN: dict[str, Callable] = {"GATConv": _gat, "GATv2Conv": _gatv2, "TransformerConv": _transformer}


# ---- steps of models -------------------------------------------------------------------------------------


_numbers = itertools.count()


def apart(model: nn.Module) -> nn.Module:
    """The model, whose forward has a code object of its own. torch.compile caches by code object, and at
    every call goes through the entries that other models of the class have left, which takes longer than a
    step on a small graph."""
    forward = type(model).forward
    code = forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
    own = types.FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__)
    model.__class__ = type(type(model).__name__, (type(model),), {"forward": own})
    return model


class Training:
    """A model with its data, and a step of it: forward, loss, backward and Adam; or inference."""

    def __init__(self, library: str, case: dict[str, Any], graph, dtype: str, compiled: dict | None = None):
        name, device = case["graph"].removesuffix("~"), graph.device
        features, classes = FEATURES.get(name, 64), CLASSES.get(name, 2)
        torch.manual_seed(0)
        self.x = torch.randn(graph.num_src, features).to(device)
        self.y = torch.randint(classes, (graph.num_src,)).to(device)
        self.edge_index = graph.edge_index
        self.model = Model(case, features, classes).to(device)
        if library == WITHOUT_PYG:
            in_plain_torch(self.model)
        if library == "dfgnn":
            changed = dfgnn.accelerate(self.model)
            assert len(changed.replaced) == case["layers"], changed
        self.call = self.model if compiled is None else torch.compile(apart(self.model), **compiled)
        self.fresh, self.autocast = case.get("fresh", False), dtype == "bfloat16"
        self.inference = case["mode"] == "forward"
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)
        self.model.train(not self.inference)

    def loss(self, batch=None) -> Tensor:
        edge_index = self.edge_index.clone() if self.fresh else self.edge_index
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.autocast):
            return F.cross_entropy(self.call(self.x, edge_index), self.y)

    def step(self) -> Tensor:
        if self.inference:
            with torch.no_grad():
                return self.loss()
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def captured(self) -> Step:
        """The step as a CUDA graph."""
        if self.inference:
            return captured(self.step, self.x.device)
        from torch_geometric.data import Data

        data = Data(x=self.x, edge_index=self.edge_index, y=self.y)

        def loss(batch) -> Tensor:
            with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.autocast):
                return F.cross_entropy(self.model(batch.x, batch.edge_index), batch.y)

        step = dfgnn.capture(loss, self.model, self.optimizer)
        step(data), step(data)  # the first is eager, the second captures
        return Step(lambda: step(data))


def measure(case: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """A step of a model, PyG's and dfgnn's, in the ways that ``case["ways"]`` names."""
    torch._dynamo.reset()
    graph, contestants = bench.graph(case["graph"]), []
    first_loss: dict[str, float] = {}
    for dtype, way, library in itertools.product(case["dtypes"], case["ways"], ("PyG", WITHOUT_PYG, "dfgnn")):
        make = functools.partial(_model_step, library, way, case, graph, dtype, first_loss)
        contestants.append(Contestant(library, way, dtype, make))
    found = compare(contestants, bench.device, bench.seconds)
    return {"nodes": graph.num_dst, "edges": graph.num_edges, "contestants": found}


WAYS = {"eager": None, "captured": None, "compiled": {}, "reduce-overhead": {"mode": "reduce-overhead"}}


def _model_step(library, way: str, case, graph, dtype: str, first_loss: dict[str, float]) -> Step:
    training = Training(library, case, graph, dtype, WAYS[way])
    loss = float(training.loss().detach())
    # Losses are compared with the first one, but not under dropout, for which the libraries draw other masks.
    expected = first_loss.setdefault(dtype, loss) if not case.get("dropout") else loss
    notes = {"loss_difference": significant(abs(loss - expected) / max(abs(expected), 1e-30))}
    if way == "captured":
        return dataclasses.replace(training.captured(), notes=notes)
    return Step(training.step, 1, 0 if way == "eager" else None, notes)


# ---- single layers ---------------------------------------------------------------------------------------


def pyg_layers(case: dict[str, Any], graph, x: Tensor, edge_attr: Tensor) -> dict[str, tuple]:
    """{name: (make, arguments)}: a step calls make()(*arguments)."""
    from torch_geometric import nn as library

    edge_index = graph.edge_index
    kind = torch.arange(graph.num_edges, device=x.device) % RELATIONS
    shape = {"in_channels": case["in"], "out_channels": case["head_dim"], "heads": case["heads"]}
    alone = {**shape, "add_self_loops": False}
    relations = [("node", f"type{t}", "node") for t in range(RELATIONS)]
    plain, attributed = (x, edge_index), (x, edge_index, edge_attr)
    width, edges = case["heads"] * case["head_dim"], {"edge_dim": EDGE_FEATURES}
    by_type = {r: edge_index[:, kind == t] for t, r in enumerate(relations)}
    types_of = (["node"], relations)
    return {
        "GATConv": (lambda: library.GATConv(**alone), plain),
        "GATConv edge_dim": (lambda: library.GATConv(**alone, **edges), attributed),
        "GATv2Conv": (lambda: library.GATv2Conv(**alone), plain),
        "GATv2Conv edge_dim": (lambda: library.GATv2Conv(**alone, **edges), attributed),
        "TransformerConv": (lambda: library.TransformerConv(**shape), plain),
        "TransformerConv edge_dim": (lambda: library.TransformerConv(**shape, **edges), attributed),
        # In eval mode: in training nearly all of its time is PyG's sampling of negative edges, with either
        # layer.
        "SuperGATConv MX": (
            lambda: library.SuperGATConv(**alone, attention_type="MX").eval(),
            plain,
        ),
        "AGNNConv": (lambda: library.AGNNConv(add_self_loops=False), plain),
        "RGATConv": (lambda: library.RGATConv(**shape, num_relations=RELATIONS), (x, edge_index, kind)),
        "HGTConv": (
            lambda: library.HGTConv(case["in"], width, types_of, heads=case["heads"]),
            ({"node": x}, by_type),
        ),
    }


def dgl_layers(case: dict[str, Any], graph, x: Tensor, edge_attr: Tensor) -> dict[str, tuple]:
    os.environ.setdefault("DGLBACKEND", "pytorch")  # else DGL writes a file to the home directory
    import dgl
    from dgl import nn as library

    g = dgl.graph(tuple(graph.edge_index), num_nodes=graph.num_src)
    columns, size, heads = case["in"], case["head_dim"], case["heads"]
    shape, loose = (columns, size, heads), {"allow_zero_in_degree": True}
    nodes = torch.zeros(graph.num_src, dtype=torch.long, device=x.device)
    kind = torch.arange(graph.num_edges, device=x.device) % RELATIONS
    plain, attributed = (g, x), (g, x, edge_attr)
    return {
        "GATConv": (lambda: library.GATConv(*shape, **loose), plain),
        "GATv2Conv": (lambda: library.GATv2Conv(*shape, **loose), plain),
        "DotGatConv": (lambda: library.DotGatConv(*shape, **loose), plain),
        "AGNNConv": (lambda: library.AGNNConv(**loose), plain),
        "EGATConv": (
            lambda: library.EGATConv(columns, EDGE_FEATURES, size, EDGE_FEATURES, heads),
            attributed,
        ),
        "EdgeGATConv": (
            lambda: library.EdgeGATConv(columns, EDGE_FEATURES, size, heads, **loose),
            attributed,
        ),
        "HGTConv": (
            lambda: library.HGTConv(columns, size, heads, 1, RELATIONS, dropout=0.0),
            (g, x, nodes, kind),
        ),
    }


LAYERS = {"PyG": pyg_layers, "DGL": dgl_layers}


def tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors in the nested results or arguments of a layer, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for v in value for t in tensors(v)] if isinstance(value, tuple | list) else []


def measure_layer(case: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """A training step of one layer, with the gradients of its features and of all parameters."""
    torch._dynamo.reset()
    graph, library, device = bench.graph(case["graph"]), case["library"], bench.device
    torch.manual_seed(0)
    x = torch.randn(graph.num_src, case["in"]).to(device).requires_grad_()
    edge_attr = torch.randn(graph.num_edges, EDGE_FEATURES).to(device).requires_grad_()

    @functools.cache
    def upstream():
        make, arguments = LAYERS[library](case, graph, x, edge_attr)[case["layer"]]
        torch.manual_seed(0)
        return make().to(device), arguments

    def layer_of(name: str, way: str) -> Step:
        theirs, arguments = upstream()
        layer = copy.deepcopy(theirs)
        if name == "dfgnn":
            changed = dfgnn.accelerate(layer)
            assert changed.replaced, changed
        if name == WITHOUT_PYG:
            in_plain_torch(layer)
        call = layer if way == "eager" else torch.compile(layer, **WAYS[way])
        step = _layer_step(call, layer, arguments, case.get("fresh", False))
        with torch.no_grad():
            pairs = list(zip(tensors(call(*arguments)), tensors(theirs(*arguments))))
        difference = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)
        return Step(step, 1, 0 if way == "eager" else None, {"difference": significant(difference)})

    others = [library, WITHOUT_PYG] if library == "PyG" and case["layer"] in PLAIN else [library]
    contestants = [
        Contestant(name, way, "float32", functools.partial(layer_of, name, way))
        for way, name in itertools.product(case["ways"], (*others, "dfgnn"))
        if not (library == "DGL" and way == "compiled")
    ]
    if not case.get("fresh") and case["layer"] in SCORES:
        contestants += _limits(case, graph, x, lambda: upstream()[0])
    found = compare(contestants, device, bench.seconds)
    limits = [record for record in found if record["library"] == LIMIT]
    return {
        "nodes": graph.num_dst,
        "edges": graph.num_edges,
        "contestants": [record for record in found if record["library"] != LIMIT],
        **({"limits": limits} if limits else {}),
    }


LIMIT = "limit"
SCORES = {"GATConv": "gat", "GATv2Conv": "gatv2", "TransformerConv": "dot", "DotGatConv": "dot"}


def _limits(case: dict[str, Any], graph, x: Tensor, upstream: Callable[[], nn.Module]) -> list[Contestant]:
    """What a training step cannot avoid: the matrix products of the layer's projections and their gradients,
    and plain sums over the neighbours, as many as the layer gathers rows per edge."""
    width, dense = case["heads"] * case["head_dim"], x.detach()

    def products() -> Step:
        weights = [m.weight.detach() for m in upstream().modules() if getattr(m, "weight", None) is not None]
        weights = [w for w in weights if w.dim() == 2 and w.shape[1] == dense.shape[1]]
        grads = [torch.randn(len(dense), len(w), device=x.device) for w in weights]
        return Step(lambda: [(dense @ w.T, g @ w, g.T @ dense) for w, g in zip(weights, grads)])

    def sums() -> Step:
        one = yardsticks.sparse_sum(graph, torch.float32)
        rows = torch.randn(graph.num_src, width, device=x.device)
        passes = WORKLOADS[SCORES[case["layer"]]].passes["train"]
        return Step(lambda: [one(rows) for _ in range(passes)])

    return [
        Contestant(LIMIT, "matrix products", "float32", products),
        Contestant(LIMIT, "plain sums", "float32", sums),
    ]


def _layer_step(call: Callable, layer: nn.Module, arguments: tuple, fresh: bool) -> Callable[[], Any]:
    leaves = [t for t in tensors(arguments) if t.requires_grad] + list(layer.parameters())
    grads: list[Tensor] = []

    def step():
        given = arguments
        if fresh:
            given = tuple(t.clone() if isinstance(t, Tensor) and t.dtype == torch.int64 else t for t in given)
        out = tensors(call(*given))
        if not grads:
            grads.extend(torch.randn_like(t) for t in out)
        return torch.autograd.grad(out, leaves, grads, allow_unused=True)

    return step
