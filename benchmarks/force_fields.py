"""Training on forces with the attention of two force fields, theirs and dfgnn's, on their own modules:

    python benchmarks/force_fields.py FOLDER [--device cuda] [--atoms 64] [--json FILE]

FOLDER holds ``metatrain`` and ``deepmd`` as their packages have them (``pip download --no-deps``, unpacked);
none of their code is part of this project. A step is an energy of the edges of atoms in a box, forces by
``autograd.grad(create_graph=True)``, and the gradients of a loss on them. Both sides have one set of weights.

PET (metatrain): its ``Transformer`` over padded neighbours with ``use_manual_attention``, whose weights a
cut-off multiplies; beside it the same layers over the tokens without padding, with
`dfgnn.functional.block_attention`. DPA1 (deepmd-kit): ``_graph_attention`` of its descriptor, a list of all
pairs of a centre's edges with ``segment_softmax``; beside it the same with `block_attention`, without a list.
Printed: the largest differences of energy, forces and gradients relative to the largest element; the median
milliseconds of a step in turns; the memory that a step adds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from block_attention import medians
from torch import Tensor, nn

from dfgnn.bench.measure import peak_extra
from dfgnn.functional import block_attention

CUTOFF, DENSITY = 5.0, 0.16  # angstrom, atoms per cubic angstrom: 84 neighbours except at the surface
SHIFT = 20.0  # deepmd-kit's: the score of an edge at the cut-off is -20


def edges_of(atoms: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of atoms in a box and both ends of the edges within the cut-off, sorted by centre."""
    generator = torch.Generator().manual_seed(0)
    position = torch.rand(atoms, 3, generator=generator, dtype=torch.float64) * (atoms / DENSITY) ** (1 / 3)
    near = torch.cdist(position, position) < CUTOFF
    centre, neighbour = near.fill_diagonal_(False).nonzero().T
    return position.to(device), centre.to(device), neighbour.to(device)


class Missing:
    """Makes packages that a module imports and does not need importable where they are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        loader = types.SimpleNamespace(
            create_module=lambda spec: mock.MagicMock(), exec_module=lambda x: None
        )
        if name.split(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, loader, is_package=True)

    names = "lmdb", "mendeleev", "h5py", "msgpack", "wcmatch", "dargs", "einops", "ml_dtypes", "yaml", "scipy"


class PET(nn.Module):
    """An energy of PET's transformer over the neighbours of each atom."""

    def __init__(self, transformer: Any, width: int, heads: int):
        super().__init__()
        self.transformer = transformer.Transformer(
            width, 2, heads, 2 * width, 2 * width, "RMSNorm", "SwiGLU", "PreLN"
        )
        self.edge, self.atom = nn.Linear(4, width), nn.Parameter(torch.randn(2 * width))
        self.readout = nn.Linear(2 * width, 1)
        self.edge_readout = nn.Linear(width, 1)
        self.in_blocks = False

    def forward(self, edge: Tensor, centre: Tensor, count: Tensor) -> Tensor:
        length = edge.norm(dim=1)
        x, node = self.edge(torch.cat([edge, length[:, None]], 1)), self.atom.expand(len(count), -1)
        cutoff = 0.5 * (1 + torch.cos(math.pi * length / CUTOFF))
        node, x = (self.ragged if self.in_blocks else self.padded)(node, x, cutoff, centre, count)
        return self.readout(node).sum() + (self.edge_readout(x).squeeze(1) * cutoff).sum()

    def padded(self, node: Tensor, x: Tensor, cutoff: Tensor, centre: Tensor, count: Tensor):
        first = count.cumsum(0) - count
        place = torch.arange(len(x), device=x.device) - first[centre]
        longest = int(count.max())
        dense = x.new_zeros(len(count), longest, x.shape[1]).index_put((centre, place), x)
        factors = cutoff.new_zeros(len(count), longest).index_put((centre, place), cutoff)
        factors = F.pad(factors, (1, 0), value=1.0)  # the atom itself
        node = node[:, None]
        node, dense = self.transformer(node, dense, factors[:, None].expand(-1, longest + 1, -1), True)
        return node[:, 0], dense[centre, place]

    def ragged(self, node: Tensor, x: Tensor, cutoff: Tensor, centre: Tensor, count: Tensor):
        edges = torch.arange(len(x), device=x.device) + centre + 1
        offsets = F.pad((count + 1).cumsum(0), (1, 0))
        atoms = offsets[:-1]
        bias = cutoff.new_zeros(len(x) + len(count)).index_copy(0, edges, cutoff.clamp(min=1e-15).log())
        for layer in self.transformer.layers:
            tokens = x.new_zeros(len(x) + len(count), x.shape[1]).index_copy(0, edges, x)
            tokens = tokens.index_copy(0, atoms, layer.center_contraction(node))
            of = layer.attention
            rows = of.input_linear(layer.norm_attention(tokens)).view(
                len(tokens), 3, of.num_heads, of.head_dim
            )
            out = block_attention(*rows.unbind(1), offsets, key_bias=bias).flatten(1)
            out = of.output_linear(out)
            node = node + layer.center_expansion(out.index_select(0, atoms))
            node = node + layer.center_mlp(layer.norm_center_features(node))
            x = x + out.index_select(0, edges)
            x = x + layer.mlp(layer.norm_mlp(x))
        return node, x


class DPA(nn.Module):
    """An energy of DPA1's attention among the edges of each atom."""

    def __init__(self, dpa1: Any, width: int, heads: int, dtype: torch.dtype):
        super().__init__()
        descriptor = dpa1.DescrptDPA1(
            CUTOFF, 0.5, [120], 1, neuron=[width // 4, width // 2, width], attn=width, attn_layer=2, seed=1,
            precision=str(dtype)[6:],
        )  # fmt: skip
        self.block, self.edge, self.readout = descriptor.se_atten, nn.Linear(4, width), nn.Linear(width, 1)
        for layer in self.block.dpa1_attention.attention_layers:
            for of in (layer.attention_layer.in_proj, layer.attention_layer.out_proj, layer.attn_layer_norm):
                for name in ("w", "b"):
                    weight = nn.Parameter(torch.as_tensor(getattr(of, name)))
                    self.register_parameter(f"of_{len(list(self.parameters()))}", weight)
                    setattr(of, name, weight)
        self.in_blocks = False

    def forward(self, edge: Tensor, centre: Tensor, count: Tensor) -> Tensor:
        length = edge.norm(dim=1, keepdim=True)
        x = torch.tanh(self.edge(torch.cat([edge, length], 1)))
        switch = 0.5 * (1 + torch.cos(math.pi * length / CUTOFF))
        row = torch.cat([1 / length, edge / length], 1)
        if self.in_blocks:
            x = self.ragged(x, row[:, 1:], switch, count)
        else:
            mask = torch.ones_like(centre, dtype=torch.bool)
            x = self.block._graph_attention(x, row, centre, len(count), mask, switch, None)
        return (torch.tanh(self.readout(x)) * switch).sum()

    def ragged(self, x: Tensor, unit: Tensor, switch: Tensor, count: Tensor) -> Tensor:
        offsets, ends = F.pad(count.cumsum(0), (1, 0)), switch * unit
        for layer in self.block.dpa1_attention.attention_layers:
            of = layer.attention_layer
            query, key, value = (F.normalize(y, dim=1) for y in of.in_proj.call(x).chunk(3, 1))
            query, key = (
                switch * F.pad(y, (0, 1), value=math.sqrt(SHIFT)) for y in (query * of.scaling, key)
            )
            values = (value[:, :, None] * ends[:, None]).flatten(1)
            out = block_attention(*(y.unsqueeze(1) for y in (query, key, values)), offsets, scale=1.0)
            out = (out.view(len(x), -1, 3) * ends[:, None]).sum(2)
            x = layer.attn_layer_norm.call(x + of.out_proj.call(out))
        return x


def step(model: Any, position: Tensor, centre: Tensor, neighbour: Tensor, count: Tensor) -> list[Tensor]:
    position = position.detach().requires_grad_()
    energy = model(position[neighbour] - position[centre], centre, count)
    (forces,) = torch.autograd.grad(energy, position, create_graph=True)
    return [
        energy,
        forces,
        *torch.autograd.grad(forces.square().sum(), list(model.parameters()), allow_unused=True),
    ]


def compare(name: str, model: Any, atoms: int, device: str, rounds: int) -> dict[str, Any]:
    dtype = next(model.parameters()).dtype
    position, centre, neighbour = edges_of(atoms, device)
    position, count = position.to(dtype), centre.bincount(minlength=atoms)

    def of(in_blocks: bool) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            model.in_blocks = in_blocks
            return step(model, position, centre, neighbour, count)

        return run

    runs = {"ours": of(True), "theirs": of(False)}
    pairs = list(zip(*(run() for run in runs.values())))
    differ = [
        max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-30)) for x, y in part if x is not None)
        for part in (pairs[:1], pairs[1:2], pairs[2:])
    ]
    memory = {way: peak_extra(run, 0, torch.device(device)) / 2**20 for way, run in runs.items()}
    ms = medians(runs, device, rounds)
    found = {
        "name": name, "atoms": atoms, "edges": len(centre), "pairs": int(count.square().sum()),
        "dtype": str(dtype)[6:],
        "differ": differ, "ms": ms, "mib": memory,
    }  # fmt: skip
    print(
        f"{name} {found['dtype']}, {atoms} atoms, {len(centre):,} edges, {found['pairs']:,} pairs: differ by "
        + ", ".join(f"{x:.0e}" for x in differ)
        + f"; {ms['theirs']:.1f} ms, ours {ms['ours']:.1f} ({ms['theirs'] / ms['ours']:.2f}x); "
        + f"{memory['theirs']:.0f} MiB, ours {memory['ours']:.0f} ({memory['ours'] / memory['theirs']:.3f})",
        flush=True,
    )
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--atoms", default="64")
    parser.add_argument("--dtypes", default="float64,float32")
    parser.add_argument(
        "--shapes", default="PET:128x8,PET:64x4,DPA1:128x1,DPA1:64x1", help="FIELD:WIDTHxHEADS, ..."
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    sys.path.insert(0, str(args.folder))
    missing = Missing()
    missing.names = tuple(name for name in missing.names if importlib.util.find_spec(name) is None)
    sys.meta_path.append(missing)
    print(torch.cuda.get_device_name() if args.device == "cuda" else "CPU", torch.__version__)
    records = []
    for name in args.dtypes.split(","):
        dtype = getattr(torch, name)
        for shape in args.shapes.split(","):
            field, _, size = shape.partition(":")
            width, heads = map(int, size.split("x"))
            torch.manual_seed(0)
            if field == "PET":
                made = PET(importlib.import_module("metatrain.pet.modules.transformer"), width, heads)
            else:
                made = DPA(importlib.import_module("deepmd.dpmodel.descriptor.dpa1"), width, heads, dtype)
            made.to(args.device, dtype)
            for atoms in map(int, args.atoms.split(",")):
                records.append(compare(f"{field} {size}", made, atoms, args.device, args.rounds))
    if args.json:
        args.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
