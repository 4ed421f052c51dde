"""Run training scripts under each implementation, with several seeds, and write a table and pictures.

    python examples/compare.py --out results examples/train_planetoid.py --dataset Cora --seeds 10
    python examples/compare.py --out results --plan benchmarks/training.json --processes 16
    python examples/compare.py --out results --report

Scores come from runs in parallel processes; time, memory and kernels from short runs afterwards, one at a
time, in one process. A plan is a JSON list of rows, each with "name", "script", "arguments", and as needed
"seeds", "per_process" (seeds of a process, default all), "variants" (arguments that are compared), "alone"
(arguments of the short runs; null: none), "alone_variants" (default: the same), "published" (a text). Ends
with results.json, table.md and pictures in --out.
"""

import gc
import itertools
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dfgnn.bench.palette import colour_of
from dfgnn.runtime.programs import (
    Parser,
    existing_file,
    folder_to_write,
    interruptible,
    listed,
    number,
    positive,
)

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = ["--impl dfgnn", "--impl pyg"]
OTHERS = "#8e6bb0", "#c9a227", "#5c6670", "#b5476d"  # colours of variants that have none in the palette


def label(variant: str) -> str:
    """ "--impl dfgnn --capture" -> "dfgnn capture"."""
    return variant.replace("--impl ", "").replace("--", "")


def file_of(out: Path, kind: str, row: dict, variant: str) -> Path:
    name = re.sub(r"[^\w.-]+", "_", f"{row['name']} {label(variant)}")
    return out / kind / f"{name}.jsonl"


def command(row: dict, variant: str, more: list[str]) -> list[str]:
    return [str(ROOT / row["script"]), *row.get("arguments", "").split(), *variant.split(), *more]


def score_runs(plan: list[dict], out: Path, common: list[str], processes: int, limit: float | None) -> None:
    """All seeds of all rows, in parallel processes."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    until = None if limit is None else time.monotonic() + limit

    def work(job):
        row, variant, first, count = job
        path = file_of(out, "scores", row, variant)
        seeds = ["--first-seed", str(first), "--seeds", str(count), "--json", str(path), "--quiet"]
        left = None if until is None else until - time.monotonic()
        if left is not None and left < 1:
            return f"{row['name']} {label(variant)} seed {first}: not begun, out of time"
        try:
            done = subprocess.run(
                [sys.executable, *command(row, variant, [*common, *seeds])],
                env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=left,
            )  # fmt: skip
        except subprocess.TimeoutExpired as stop:
            said = stop.output.decode() if isinstance(stop.output, bytes) else stop.output or ""
            return f"{row['name']} {label(variant)} seed {first}: stopped, out of time\n{said}"
        lines = done.stdout.strip().splitlines()
        shown = lines[-1:] if done.returncode == 0 else lines[-12:]
        return "\n".join([f"{row['name']} {label(variant)} seeds {first}..{first + count - 1}:", *shown])

    jobs = []
    for row in plan:
        seeds = row.get("seeds", 1)
        step = row.get("per_process", max(seeds, 1))
        for first in range(0, seeds, step):
            jobs += [(row, v, first, min(step, seeds - first)) for v in row.get("variants", VARIANTS)]
    with ThreadPoolExecutor(processes) as pool:
        for text in pool.map(work, jobs):
            print(text, flush=True)


def lone_runs(plan: list[dict], out: Path, common: list[str]) -> None:
    """The short runs, in this process, one after the other; a failed one is recorded with the reason."""
    import torch

    for row in plan:
        if row.get("alone", "") is None:
            continue
        for variant in row.get("alone_variants", row.get("variants", VARIANTS)):
            path = file_of(out, "alone", row, variant)
            more = [
                *common,
                *row.get("alone", "--epochs 30").split(),
                "--json",
                str(path),
                "--profile",
                "--quiet",
            ]
            sys.argv = command(row, variant, more)
            print(row["name"], label(variant), flush=True)
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except (Exception, SystemExit) as error:
                first = str(error).partition("\n")[0].partition(". GPU 0")[0]  # CUDA's errors are long
                reason = f"{type(error).__name__}: {first}"[:200]
                print(" ", reason, flush=True)
                with path.open("a") as file:
                    file.write(json.dumps({"failed": reason}) + "\n")
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def collect(plan: list[dict], out: Path) -> list[dict]:
    """The results of each row and variant."""
    rows = []
    for row in plan:
        variants = row.get("variants", VARIANTS)
        for variant in dict.fromkeys([*row.get("alone_variants", []), *variants]):
            runs = {run["seed"]: run for run in read(file_of(out, "scores", row, variant))}
            found = {"row": row["name"], "variant": label(variant), "published": row.get("published", "")}
            found["command"] = f"{row['script']} {row.get('arguments', '')} {variant}"
            tests = [100 * run["test"] for run in runs.values()]
            if tests:
                found |= {
                    "metric": next(iter(runs.values()))["metric"], "seeds": sorted(runs), "tests": tests,
                    "mean": statistics.mean(tests),
                    "deviation": statistics.stdev(tests) if tests[1:] else None,
                    "epochs": statistics.mean(run["epochs"] for run in runs.values()),
                    "curves": [[[*h[1:]] for h in thin(run["history"])] for run in runs.values()],
                }  # fmt: skip
            for run in read(file_of(out, "alone", row, variant)):
                keys = (
                    "seconds_per_epoch",
                    "steps",
                    "peak_memory",
                    "profile",
                    "stages",
                    "failed",
                    "versions",
                )
                found |= {key: run[key] for key in keys if key in run}
                if "seconds_per_epoch" in run:
                    found["seconds_per_step"] = run["seconds_per_epoch"] / run["steps"]
                if "kernels" in run.get("profile", {}):
                    found["kernels_per_step"] = round(run["profile"]["kernels"] / run["steps"])
                if "history" in run and len(run["history"]) > 8:
                    # Times include scores, but not the first epochs, which compile, plan and capture.
                    times = [h[0] for h in run["history"]]
                    found["seconds_with_scores"] = (times[-1] - times[7]) / (len(times) - 8)
            rows.append(found)
    return rows


def thin(history: list, most: int = 200) -> list:
    return history[:: max(1, -(-len(history) // most))]


def table(rows: list[dict]) -> str:
    """Markdown; ratios are those to torch_geometric's layers."""
    lines = [
        "| data, model | | test score | published | ms per step | with scores | MiB | kernels | GPU idle |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = {row["row"]: row for row in rows if row["variant"] == "pyg"}

    def ratio(row, key, spec, scale):
        if key not in row or row[key] is None:
            return ""
        text, pyg = format(row[key] * scale, spec), base.get(row["row"], {}).get(key)
        return text if not pyg or row["variant"] == "pyg" else f"{text} ({pyg / row[key]:.1f} ×)"

    for row in rows:
        score = ""
        if "mean" in row:
            spread = "" if row["deviation"] is None else f" ± {row['deviation']:.2f}"
            score = f"{row['mean']:.2f}{spread} ({len(row['seeds'])})"
        profile = row.get("profile", {})
        idle = f"{100 * profile['gpu_idle']:.0f} %" if "gpu_idle" in profile else ""
        cells = [
            row["row"], row["variant"], score, row["published"],
            "fails: " + row["failed"] if "failed" in row else ratio(row, "seconds_per_step", ",.2f", 1e3),
            ratio(row, "seconds_with_scores", ",.2f", 1e3), ratio(row, "peak_memory", ",.0f", 2**-20),
            str(row.get("kernels_per_step", "")), idle,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def colours(variants: list[str]) -> dict[str, tuple]:
    """Each library's colour, paler for each variant of it."""
    from matplotlib.colors import to_rgb

    found, seen = {}, {}
    for variant, other in zip(sorted(variants, key=len), itertools.cycle(OTHERS)):
        library = variant.split()[0]
        first, paler = seen.setdefault(library, (to_rgb(colour_of(library, other)), []))
        found[variant] = tuple(1 - (1 - part) * 0.55 ** len(paler) for part in first)
        paler.append(variant)
    return found


def pictures(rows: list[dict], out: Path) -> None:
    """scores.png: validation score over time; costs.png: time, memory and kernels in relation to PyG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(row["row"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    color = colours(variants)
    drawn = [n for n in names if any(r["row"] == n and "curves" in r for r in rows)]
    if drawn:
        columns = min(3, len(drawn))
        lines = -(-len(drawn) // columns)
        figure, axes = plt.subplots(lines, columns, figsize=(4 * columns, 2.8 * lines), squeeze=False)
        for axis, name in zip(axes.flat, drawn):
            for row in (r for r in rows if r["row"] == name and "curves" in r):
                unit = row.get("seconds_with_scores") or row.get("seconds_per_epoch") or 1.0
                shortest = min(map(len, row["curves"]))
                score = [statistics.mean(100 * c[k][1] for c in row["curves"]) for k in range(shortest)]
                step = row["epochs"] / max(1, statistics.mean(map(len, row["curves"])))
                times = [unit * step * k for k in range(shortest)]
                axis.plot(times, score, color=color[row["variant"]], label=row["variant"], linewidth=1.2)
            axis.set_title(name, fontsize=9)
            axis.set_xlabel("seconds", fontsize=8)
            axis.tick_params(labelsize=7)
        axes.flat[0].set_ylabel("validation score", fontsize=8)
        axes.flat[0].legend(fontsize=7)
        for axis in list(axes.flat)[len(drawn) :]:
            axis.remove()
        figure.tight_layout()
        figure.savefig(out / "scores.png", dpi=120)
        plt.close(figure)
    kinds = {
        "ms per step": lambda r: 1e3 * r["seconds_per_step"] if r.get("seconds_per_step") else None,
        "peak memory, MiB": lambda r: r["peak_memory"] / 2**20 if r.get("peak_memory") else None,
        "kernels per step": lambda r: r.get("kernels_per_step"),
    }
    measured = {row["row"] for row in rows if any(value(row) for value in kinds.values())}
    names = [name for name in names if name in measured]
    figure, axes = plt.subplots(1, 3, figsize=(11, 0.5 + 0.17 * len(names) * len(variants)), sharey=True)
    for axis, (title, value) in zip(axes, kinds.items()):
        for k, variant in enumerate(variants):
            found = {r["row"]: value(r) for r in rows if r["variant"] == variant and value(r)}
            places = [names.index(n) + k * 0.8 / len(variants) for n in found]
            axis.barh(places, list(found.values()), 0.8 / len(variants), color=color[variant], label=variant)
        axis.set_xscale("log")
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
    axes[0].set_yticks([k + 0.4 - 0.4 / len(variants) for k in range(len(names))], names, fontsize=7)
    axes[0].set_ylim(len(names) - 0.1, -0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower left", fontsize=7)
    figure.tight_layout()
    figure.savefig(out / "costs.png", dpi=120)
    plt.close(figure)


def main():
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--out", type=folder_to_write, required=True, metavar="DIR", help="for everything that is written"
    )
    parser.add_argument("--plan", type=existing_file, metavar="FILE", help="a plan; instead of a script")
    parser.add_argument("--only", type=listed(), metavar="NAMES", help="these rows of the plan")
    parser.add_argument("--processes", type=positive, default=1, metavar="N", help="runs at the same time")
    parser.add_argument(
        "--variants", type=listed(), help='arguments to compare: "--impl dfgnn --capture,--impl pyg"'
    )
    parser.add_argument(
        "--limit", type=number(above=0), metavar="SECONDS", help="for the runs in parallel processes"
    )
    parser.add_argument("--common", default="", metavar="TEXT", help="arguments of all runs: '--root data'")
    parser.add_argument("--no-scores", action="store_true", help="only the short runs")
    parser.add_argument("--no-alone", action="store_true", help="without the short runs")
    parser.add_argument(
        "--report", action="store_true", help="run nothing: table and pictures of what is there"
    )
    args, script = parser.parse_known_args()
    if script:
        if not Path(script[0]).is_file():
            parser.error(f"there is no script {script[0]}")
        found = Parser(add_help=False)
        found.add_argument("--seeds", type=positive, default=1)
        seeds, rest = found.parse_known_args(script[1:])
        path = Path(script[0]).resolve()
        plan = [{"name": path.stem, "script": str(path), "arguments": " ".join(rest), "seeds": seeds.seeds}]
    else:
        path = args.plan if args.plan is not None else args.out / "plan.json"
        if not path.is_file():
            parser.error(f"expected a script, --plan FILE, or {path} of an earlier run")
        try:
            plan = json.loads(path.read_text())
            names = [row["name"] for row in plan if row["script"]]
        except (ValueError, TypeError, KeyError) as error:
            parser.error(f"{path} is no plan: {type(error).__name__}: {error}")
        unknown = sorted({*(args.only or ())} - {*names})
        if unknown:
            parser.error(f"--only: {path} has no {', '.join(unknown)}; it has {', '.join(names)}")
    if args.variants is not None:
        plan = [
            {**row, "variants": list(args.variants), "alone_variants": list(args.variants)} for row in plan
        ]
    if args.only is not None:
        plan = [row for row in plan if row["name"] in args.only]
    for kind in ("scores", "alone"):
        (args.out / kind).mkdir(parents=True, exist_ok=True)
    if not args.report:
        (args.out / "plan.json").write_text(json.dumps(plan, indent=1) + "\n")
        if not args.no_scores:
            score_runs(plan, args.out, args.common.split(), args.processes, args.limit)
        if not args.no_alone:
            lone_runs(plan, args.out, args.common.split())
    rows = collect(plan, args.out)
    (args.out / "results.json").write_text(json.dumps(rows) + "\n")
    (args.out / "table.md").write_text(table(rows))
    print((args.out / "table.md").read_text())
    pictures(rows, args.out)


if __name__ == "__main__":
    with interruptible("runs that have ended stay in --out, and --report makes a table of them"):
        main()
