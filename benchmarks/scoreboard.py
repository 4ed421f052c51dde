"""Everything that README.md and docs/performance.md show, by one command into one file.

    python benchmarks/scoreboard.py --device cuda --minutes 25
    python benchmarks/scoreboard.py --device cpu --threads 2
    python benchmarks/scoreboard.py --device cpu --quick --json /tmp/quick.json   # does it work?
    python benchmarks/scoreboard.py --pages                                       # no measuring

Cases are measured in the order of their importance until the time is up; the same command goes on with what
is left (--fresh: starts anew). The file, benchmarks/results/cuda.json or cpu.json unless --json is given, is
written after every case: one schema, of ``benchmarks/score/records.py``. In a case the contestants take turns
in one process, at least five samples each; one that fails is named with the reason. The first case is
measured three times: for nothing, because the first calls of a process are slow; for the file; and once more
at the end, where a contestant's median that differs by more than 5 % takes the case out of the file again.

Then the tables between the markers ``<!-- scoreboard:NAME -->`` and ``<!-- /scoreboard -->`` of README.md and
of the pages in docs are filled and the pictures drawn, from the files in benchmarks/results alone.
Needs torch_geometric beside torch and NumPy; DGL, turbo-gnn and dgNN are measured where they are installed,
and pictures need matplotlib. Real graphs are those of DFGNN_DATA; for others random ones of the same size are
taken, named with a ~.
"""

import argparse
import gc
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--device", choices=("cuda", "cpu"), help="cuda if there is one, else cpu")
    add("--minutes", type=float, default=25.0, help="no case begins after this time (%(default)s)")
    add("--seconds", type=float, help="per case, at least five turns (1; with --quick 0.05)")
    add("--parts", nargs="+", metavar="PART", help="only these parts (--list names them)")
    add("--graphs", nargs="+", metavar="GRAPH", help="only these graphs")
    add("--quick", action="store_true", help="every part on graphs of a few nodes")
    add("--no-compile", dest="compiles", action="store_false", help="leave torch.compile out")
    add("--threads", type=int, help="of the CPU; results of several numbers stand side by side in one file")
    add("--json", type=Path, help="the file of results")
    add("--fresh", action="store_true", help="forget what the file holds")
    add("--list", action="store_true", help="print the cases in their order, measure nothing")
    add("--pages", action="store_true", help="fill the tables and draw the pictures, measure nothing")
    add("--no-pages", action="store_true", help="measure only: for a machine that is not the author's")
    add("--commit", help="name of the code in the results (default: git rev-parse HEAD)")
    return result


def measure(args: argparse.Namespace) -> int:
    """The number of cases that could not be measured."""
    import torch
    from score import attention, cases, records, turns

    from dfgnn.bench import measure as times
    from dfgnn.bench import report

    device = torch.device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    listed, notes = cases.cases(args.device, args.quick, args.compiles)
    if args.device == "cpu":
        listed = [{**case, "threads": torch.get_num_threads()} for case in listed]
    listed = [case for case in listed if not args.graphs or case["graph"] in args.graphs]
    listed = [case for case in listed if not args.parts or case["part"] in args.parts]
    if args.list:
        for case in listed:
            print(name_of(case))
        return 0
    print("\n".join(notes), flush=True)
    path = args.json or RESULTS / f"{args.device}.json"
    if args.fresh:
        path.unlink(missing_ok=True)
    environment = report.environment(device, args.commit) | versions()
    found = records.Records(path, environment)
    print(report.environment_line(environment))
    bench = attention.Bench(device, args.seconds or (0.05 if args.quick else 1.0))
    gc.freeze()  # garbage collections during measurements need not visit imported modules
    end, wrong = time.monotonic() + 60 * args.minutes, 0

    def contestants_of(case: dict) -> dict:
        try:
            return cases.MEASURES[case["part"]](case, bench)
        except turns.LostDevice:
            raise
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            return {"unavailable": times.reason(error)}

    first = next((case for case in listed if not found.has(case)), None)
    if first is not None and not args.quick:
        contestants_of(first)
    for number, case in enumerate(listed):
        if found.has(case):
            continue
        if time.monotonic() > end:
            left = sum(not found.has(other) for other in listed[number:])
            print(f"time is up: {left} of {len(listed)} cases are left for the same command")
            break
        began = time.monotonic()
        result = contestants_of(case)
        failed = "unavailable" in result or not any(
            "ms" in c for c in result["contestants"] if c["library"] == "dfgnn"
        )
        wrong += failed
        found.add(case, result)
        print(f"{time.monotonic() - began:6.1f} s  {line(case, result)}", flush=True)
    if first is not None and not args.quick and found.has(first):
        differ = records.differences(found.of(first), contestants_of(first))
        if differ:
            found.remove(first)
            wrong += 1
            print(f"{name_of(first)}: not kept, because the same at the end gave {'; '.join(differ)}")
    print(f"{path}: {sum('contestants' in c for c in found.results['cases'])} cases")
    return wrong


def versions() -> dict[str, str | None]:
    """The versions of the libraries beside dfgnn; None if not installed."""
    import importlib.metadata

    found: dict[str, str | None] = {}
    for name in ("torch_geometric", "dgl", "turbo_gnn", "pyg_lib"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def name_of(case: dict) -> str:
    shape = f"{case['heads']}x{case['head_dim']}"
    more = [case.get("library", ""), f"x {case['layers']}" if "layers" in case else "", shape]
    more += ["+".join(case.get("ways", case.get("dtypes", [])))]
    return " ".join(filter(None, [case["part"], case["graph"], case["layer"], *more]))


def line(case: dict, result: dict) -> str:
    from score import records

    if "unavailable" in result:
        return f"{name_of(case)}: not measured: {result['unavailable']}"
    times = []
    for c in result["contestants"]:
        ms = records.median(c)
        who = f"{c['library']} {c['way']} {c['dtype']}"
        times.append(f"{who} {ms:.4g}" if ms is not None else f"{who} failed ({c['failed'][:60]})")
    return f"{name_of(case)}: {'; '.join(times)}"


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.threads:  # DGL takes it from the environment, when it is imported
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    wrong = 0
    if not args.pages:
        wrong = measure(args)
    if args.pages or not (args.no_pages or args.quick or args.list):
        from score import charts, pages

        for path in [*pages.fill(ROOT, RESULTS), *charts.draw(RESULTS, ROOT / "docs" / "pictures")]:
            print(path)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
