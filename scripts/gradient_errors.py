"""Measures errors of gradients where a softmax's gradient cancels: writes the table of docs/numerics.md.

    python scripts/gradient_errors.py  # print it
    python scripts/gradient_errors.py --device cuda --json gpu.json  # a column for each schedule
    python scripts/gradient_errors.py --page docs/numerics.md --add gpu.json

Reference: ``dfgnn.reference`` in float64 with the same, already rounded inputs. *Plain* is
``dfgnn.reference`` in the tested type: the operations of PyTorch. A cell is the largest relative error (norm
of the difference by norm) of a gradient that passes through the softmax; where that is 0 by theory, in rows
of one edge, the largest number found in its place. Of 15 layers, h + attention(layer norm of h), it is the
gradient of all weights that lead to scores only.
"""

import argparse
import json

import torch

from dfgnn import Graph, functional, reference
from dfgnn.plan import SCHEDULES
from dfgnn.runtime.programs import Parser, device, existing_file, file_to_write

NODES, EDGES, HEADS, DIM = 200, 3000, 2, 32
FUNCTIONS = {"GAT": "gat_attention", "GATv2": "gatv2_attention", "dot": "dot_attention"}
# The gradients that pass through the softmax, by score.
SCORES = {
    "GAT": ("score_src", "score_dst"),
    "GATv2": ("query", "att"),
    "dot": ("query", "key"),
}
CASES = {
    "random features": {},
    "a common part, 3 + 0.1 ε": {"common": True},
    "sharp scores": {"sharp": 8.0},
    "sharp scores and a common part": {"sharp": 8.0, "common": True},
    "a common part in the keys, too": {"common": True, "common_key": True},
    "rows of one edge": {"single": True, "common": True},
    "rows of one edge, weights and dropout": {
        "single": True,
        "common": True,
        "weight": True,
        "dropout_p": 0.6,
    },
    "edge weights": {"weight": True, "common": True},
    "dropout 0.5": {"dropout_p": 0.5, "common": True},
    "15 layers": {"layers": 15},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BEGIN, END = "<!-- gradient errors: begin -->", "<!-- gradient errors: end -->"


def results_file(text: str) -> dict:
    """The content of a file of ``--json``."""
    try:
        content = json.loads(existing_file(text).read_text())
        if "rows" not in content:
            raise ValueError("it lacks rows")
    except (OSError, ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text} is no file of results: {error}") from None
    return content


def inputs_of(name, generator, edges, sharp=1.0, common=False, common_key=False, weight=False, **_):
    """Arguments by name, float32."""

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def features():
        x = normal(NODES, HEADS, DIM)
        return 3 + 0.1 * x if common else x

    if name == "GAT":
        found = {"value": features(), "score_src": sharp * normal(NODES, HEADS)}
        found["score_dst"] = sharp * normal(NODES, HEADS)
    elif name == "GATv2":
        # query + key lies on both sides of the LeakyReLU's bend: were all on one side, the gradient of
        # query would be 0.
        found = {"key": features(), "query": normal(NODES, HEADS, DIM) - (3 if common else 0)}
        found["att"] = sharp * normal(HEADS, DIM) / DIM**0.5
    else:
        # Queries and keys are projections: without a common part of their own, unless asked for.
        found = {"query": sharp * normal(NODES, HEADS, DIM), "key": normal(NODES, HEADS, DIM)}
        found["value"] = features()
        if common_key:
            found["key"] += 3
    if weight:
        found["weight"] = torch.rand(edges, generator=generator)
    return found


def cases_of(name) -> list[str]:
    """The cases of a score: only dot has keys apart from values."""
    return [case for case, options in CASES.items() if name == "dot" or "common_key" not in options]


def weights_of(name, generator, layers):
    """The weights of the layers of `stack`, float32."""

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    ends = {"GAT": 1, "GATv2": 2, "dot": 3}[name]
    found = {f"proj{k}": normal(ends, HEADS * DIM, HEADS * DIM) / (HEADS * DIM) ** 0.5 for k in range(layers)}
    if name != "dot":
        found |= {f"attn{k}": normal(2, HEADS, DIM) / DIM**0.5 for k in range(layers)}
    return found


def stack(module, name, graph, x, weights, layers, options):
    """h + attention(layer norm of h), for every layer."""
    function = getattr(module, FUNCTIONS[name])
    for k in range(layers):
        h = torch.nn.functional.layer_norm(x, x.shape[1:])
        feats = [(h @ proj).unflatten(1, (HEADS, DIM)) for proj in weights[f"proj{k}"]]
        if name == "GAT":
            terms = [(feats[0] * attn).sum(2) for attn in weights[f"attn{k}"]]
            out = function(graph, feats[0], *terms, **options)
        elif name == "GATv2":
            out = function(graph, *feats, weights[f"attn{k}"][0], **options)
        else:
            out = function(graph, *feats, **options)
        x = x + out.flatten(1)
    return x


def graph_of(single, generator, device):
    dst = torch.arange(NODES) if single else torch.randint(NODES, (EDGES,), generator=generator)
    src = torch.randint(NODES, dst.shape, generator=generator)
    return Graph.from_coo(src.to(device), dst.to(device), num_nodes=NODES)


def gradients(module, name, graph, inputs, grad, dtype, options):
    options = dict(options)
    layers = options.pop("layers", 0)
    leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in inputs.items()}
    if layers:
        weights = {n: x for n, x in leaves.items() if n != "x"}
        out = stack(module, name, graph, leaves["x"], weights, layers, options)
        grad = grad.flatten(1)
    else:
        out = getattr(module, FUNCTIONS[name])(graph, **leaves, **options)
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad.to(dtype))))


def error(name, found, exact, single):
    worst = 0.0
    if "x" in exact:  # 15 layers: the gradients of all weights that lead only to scores
        names = [n for n in exact if n != "x" and (name == "dot" or n.startswith("att"))]
        if name == "dot":  # the third is the projection of the values
            found, exact = ({n: x[n][:2] for n in names} for x in (found, exact))
        found, exact = (torch.cat([x[n].double().flatten() for n in names]) for x in (found, exact))
        return ((found - exact).norm() / exact.norm()).item()
    for key in SCORES[name]:
        difference = (found[key].double() - exact[key]).norm().item()
        worst = max(worst, found[key].abs().max().item() if single else difference / exact[key].norm().item())
    return worst


def measure(name, case, dtype, device, seeds=(0,)) -> dict[str, float]:
    """Errors by column: of several seeds, which draw graph, inputs and dropout, the root mean square."""
    found = [_measure(name, case, dtype, device, seed) for seed in seeds]
    return {column: (sum(x[column] ** 2 for x in found) / len(found)) ** 0.5 for column in found[0]}


def _measure(name, case, dtype, device, seed) -> dict[str, float]:
    options = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    single = options.get("single", False)
    graph = graph_of(single, generator, device)
    layers = options.get("layers", 0)
    if layers:
        x = torch.randn(NODES, HEADS * DIM, generator=generator)
        inputs = {"x": x, **weights_of(name, generator, layers)}
    else:
        inputs = inputs_of(name, generator, graph.num_edges, **options)
    inputs = {n: x.to(dtype).to(device) for n, x in inputs.items()}
    grad = torch.randn(NODES, HEADS, DIM, generator=generator).to(device, dtype)
    more = {"layers": layers} if layers else {}
    if "dropout_p" in options:
        more |= dict(dropout_p=options["dropout_p"], generator=torch.tensor([5 + seed], device=device))
    exact = gradients(reference, name, graph, inputs, grad, torch.float64, more)
    errors = {
        "plain": error(name, gradients(reference, name, graph, inputs, grad, dtype, more), exact, single)
    }
    for schedule in SCHEDULES if device == "cuda" else ("natural",):
        try:
            found = gradients(
                functional,
                name,
                graph,
                inputs,
                grad,
                dtype,
                more | {"kernel_options": {"schedule": schedule}},
            )
        except ValueError:  # the schedule is not available for this type or these options
            continue
        errors[schedule if device == "cuda" else "CPU"] = error(name, found, exact, single)
    return errors


def measure_all(device) -> list[dict]:
    return [
        {"function": name, "case": case, "dtype": str(dtype).removeprefix("torch."),
         "errors": measure(name, case, dtype, device)}
        for name in FUNCTIONS for case in cases_of(name) for dtype in DTYPES
    ]  # fmt: skip


def lines_of(rows) -> list[str]:
    """A line per function and case, and per type: plain PyTorch's error, dfgnn's on the CPU, and that of the
    worst schedule on a GPU."""

    def cell(errors: dict[str, float]) -> str:
        of_gpu = max((errors[s] for s in SCHEDULES if s in errors), default=None)
        found = (errors.get("plain"), errors.get("CPU"), of_gpu)
        return ", ".join("–" if x is None else f"{x:.1e}" if x else "0" for x in found)

    kinds = list(dict.fromkeys(row["dtype"] for row in rows))
    lines = [f"| function | case | {' | '.join(kinds)} |", "|---|---|" + "---|" * len(kinds)]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cells.setdefault((row["function"], row["case"]), {})[row["dtype"]] = cell(row["errors"])
    return lines + [f"| {' | '.join([*key, *(of[kind] for kind in kinds)])} |" for key, of in cells.items()]


def add(rows, others) -> None:
    """Adds the columns of another device's rows."""
    for row in rows:
        same = [o for o in others if all(o[k] == row[k] for k in ("function", "case", "dtype"))]
        for other in same:
            row["errors"] = {**other["errors"], **row["errors"]}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--device", type=device, default="cpu", help="where")
    parser.add_argument("--page", type=existing_file, metavar="FILE", help="gets the table between its marks")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write the errors to it")
    parser.add_argument(
        "--add",
        type=results_file,
        metavar="FILE",
        help="of --json, whose columns the table gets, too",
    )
    args = parser.parse_args()
    before, _, rest = ("", "", "") if args.page is None else args.page.read_text().partition(BEGIN)
    if args.page is not None and END not in rest:
        parser.error(f"--page: expected the marks {BEGIN} and {END} in {args.page}")
    rows = measure_all(args.device)
    if args.add:
        add(rows, args.add["rows"])
    lines = lines_of(rows)
    if args.json:
        args.json.write_text(
            json.dumps({"device": args.device, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        )
    if args.page is None:
        print("\n".join(lines))
        return
    args.page.write_text("\n".join([before + BEGIN, *lines, END]) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
