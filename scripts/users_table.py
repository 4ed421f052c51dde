"""The table of public code on a GPU, and what is kept of a run:

python scripts/users_table.py RUN.json ... [--keep FILE] [--page docs/users.md]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

UPSTREAM = ("eager", "inductor", "reduce-overhead")
ONE_LINE = (
    "run",
    "run --capture",
    "line",
    "capture",
    "compile",
    "compile, reduce-overhead",
    "compile, capture",
)
#: How far from the least time of a way that of a second turn may be.
AGREE = 0.05
_MEANS = ("run", "flag", "line", "strongest", "memory")
_KEPT = ("gpu_ms", "dfgnn_ms", "product_ms", "kernels", "memory")


def kept(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the median and the least of its times, how many times as fast as the unchanged way each is,
    and how far losses differ from its."""
    made = {key: value for key, value in row.items() if key not in ("configurations", "reports")}
    made["configurations"] = {}
    for name, measured in row["configurations"].items():
        eager, found = measured["ways"].get("eager", {}), {}
        if not eager.get("ms"):
            continue
        if "least_ms" in eager:  # shortened before
            made["configurations"][name] = measured
            continue
        for way, got in measured["ways"].items():
            if got.get("failed") or not got.get("ms"):
                found[way] = {"failed": got.get("failed", "").partition("\n")[0][:80]}
                continue
            least = min(got["ms"])
            found[way] = {"ms": round(statistics.median(got["ms"]), 3), "least_ms": round(least, 3)}
            found[way] |= {key: got[key] for key in _KEPT if key in got}
            pairs = zip(eager["losses"], got["losses"], strict=True)
            most = max(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)
            found[way] |= {"times": round(min(eager["ms"]) / least, 4), "losses_differ": float(f"{most:.1e}")}
        turns = [
            got["turns"] for got in measured["ways"].values() if "turns" in got and not got.get("failed")
        ]
        apart = round(disagreement(turns), 4) if turns else measured["disagreement"]
        made["configurations"][name] = {"ways": found, "disagreement": apart}
    return made


def disagreement(turns: list[list[float]]) -> float:
    """How far apart, relatively, the two least times of a way are at most. turns: of each way, its least time
    in each turn. The host is slow for seconds; the least time is the machine's own where it comes twice."""
    pairs = [sorted(times)[:2] for times in turns]
    return max((pair[1] / pair[0] - 1 if len(pair) > 1 else 1.0) for pair in pairs)


def joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """All rows. Where a case was measured in several runs, the last one counts, and of the others those ways
    that it lacks; measurements that disagree count where there are no others."""
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for run in runs for row in run["rows"]):
        before = rows.setdefault(row["case"], row)["configurations"]
        for name, now in row["configurations"].items() if before is not row["configurations"] else ():
            old = before.get(name, now)
            worse, better = sorted((old, now), key=lambda x: x["disagreement"] <= AGREE)
            if better["disagreement"] <= AGREE < worse["disagreement"]:
                before[name] = better
            else:
                ways = {way: got for way, got in now["ways"].items() if "ms" in got or way not in old["ways"]}
                before[name] = {**now, "ways": {**old["ways"], **ways}}
    return {"environment": runs[-1]["environment"], "rows": list(rows.values())}


def write(path: Path, run: dict[str, Any]) -> None:
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in run["rows"])
    path.write_text(f'{{"environment": {json.dumps(run["environment"])},\n"rows": [\n{lines}\n]}}\n')


def _fastest(ways: dict[str, dict], names: tuple[str, ...]) -> tuple[str, dict[str, Any]] | None:
    """The way that takes least time, and its figures."""
    measured = [(ways[name]["times"], name) for name in names if "ms" in ways.get(name, {})]
    return (name := max(measured)[1], ways[name]) if measured else None


def compared(run: dict[str, Any]) -> list[dict[str, Any]]:
    """What the table shows of each case and size that has both sides, worst first."""
    found = []
    for row in run["rows"]:
        for configuration, measured in row["configurations"].items():
            most = 10 * row["tolerance"] * (1 if configuration.endswith("float32") else 20)
            ways = right_ways(measured["ways"], most)
            ours = _fastest(ways, ONE_LINE)
            if ours is None or "ms" not in ways.get("eager", {}):
                continue
            compiled = _fastest(ways, UPSTREAM[1:])
            strongest = max(1.0, compiled[1]["times"] if compiled else 1.0)
            memory = ours[1]["memory"] / max(ways["eager"]["memory"], 1)
            found.append({
                "row": row, "configuration": configuration, "eager": ways["eager"], "compiled": compiled,
                "refused": measured["disagreement"] > AGREE, "ours": ours,
                "run": ways.get("run", {}).get("times"), "line": ours[1]["times"],
                "flag": ways.get("run --capture", {}).get("times"),
                "strongest": ours[1]["times"] / strongest if compiled else None,
                # What lies in the memory pool of CUDA graphs, which dfgnn.run also makes, is not counted.
                "memory": memory if ours[0] == "compile" else None,
            })  # fmt: skip
    return sorted(found, key=lambda x: (x["refused"], x["line"]))


def right_ways(ways: dict[str, dict], most: float) -> dict[str, dict]:
    """Those whose losses differ from the unchanged way's by no more than this."""
    return {way: got for way, got in ways.items() if got.get("losses_differ", 0) <= most}


def mean(numbers: list[float]) -> float:
    return math.exp(sum(map(math.log, numbers)) / len(numbers)) if numbers else math.nan


def _size(row: dict[str, Any], configuration: str) -> str:
    size, _, dtype = configuration.partition(", ")
    return ("as given" if size == "base" else f"× {row['scale']}") + (", bf16" if dtype == "bfloat16" else "")


def _share(got: dict[str, Any]) -> str:
    return f"{min(100 * got['gpu_ms'] / got['least_ms'], 100):.0f} %"


def table(run: dict[str, Any]) -> str:
    lines = [
        "| repository | size | unchanged, ms | GPU busy | compiled | `dfgnn.run` | `--capture` | one line "
        "| which | than the strongest without | memory | GPU busy |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|",
    ]
    for x in compared(run):
        row, (way, ours) = x["row"], x["ours"]
        name = f"[{row['case']}](https://github.com/{row['repository']}/tree/{row['commit'][:12]})"
        cells = [
            name, _size(row, x["configuration"]), f"{x['eager']['least_ms']:.1f}", _share(x["eager"]),
            "–" if x["compiled"] is None else f"{x['compiled'][1]['times']:.2f}",
            *["–" if x[key] is None else f"{x[key]:.2f}" for key in ("run", "flag", "line")],
            f"{way} (refused)" if x["refused"] else way,
            "–" if x["strongest"] is None else f"{x['strongest']:.2f}",
            "–" if x["memory"] is None else f"{x['memory']:.2f}", _share(ours),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    sizes = {"base, float32": "as given", "large, float32": "larger", "large, bfloat16": "larger, bf16"}
    for size, name in sizes.items():
        rows = [x for x in compared(run) if x["configuration"] == size and not x["refused"]]
        means = [mean([x[key] for x in rows if x[key]]) for key in _MEANS]
        shown = ["–" if math.isnan(x) else f"{x:.2f}" for x in means]
        cells = [f"geometric mean of {len(rows)}", name, "", "", "", *shown[:3], "", *shown[3:], ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="what users.py --device cuda --json has written")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where a shorter record is written")
    parser.add_argument("--page", type=Path, metavar="FILE", help="where the table is written, too")
    args = parser.parse_args()
    runs = [json.loads(file.read_text()) for file in args.runs]
    for run in runs:
        run["rows"] = [row for row in map(kept, run["rows"]) if row["configurations"]]
    run = joined(runs)
    if args.keep:
        write(args.keep, run)
    text = table(run)
    print(text)
    if args.page:
        before, _, rest = args.page.read_text().partition("<!-- users on a GPU -->\n")
        after = rest.partition("<!-- /users on a GPU -->")[2]
        args.page.write_text(f"{before}<!-- users on a GPU -->\n{text}\n<!-- /users on a GPU -->{after}")


if __name__ == "__main__":
    main()
