"""The error of sums in bfloat16 against the degree of a node: PyG eager, PyG compiled, dfgnn.

    python benchmarks/sums_in_16_bits.py --json benchmarks/results/cpu-sums-in-16-bits.json
    python benchmarks/sums_in_16_bits.py --device cuda --json benchmarks/results/h200-sums-in-16-bits.json
    python benchmarks/sums_in_16_bits.py --picture docs/pictures/sums-in-16-bits.png FILE...

A node has 1 to a million neighbours. "sum": the sum of their rows of ones, by torch_geometric's ``scatter``
of gathered rows and by ``functional.spmm``. "gradient": the gradient of a row that as many nodes read.
"GATConv": a layer whose scores are 0 and whose projection is the identity, that is the mean, of rows of 1 and
3 in turns. An error is that of the worst element, relative to the exact value; 2⁻⁹ is what rounding the
result gives. The picture has a line of panels for each FILE.
"""

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from score import json_files
from torch import Tensor
from torch_geometric.nn import GATConv
from torch_geometric.utils import scatter

import dfgnn.nn.pyg
from dfgnn import Graph, functional
from dfgnn.bench import report
from dfgnn.bench.palette import COLOURS

WIDTH = 16
DEGREES = [1, 4, 16, 64, 128, 256, 512, 1024, 4096, 10_000, 100_000, 1_000_000]
QUANTITIES = ["sum", "gradient", "GATConv"]
CONTESTANTS = {
    "PyG, eager": "PyG",
    "PyG, compiled": "PyG",
    "dfgnn, eager": "dfgnn",
    "dfgnn, compiled": "dfgnn",
}


def sum_of(pyg: bool, edge_index: Tensor, num_src: int, num_dst: int) -> Callable[[Tensor], Tensor]:
    """The sums of the sources' rows over the edges into each destination."""
    if pyg:
        return lambda x: scatter(x.index_select(0, edge_index[0]), edge_index[1], 0, num_dst, reduce="sum")
    graph = Graph.from_edge_index(edge_index, num_src=num_src, num_dst=num_dst)
    ones = torch.ones(graph.num_edges, dtype=torch.bfloat16, device=edge_index.device)
    return lambda x: functional.spmm(graph, ones, x.unsqueeze(1)).squeeze(1)


def value_of(quantity: str, contestant: str, degree: int, device: torch.device) -> tuple[Tensor, float]:
    """A row of results, and what each of its elements should be."""
    library, mode = contestant.split(", ")
    pyg, options = library == "PyG", {"dtype": torch.bfloat16, "device": device}
    others, one = torch.arange(degree, device=device), torch.zeros(degree, dtype=torch.long, device=device)
    compiled: Callable = torch.compile if mode == "compiled" else lambda x: x
    torch._dynamo.reset()
    if quantity == "sum":
        call = sum_of(pyg, torch.stack([others, one]), degree, 1)
        return compiled(call)(torch.ones(degree, WIDTH, **options))[0], degree
    if quantity == "gradient":
        call = sum_of(pyg, torch.stack([one, others]), 1, degree)
        x = torch.ones(1, WIDTH, **options).requires_grad_()
        (found,) = torch.autograd.grad(compiled(call)(x).sum(), x)
        return found[0], degree
    made = (GATConv if pyg else dfgnn.nn.pyg.GATConv)(WIDTH, WIDTH, add_self_loops=False, bias=False)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
        made.lin.weight.copy_(torch.eye(WIDTH))
    layer = made.to(**options)
    x = (1 + 2 * (others % 2)).to(torch.bfloat16).unsqueeze(1).repeat(1, WIDTH)
    out = compiled(layer)((x, x[:1]), torch.stack([others, one]))
    return out[0], 1 + 2 * (degree // 2) / degree


def measured(quantity: str, contestant: str, degree: int, device: torch.device) -> tuple[float, float]:
    """The worst element, and its error."""
    found, exact = value_of(quantity, contestant, degree, device)
    found = found.detach().double()
    worst = found[(found - exact).abs().argmax()].item()
    return worst, abs(worst - exact) / exact


def draw(path: Path, files: list[Path]) -> None:
    from matplotlib.figure import Figure

    found = [json.loads(file.read_text()) for file in files]
    figure = Figure(figsize=(10, 2.7 * len(found) + 0.4), layout="constrained")
    axes = figure.subplots(len(found), len(QUANTITIES), sharex=True, sharey=True, squeeze=False)
    for line, results in zip(axes, found):
        where = results["environment"].get("gpu") or "CPU, 1 thread"
        for axis, quantity in zip(line, QUANTITIES):
            for contestant, library in CONTESTANTS.items():
                named = quantity, contestant
                (row,) = [r for r in results["rows"] if (r["quantity"], r["contestant"]) == named]
                axis.plot(
                    results["degrees"], [max(float(error), 1e-4) for error in row["errors"]],
                    "--" if "compiled" in contestant else "-", color=COLOURS[library], label=contestant,
                    marker="o", markersize=3,
                )  # fmt: skip
            axis.set(xscale="log", yscale="log", ylim=(7e-5, 2))
            axis.set_title(f"{quantity}, {where}", fontsize=9)
            axis.axhline(2**-9, color="grey", linewidth=0.6)
    for axis in axes[-1]:
        axis.set_xlabel("degree")
    for axis in axes[:, 0]:
        axis.set_ylabel("relative error (0: 10⁻⁴)")
    axes[0, 0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="results to draw")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--degrees", default=",".join(map(str, DEGREES)))
    parser.add_argument("--commit", help="to be recorded, where there is no repository")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw results into this file")
    args = parser.parse_args(argv)
    if (args.picture is None) != (not args.files):
        parser.error("--picture and FILE: expected both or neither")
    if args.picture is not None:
        draw(args.picture, args.files)
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    degrees = [int(degree) for degree in args.degrees.split(",")]
    rows: list[dict] = []
    for quantity in QUANTITIES:
        for contestant in CONTESTANTS:
            values: list[float] = []
            errors: list[float] = []
            row = {"quantity": quantity, "contestant": contestant, "values": values, "errors": errors}
            rows.append(row)
            for degree in degrees:
                value, error = measured(quantity, contestant, degree, args.device)
                values.append(value)
                errors.append(error)
                print(f"{quantity:9} {contestant:16} {degree:8} {value:12.6g} error {error:.3g}", flush=True)
            environment = report.environment(args.device, args.commit)
            results = {"environment": environment, "width": WIDTH, "degrees": degrees, "rows": rows}
            json_files.write_json(args.json, results)


if __name__ == "__main__":
    main()
