"""Training on forces: time and memory of steps that differentiate a layer twice, on one core or a GPU.

    python benchmarks/forces.py --json benchmarks/results/cpu-forces.json
    python benchmarks/forces.py --graphs 64 --layers transformer --heads 8x8
    python benchmarks/forces.py --device cuda

"step" is a training step of a small potential: distances, radial basis functions as edge attributes, one
layer between an embedding and a readout, forces by ``autograd.grad(create_graph=True)``, and ``backward`` of
a loss on them. "layer" is the layer alone: the gradients of features and edge attributes, and ``backward`` of
their squares. Contestants are dfgnn's layer on plain operations ("plain"), torch_geometric's, and dfgnn's.
They run in turns in one process; a time is the least of --repeats: of processor time on a CPU, on a GPU from
idle to idle. Memory is the peak of torch's allocator during a call beyond what was there before, in the
layer's also beyond its results.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch_geometric.nn
from score import json_files
from torch import Tensor, nn

import dfgnn.nn.pyg
from dfgnn import reference
from dfgnn.bench import report
from dfgnn.bench.measure import peak_extra

ATOMS, SIDE, CUTOFF, BASIS = 25, 2.5, 3.0, 16
LAYERS: dict[str, tuple[str, Callable, dict]] = {
    "transformer": ("TransformerConv", reference.dot_attention, {"edge_dim": BASIS}),
    "gatv2-edges": (
        "GATv2Conv",
        reference.gatv2_attention,
        {"edge_dim": BASIS, "add_self_loops": False},
    ),
    "gatv2": ("GATv2Conv", reference.gatv2_attention, {"add_self_loops": False}),
    "gat-edges": ("GATConv", reference.gat_attention, {"edge_dim": BASIS, "add_self_loops": False}),
}


def close_pairs(position: Tensor, cutoff: float) -> Tensor:
    """[2, E], both directions of every pair."""
    near = [torch.cdist(rows, position) < cutoff for rows in position.split(500)]
    dst, src = torch.cat(near).fill_diagonal_(False).nonzero().unbind(1)
    return torch.stack([src, dst])


def molecules(count: int) -> tuple[Tensor, Tensor]:
    """Positions and edges of molecules of 25 atoms, nearly all of whose pairs are within the cutoff."""
    generator = torch.Generator().manual_seed(0)
    position = [torch.rand(ATOMS, 3, generator=generator) * SIDE for _ in range(count)]
    edges = [close_pairs(p, CUTOFF) + k * ATOMS for k, p in enumerate(position)]
    return torch.cat(position), torch.cat(edges, dim=1)


def system(atoms: int) -> tuple[Tensor, Tensor]:
    position = torch.rand(atoms, 3, generator=torch.Generator().manual_seed(0)) * (atoms / 0.5) ** (1 / 3)
    return position, close_pairs(position, 2.65)


def make(graph: str) -> tuple[Tensor, Tensor]:
    """Positions and edges. graph: a number; below 1,000 that of molecules, else that of atoms in one
    system."""
    size = int(graph)
    return system(size) if size >= 1000 else molecules(size)


def layer(kind: str, contestant: str, heads: int, dim: int) -> nn.Module:
    torch.manual_seed(0)
    library = torch_geometric.nn if contestant == "pyg" else dfgnn.nn.pyg
    width = heads * dim
    name, plain, options = LAYERS[kind]
    made = getattr(library, name)(width, dim, heads, **options)
    if contestant == "plain":
        made.attention = plain
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made


class Potential(nn.Module):
    def __init__(self, kind: str, contestant: str, heads: int, dim: int):
        super().__init__()
        self.layer, self.has_edges = layer(kind, contestant, heads, dim), kind != "gatv2"
        self.atom = nn.Parameter(torch.randn(heads * dim))
        self.scale, self.readout = nn.Linear(BASIS, heads * dim), nn.Linear(heads * dim, 1)
        self.register_buffer("centres", torch.linspace(0.3, CUTOFF, BASIS))

    def forward(self, position: Tensor, edges: Tensor) -> Tensor:
        src, dst = edges
        length = (position[src] - position[dst]).norm(dim=1, keepdim=True)
        basis = torch.exp(-8 * (length - self.centres).square())
        mean = basis.new_zeros(len(position), BASIS).index_add(0, dst, basis) / 20
        x = self.atom * torch.tanh(self.scale(mean))
        x = self.layer(x, edges, basis) if self.has_edges else self.layer(x, edges)
        return self.readout(nn.functional.silu(x)).sum()


def step(model: Potential, position: Tensor, edges: Tensor) -> Tensor:
    position = position.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(position, edges), position, create_graph=True)
    loss = slope.square().mean()
    model.zero_grad()
    loss.backward()
    return loss.detach()


def layer_step(model: Potential, x: Tensor, edges: Tensor, attr: Tensor) -> Tensor:
    leaves = [x, attr] if model.has_edges else [x]
    out = model.layer(x, edges, *leaves[1:])
    grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
    loss = sum(grad.square().mean() for grad in grads)
    for leaf in (*leaves, *model.parameters()):
        leaf.grad = None
    loss.backward()
    return loss.detach()


def seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    if device.type == "cpu":
        clock = time.process_time
    else:
        clock = time.perf_counter
        torch.cuda.synchronize()
    begin = clock()
    call()
    if device.type != "cpu":
        torch.cuda.synchronize()
    return clock() - begin


def measure(calls: dict[str, Callable[[], Tensor]], repeats: int, results: int, device: torch.device) -> dict:
    losses = {name: float(call()) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call, device) * 1e3)
    memory = {name: peak_extra(call, results, device) / 2**20 for name, call in calls.items()}
    return {name: {"ms": min(times[name]), "mib": memory[name], "loss": losses[name]} for name in calls}


def row(
    graph: str, kind: str, shape: tuple[int, int], contestants: list[str], repeats: int, device: torch.device
) -> dict:
    position, edges = (x.to(device) for x in make(graph))
    models = {name: Potential(kind, name, *shape).to(device) for name in contestants}
    for model in models.values():
        model.load_state_dict(next(iter(models.values())).state_dict())
    x = torch.randn(len(position), shape[0] * shape[1], device=device).requires_grad_()
    attr = torch.rand(edges.shape[1], BASIS, device=device).requires_grad_()
    leaves = [x, *([attr] if kind != "gatv2" else []), *next(iter(models.values())).layer.parameters()]
    results = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    steps = {name: lambda m=m: step(m, position, edges) for name, m in models.items()}
    layers = {name: lambda m=m: layer_step(m, x, edges, attr) for name, m in models.items()}
    return {
        "graph": graph,
        "edges": edges.shape[1],
        "layer": kind,
        "heads": "x".join(map(str, shape)),
        "of_step": measure(steps, repeats, 0, device),
        "of_layer": measure(layers, repeats, results, device),
    }


def ratio(of: dict, what: str) -> float:
    """The least value of the other contestants divided by dfgnn's."""
    return min(of[other][what] for other in of if other != "dfgnn") / of["dfgnn"][what]


def text(found: dict) -> str:
    """One line: how many times as fast, and what part of the memory, compared with the best of the others."""
    parts = [f"{found['graph']:>5} {found['layer']:12} {found['heads']:5}"]
    for name in ("of_step", "of_layer"):
        of = found[name]
        figures = ", ".join(f"{k} {v['ms']:.3g} ms {v['mib']:.0f} MiB" for k, v in of.items())
        parts.append(f"{name} {ratio(of, 'ms'):.2f} x, memory 1/{ratio(of, 'mib'):.1f} ({figures})")
    return "; ".join(parts)


def table(path: Path) -> str:
    """The table of docs/internals/second_derivatives.md, worst step first."""
    rows = sorted(json.loads(path.read_text())["rows"], key=lambda row: ratio(row["of_step"], "ms"))
    head = "layer, heads", "graph, edges", "step: plain, PyG, ours, ms", "times", "memory, MiB", "part"
    more = "layer: times", "memory"
    lines = ["| " + " | ".join(head + more) + " |", "|---" * len(head + more) + "|"]
    for row in rows:
        step, alone = row["of_step"], row["of_layer"]
        name = f"{row['layer']} {row['heads'].replace('x', ' × ')}"
        ms, mib = (
            ", ".join(f"{step[who][k]:.0f}" for who in ("plain", "pyg", "dfgnn")) for k in ("ms", "mib")
        )
        cells = [
            name, f"{row['graph']}, {row['edges']:,}", ms, f"{ratio(step, 'ms'):.1f}", mib,
            f"1/{ratio(step, 'mib'):.1f}", f"{ratio(alone, 'ms'):.1f}", f"1/{ratio(alone, 'mib'):.1f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--graphs",
        default="64,512,8000",
        help="numbers of molecules below 1000, or of the atoms of one system",
    )
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--heads", default="8x8,4x32,1x64,16x4,2x24")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--contestants", default="plain,pyg,dfgnn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", help="to be recorded, where there is no repository")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of such a file instead")
    args = parser.parse_args(argv)
    if args.table is not None:
        print(table(args.table))
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for graph in args.graphs.split(","):
        for kind in args.layers.split(","):
            for heads in args.heads.split(","):
                shape = tuple(map(int, heads.split("x")))
                contestants = args.contestants.split(",")
                rows.append(row(graph, kind, shape, contestants, args.repeats, args.device))
                print(text(rows[-1]), flush=True)
                json_files.write_json(
                    args.json,
                    {
                        "environment": report.environment(args.device, args.commit),
                        "repeats": args.repeats,
                        "rows": rows,
                    },
                )


if __name__ == "__main__":
    main()
