"""How exact gradients are where a softmax's gradient cancels: writes the table of docs/numerics.md.

    python scripts/gradient_errors.py                  # print it
    python scripts/gradient_errors.py --page docs/numerics.md
    python scripts/gradient_errors.py --device cuda    # a column for each schedule that there is

Reference: ``dfgnn.reference`` in float64 with the same, already rounded inputs. *Plain* is
``dfgnn.reference`` in the tested type: the operations of PyTorch. A cell is the largest relative error (norm
of the difference by norm) of a gradient that passes through the softmax; where that is 0 by theory, in rows
of one edge, the largest number found in its place.
"""

import argparse
import json
from pathlib import Path

import torch

from dfgnn import Graph, functional, reference
from dfgnn.schedule import SCHEDULES

NODES, EDGES, HEADS, DIM = 200, 3000, 2, 32
FUNCTIONS = {"GAT": "gat_attention", "GATv2": "gatv2_attention", "dot": "dot_attention"}
# Those that pass through the softmax.
SCORES = {
    "GAT": ("alpha_src", "alpha_dst"),
    "GATv2": ("x_dst", "attn"),
    "dot": ("query", "key"),
}
CASES = {
    "random features": {},
    "a common part, 3 + 0.1 ε": {"common": True},
    "sharp scores": {"sharp": 8.0},
    "sharp scores and a common part": {"sharp": 8.0, "common": True},
    "rows of one edge": {"single": True, "common": True},
    "edge weights": {"weight": True, "common": True},
    "dropout 0.5": {"dropout_p": 0.5, "common": True},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BEGIN, END = "<!-- gradient errors: begin -->", "<!-- gradient errors: end -->"


def inputs_of(name, generator, sharp=1.0, common=False, weight=False, **_):
    """Arguments by name, float32."""

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def features():
        x = normal(NODES, HEADS, DIM)
        return 3 + 0.1 * x if common else x

    if name == "GAT":
        found = {"feat": features(), "alpha_src": sharp * normal(NODES, HEADS)}
        found["alpha_dst"] = sharp * normal(NODES, HEADS)
    elif name == "GATv2":
        # Sums of both ends on either side of the LeakyReLU's bend: on one, the gradient of x_dst is 0.
        found = {"x_src": features(), "x_dst": normal(NODES, HEADS, DIM) - (3 if common else 0)}
        found["attn"] = sharp * normal(HEADS, DIM) / DIM**0.5
    else:
        # Queries and keys are projections: without a common part of their own.
        found = {"query": sharp * normal(NODES, HEADS, DIM), "key": normal(NODES, HEADS, DIM)}
        found["value"] = features()
    if weight:
        found["edge_weight"] = torch.rand(EDGES, generator=generator)
    return found


def graph_of(single, generator, device):
    dst = torch.arange(NODES) if single else torch.randint(NODES, (EDGES,), generator=generator)
    src = torch.randint(NODES, dst.shape, generator=generator)
    return Graph.from_coo(src.to(device), dst.to(device), num_nodes=NODES)


def gradients(module, name, graph, inputs, grad, dtype, options):
    leaves = {n: x.to(dtype).requires_grad_() for n, x in inputs.items()}
    out = getattr(module, FUNCTIONS[name])(graph, **leaves, **options)
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad.to(dtype))))


def error(name, found, exact, single):
    worst = 0.0
    for key in SCORES[name]:
        difference = (found[key].double() - exact[key]).norm().item()
        worst = max(worst, found[key].abs().max().item() if single else difference / exact[key].norm().item())
    return worst


def measure(name, case, dtype, device) -> dict[str, float]:
    """Errors by column."""
    options = CASES[case]
    generator = torch.Generator().manual_seed(0)
    single = options.get("single", False)
    graph = graph_of(single, generator, device)
    inputs = {n: x.to(dtype).to(device) for n, x in inputs_of(name, generator, **options).items()}
    grad = torch.randn(NODES, HEADS, DIM, generator=generator).to(device, dtype)
    more = {}
    if "dropout_p" in options:
        more = dict(dropout_p=options["dropout_p"], _seed=torch.tensor([5], device=device))
    exact = gradients(reference, name, graph, inputs, grad, torch.float64, more)
    errors = {
        "plain": error(name, gradients(reference, name, graph, inputs, grad, dtype, more), exact, single)
    }
    for schedule in SCHEDULES if device == "cuda" else ("natural",):
        try:
            found = gradients(functional, name, graph, inputs, grad, dtype, more | {"schedule": schedule})
        except ValueError:  # not to be had for this type, or these options
            continue
        errors[schedule if device == "cuda" else "CPU"] = error(name, found, exact, single)
    return errors


def table(device) -> tuple[list[str], list[dict]]:
    columns = ["plain", *(SCHEDULES if device == "cuda" else ["CPU"])]
    names = ["plain PyTorch", *(f"dfgnn, {c}" for c in columns[1:])]
    lines = [f"| function | case | type | {' | '.join(names)} |", "|---|---|---|" + "---|" * len(columns)]
    rows = []
    for name in FUNCTIONS:
        for case in CASES:
            for dtype in DTYPES:
                errors = measure(name, case, dtype, device)
                kind = str(dtype).removeprefix("torch.")
                rows.append({"function": name, "case": case, "dtype": kind, "errors": errors})
                cells = (f"{errors[c]:.1e}" if errors.get(c) else "0" if c in errors else "" for c in columns)
                lines.append(f"| {name} | {case} | {kind} | {' | '.join(cells)} |")
    return lines, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--page", type=Path, help="put the table into this file, between its two marks")
    parser.add_argument("--json", type=Path, help="write the errors here")
    args = parser.parse_args()
    lines, rows = table(args.device)
    if args.json:
        args.json.write_text(
            json.dumps({"device": args.device, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        )
    if args.page is None:
        print("\n".join(lines))
        return
    before, _, rest = args.page.read_text().partition(BEGIN)
    if END not in rest:
        raise SystemExit(f"{args.page}: expected the marks {BEGIN} and {END}")
    args.page.write_text("\n".join([before + BEGIN, *lines, END]) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
