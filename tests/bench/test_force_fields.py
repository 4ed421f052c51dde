"""benchmarks/force_fields.py on modules that stand for those of metatrain and deepmd-kit: written from the
formulas of PET and DPA1, with the names that the program reads."""

import json
import math
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"

PET = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.input_linear, self.output_linear = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.num_heads, self.head_dim = heads, width // heads

    def forward(self, x, factors):
        q, k, v = self.input_linear(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        score = q @ k.mT / self.head_dim**0.5 + factors.clamp(min=1e-15).log()[:, None]
        return self.output_linear((score.softmax(-1) @ v).transpose(1, 2).flatten(2))

class Layer(nn.Module):
    def __init__(self, width, heads, of_node):
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.norm_center_features = nn.RMSNorm(of_node)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU())
        self.center_mlp = nn.Sequential(nn.Linear(of_node, of_node), nn.SiLU())
        self.center_contraction, self.center_expansion = nn.Linear(of_node, width), nn.Linear(width, of_node)

    def forward(self, node, x, factors, manual):
        assert manual
        tokens = torch.cat([self.center_contraction(node), x], 1)
        out = self.attention(self.norm_attention(tokens), factors)
        node = node + self.center_expansion(out[:, :1])
        x = x + out[:, 1:]
        return node + self.center_mlp(self.norm_center_features(node)), x + self.mlp(self.norm_mlp(x))

class Transformer(nn.Module):
    def __init__(self, width, layers, heads, of_node, hidden, norm, activation, order):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads, of_node) for _ in range(layers))

    def forward(self, node, x, factors, manual):
        for layer in self.layers:
            node, x = layer(node, x, factors, manual)
        return node, x
"""
DPA = """
from types import SimpleNamespace as Has
import lmdb  # a package that nothing here needs
import numpy as np
import torch
import torch.nn.functional as F

class Linear:
    def __init__(self, *shape):
        self.w = np.random.default_rng(0).normal(size=shape) / shape[0]**0.5
        self.b = np.zeros(shape[-1])

    def call(self, x):
        return x @ self.w + self.b

class Norm(Linear):
    def call(self, x):
        return F.layer_norm(x, x.shape[-1:], self.w, self.b)

class Block:
    def __init__(self, width):
        def layer():
            projections = dict(in_proj=Linear(width, 3 * width), out_proj=Linear(width, width))
            attention = Has(**projections, scaling=width**-0.5)
            return Has(attention_layer=attention, attn_layer_norm=Norm(width))
        self.dpa1_attention = Has(attention_layers=[layer(), layer()])

    def _graph_attention(self, x, row, centre, count, mask, switch, static):
        i, j = (centre[:, None] == centre).nonzero().T
        unit = F.normalize(row[:, 1:], dim=1)
        both = (switch[i] * switch[j]).squeeze(1)
        for layer in self.dpa1_attention.attention_layers:
            of = layer.attention_layer
            q, k, v = (F.normalize(y, dim=1) for y in of.in_proj.call(x).chunk(3, 1))
            score = ((q[i] * k[j]).sum(1) * of.scaling + 20) * both - 20
            weight = score.exp()
            weight = weight / torch.zeros_like(weight[: len(x)]).index_add(0, i, weight)[i]
            weight = weight * both * (unit[i] * unit[j]).sum(1)
            out = torch.zeros_like(v).index_add(0, i, weight[:, None] * v[j])
            x = layer.attn_layer_norm.call(x + of.out_proj.call(out))
        return x

class DescrptDPA1:
    def __init__(self, cutoff, smooth, sel, types, neuron, attn, attn_layer, seed, precision):
        self.se_atten = Block(attn)
"""


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    before, path, finders = set(sys.modules), list(sys.path), list(sys.meta_path)
    yield __import__("force_fields")
    sys.path[:], sys.meta_path[:] = path, finders
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("force_fields", "block_attention", "metatrain", "deepmd", "lmdb"):
            del sys.modules[name]


def test_both_sides_are_one_model(program, tmp_path, capsys):
    for place, text in {
        "metatrain/pet/modules/transformer": PET,
        "deepmd/dpmodel/descriptor/dpa1": DPA,
    }.items():
        path = tmp_path / f"{place}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    results = tmp_path / "results.json"
    program.main(
        [str(tmp_path), "--device", "cpu", "--atoms", "9", "--rounds", "1", "--dtypes", "float64"]
        + ["--shapes", "PET:8x2,DPA1:8x1", "--json", str(results)]
    )
    found = json.loads(results.read_text())
    assert [x["name"] for x in found] == ["PET 8x2", "DPA1 8x1"]
    for x in found:
        assert x["edges"] > 20
        assert all(0 <= differ <= 1e-10 for differ in x["differ"])
        assert all(math.isfinite(ms) for ms in x["ms"].values())
    assert capsys.readouterr().out.count("differ by") == 2
