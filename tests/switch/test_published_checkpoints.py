"""convert_state_dict(to="dfgnn"): published graph transformers, as small modules with their names."""

import math

import pytest
import torch
from torch import nn

import dfgnn
from dfgnn import Graph

N, E, F, H = 20, 90, 12, 3


class Products(nn.Module):
    """The attention module of a published model, which holds the projections Q, K, V and, with edges,
    proj_e."""

    def __init__(self, bias, edges):
        super().__init__()
        for name in ("Q", "K", "V", "proj_e")[: 4 if edges else 3]:
            setattr(self, name, nn.Linear(F, F, bias=bias))

    def forward(self, x, edge_index, e=None):
        src, dst = edge_index
        q, k, v = (f(x).view(N, H, -1) for f in (self.Q, self.K, self.V))
        products = q[dst] * k[src] / math.sqrt(F // H)
        if e is not None:
            products = products * self.proj_e(e).view(len(e), H, -1)
        score = products.sum(-1, keepdim=True).clamp(-5, 5).exp()
        mass = score.new_zeros(N, H, 1).index_add(0, dst, score)
        return v.new_zeros(v.shape).index_add(0, dst, score * v[src]) / mass, products


class WithEdges(nn.Module):
    def __init__(self, norm, bias):
        super().__init__()
        self.attention = Products(bias, True)
        self.norm = norm
        for end in ("h", "e"):
            setattr(self, f"O_{end}", nn.Linear(F, F))
            setattr(self, f"FFN_{end}_layer1", nn.Linear(F, 2 * F))
            setattr(self, f"FFN_{end}_layer2", nn.Linear(2 * F, F))
            for k in (1, 2):
                made = nn.BatchNorm1d(F) if norm == "batch" else nn.LayerNorm(F)
                setattr(self, f"{norm}_norm{k}_{end}", made)

    def forward(self, x, edge_index, e):
        found = self.attention(x, edge_index, e)
        return [self.stream(end, y, z.flatten(1)) for end, y, z in zip("he", (x, e), found)]

    def stream(self, end, x, update):
        x = getattr(self, f"{self.norm}_norm1_{end}")(x + getattr(self, f"O_{end}")(update))
        inner = getattr(self, f"FFN_{end}_layer1")(x).relu()
        return getattr(self, f"{self.norm}_norm2_{end}")(x + getattr(self, f"FFN_{end}_layer2")(inner))


class WithoutEdges(nn.Module):
    def __init__(self, norm, bias):
        super().__init__()
        self.attention, self.O, self.norm = Products(bias, False), nn.Linear(F, F), norm
        self.FFN_layer1, self.FFN_layer2 = nn.Linear(F, 2 * F), nn.Linear(2 * F, F)
        for k in (1, 2):
            setattr(self, f"{norm}_norm{k}", nn.BatchNorm1d(F) if norm == "batch" else nn.LayerNorm(F))

    def forward(self, x, edge_index):
        x = getattr(self, f"{self.norm}_norm1")(x + self.O(self.attention(x, edge_index)[0].flatten(1)))
        return getattr(self, f"{self.norm}_norm2")(x + self.FFN_layer2(self.FFN_layer1(x).relu()))


def inputs():
    dst = torch.cat([torch.arange(N), torch.randint(N, (E - N,))])
    edge_index = torch.stack([torch.randint(N, (E,)), dst])
    return edge_index, Graph.from_edge_index(edge_index, num_nodes=N), torch.randn(N, F).double()


def trained(module):
    """The module with random values in all parameters and buffers, as after training."""
    for name, x in module.state_dict().items():
        if x.is_floating_point():
            x.uniform_(0.5, 1.5) if "running_var" in name else x.normal_(std=0.3)
    return module.double().eval()


@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("bias", [False, True])
def test_with_edges(norm, bias):
    layers = nn.ModuleList(trained(WithEdges(norm, bias)) for _ in range(2))
    ours = nn.ModuleList(dfgnn.nn.EdgeGraphTransformerLayer(F, H, norm=norm, bias=bias) for _ in range(2))
    ours.double().eval()
    ours.load_state_dict(dfgnn.convert_state_dict(layers.state_dict(), "dfgnn"))
    edge_index, graph, x = inputs()
    e = torch.randn(E, F).double()
    expected, found = (x, e), (x, e)
    for theirs, layer in zip(layers, ours):
        expected = theirs(expected[0], edge_index, expected[1])
        found = layer(graph, *found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_without_edges(norm):
    theirs, ours = (
        trained(WithoutEdges(norm, True)),
        dfgnn.nn.GraphTransformerLayer(F, H, norm=norm, bias=True),
    )
    ours.double().eval().load_state_dict(dfgnn.convert_state_dict(theirs.state_dict(), "dfgnn"))
    edge_index, graph, x = inputs()
    x = x / 4  # small enough that no score reaches the published model's clamp, which our layer lacks
    torch.testing.assert_close(ours(graph, x), theirs(x, edge_index))


class Exphormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.Q, self.K, self.V, self.E = (nn.Linear(F, F, bias=False) for _ in range(4))

    def forward(self, x, edge_index, e):
        src, dst = edge_index
        q, k, v = (f(x).view(N, H, -1) for f in (self.Q, self.K, self.V))
        score = q[dst] * k[src] / math.sqrt(F // H) * self.E(e).view(E, H, -1)
        score = score.sum(-1, keepdim=True).clamp(-5, 5).exp()
        mass = score.new_zeros(N, H, 1).index_add(0, dst, score)
        return (v.new_zeros(v.shape).index_add(0, dst, score * v[src]) / (mass + 1e-6)).flatten(1)


def test_exphormer():
    theirs, ours = trained(Exphormer()), dfgnn.nn.ExphormerAttention(F, H).double()
    state = {f"layers.0.self_attn.{name}": x for name, x in theirs.state_dict().items()}
    found = dfgnn.convert_state_dict({"first.weight": x_of(theirs), **state}, "dfgnn")
    assert found.pop("first.weight") is x_of(theirs)
    ours.load_state_dict({name.removeprefix("layers.0.self_attn."): x for name, x in found.items()})
    edge_index, _, x = inputs()
    types, table = torch.randint(3, (E,)), torch.randn(3, F).double()
    graph = ours.typed_graph(edge_index, types, num_nodes=N, num_types=3)
    want = theirs(x, edge_index, table[types])
    torch.testing.assert_close(ours(graph, x, table), want, rtol=1e-4, atol=1e-4)


class EarlierGAT(nn.Module):
    """GATConv of one weight or of two, which the state has under both ends' names."""

    def __init__(self, lin, att, shared):
        super().__init__()
        for k, end in enumerate(lin):
            setattr(self, end, getattr(self, lin[0]) if shared and k else nn.Linear(F, F, bias=False))
        for end in att:
            setattr(self, end, nn.Parameter(torch.randn(1, H, F // H)))
        self.bias, self.lin, self.att = nn.Parameter(torch.randn(F)), lin, att

    def forward(self, x, edge_index):
        src, dst = edge_index
        values, rows = (getattr(self, end)(x).view(N, H, -1) for end in self.lin)
        of_src, of_dst = (
            (h * getattr(self, end)).sum(-1) for h, end in zip((values, rows), self.att, strict=True)
        )
        score = torch.nn.functional.leaky_relu(of_src[src] + of_dst[dst], 0.2).exp().unsqueeze(-1)
        mass = score.new_zeros(N, H, 1).index_add(0, dst, score)
        out = values.new_zeros(values.shape).index_add(0, dst, score * values[src]) / mass.clamp(min=1e-30)
        return out.flatten(1) + self.bias


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "lin, att", [(("lin_l", "lin_r"), ("att_l", "att_r")), (("lin_src", "lin_dst"), ("att_src", "att_dst"))]
)
def test_gat_of_earlier_versions(lin, att, shared):
    pyg = pytest.importorskip("dfgnn.nn.pyg")
    theirs = EarlierGAT(lin, att, shared).double()
    size = F if shared else (F, F)
    ours = pyg.GATConv(size, F // H, heads=H, add_self_loops=False).double()
    found = dfgnn.convert_state_dict({f"convs.0.{k}": x for k, x in theirs.state_dict().items()}, "dfgnn")
    ours.load_state_dict({name.removeprefix("convs.0."): x for name, x in found.items()})
    edge_index, _, x = inputs()
    torch.testing.assert_close(ours(x if shared else (x, x), edge_index), theirs(x, edge_index))


def x_of(module):
    return module.Q.weight


@pytest.mark.parametrize(
    "names, words",
    [
        (["attention_h.Q_2.weight", "attention_h.K_2.weight"], "SAN's attention"),
        (["attention.Q.weight", "attention.K.weight", "O.weight", "batch_norm1.weight",
          "layer_norm1.weight"], "both norms"),
        (["attention.Q.weight", "attention.K.weight", "O.weight", "gate.weight"], "with gate.weight"),
        (["Q.weight", "K.weight", "V.weight", "E.weight", "Q.bias"], "with Q.bias"),
        (["gcs.0.relation_pri", "gcs.0.relation_att", "gcs.0.relation_msg"], "pyHGT's HGTConv"),
        (["lin_l.weight", "att_l", "att_r", "gate"], "with gate"),
        (["weight"], "expected a layer to convert to 'dfgnn'"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart(names, words):
    with pytest.raises(ValueError, match=words):
        dfgnn.convert_state_dict({name: torch.ones(2, 2) for name in names}, "dfgnn")
