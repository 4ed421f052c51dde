"""Measures the speed-ups of docs/cookbook.md: its blocks' `before` and `after`, in turns in one process.

    python benchmarks/cookbook.py [--nodes 10000] [--edges 150000] [--rounds 3] [--json FILE]

The blocks run unchanged except for the numbers of nodes and edges, on one thread; what counts is its CPU
time, which other programs on the machine change least.
"""

import argparse
import json
import re
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType

import torch

from dfgnn.bench.report import environment

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cookbook.md"
SECTION = re.compile(r"^## (\d+\. .*?)$.*?^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def step(function, inputs) -> float:
    """CPU seconds of forward and backward."""
    begin = time.process_time()
    out = function(*inputs)
    torch.autograd.grad(out.square().sum(), inputs)
    return time.process_time() - begin


def measure(title: str, code: str, nodes: int, edges: int, rounds: int) -> dict:
    """Milliseconds of both functions' fastest steps: other programs can only make a step slower."""
    code = re.sub(
        r"^N, E, (.*) = [\d_]+, [\d_]+,", rf"N, E, \1 = {nodes}, {edges},", code, count=1, flags=re.M
    )
    module = ModuleType("a_block_of_the_cookbook")
    sys.modules[module.__name__] = module  # PyG looks up the module of a user's layer there
    torch.manual_seed(0)
    exec(compile(code, str(PAGE), "exec"), vars(module))
    times: dict[str, list[float]] = {"before": [], "after": []}
    for k in range(rounds + 1):
        for name, found in times.items():
            seconds = step(getattr(module, name), module.inputs)
            if k:  # the first round warms up
                found.append(1e3 * seconds)
    row = {"case": title, **{name: round(min(found), 3) for name, found in times.items()}}
    row["times"] = round(row["before"] / row["after"], 2)
    return row


def table(rows: list[dict]) -> str:
    lines = ["| case | before, ms | after, ms | times as fast |", "|---|--:|--:|--:|"]
    for row in rows:
        figures = (
            f"{row[name]:,.0f}" if row[name] >= 100 else f"{row[name]:.3g}" for name in ("before", "after")
        )
        lines.append(f"| {row['case']} | {' | '.join(figures)} | {row['times']:.1f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--edges", type=int, default=150_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if min(args.nodes, args.edges, args.rounds) < 1:
        parser.error("--nodes, --edges and --rounds have to be at least 1")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = [
        measure(title, code, args.nodes, args.edges, args.rounds)
        for title, code in SECTION.findall(PAGE.read_text())
    ]
    print(table(rows))
    if args.json:
        options = {name: getattr(args, name) for name in ("nodes", "edges", "rounds")}
        result = {"environment": environment(torch.device("cpu"), None), "options": options, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
