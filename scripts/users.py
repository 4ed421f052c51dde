"""Public repositories trained as they are, with the libraries they were written for and with dfgnn:

    python scripts/users.py FOLDER [--only CASE ...] [--json FILE] [--table]
    python scripts/users.py FOLDER --device cuda ...  # on a GPU: see scripts/users_gpu.py

FOLDER holds checkouts, each under its repository's name (``git clone https://github.com/IBM/Multi-GNN``);
those that are missing are left out. scripts/repositories says which module is trained, and on what. None of
their code is part of this project, and nothing is written into a checkout.

Each case runs in two processes: ``python users.py`` with the libraries alone, and ``python -m dfgnn.run
users.py``, where at most three lines of a temporary copy are changed. Both make the same model and inputs,
and take training steps (forward, backward, Adam; or those of the repository's own training script) in turns,
one process at a time. Printed are the largest
relative difference of the first losses; the least CPU seconds of a step, on one thread; how far the memory
rose above what was resident before the first step; and what `dfgnn.run` reported.

With ``--dgl-python`` an interpreter can be named that has a DGL with ``dgl.sparse``, for cases whose
upstream's side needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import repositories

ROOT = Path(__file__).resolve().parents[1]


# ---- a side: one process that trains -----------------------------------------------------------------------


def _memory(name: str) -> int:
    """VmRSS or VmHWM in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    return 0


class Steps:
    """A step for each line of standard input; its loss and times on standard output."""

    def __init__(self):
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # stdout now goes to stderr, so that what repositories print does not mix with answers
        self.step, self.before, self.start = 0, 0, 0.0

    def _answer(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self.answers, flush=True)

    def ready(self) -> None:
        versions = {"torch": torch.__version__}
        for name in ("torch_geometric", "torch_scatter", "dgl"):
            if name in sys.modules:
                versions[name] = getattr(sys.modules[name], "__version__", "?")
        self._answer({"versions": versions})
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak, to the present size
        self.before = _memory("VmRSS")

    def begin(self) -> bool:
        if not sys.stdin.readline():
            return False
        torch.manual_seed(self.step)
        self.step += 1
        self.start = time.process_time()
        return True

    def end(self, loss: torch.Tensor) -> None:
        seconds = time.process_time() - self.start
        self._answer({"loss": loss.item(), "seconds": seconds, "memory": _memory("VmHWM") - self.before})


def train(case: str, folder: Path) -> None:
    """The main function of a side's process: builds the case and takes steps as they are asked for."""
    steps = Steps()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = repositories.all_repositories()[case].build(folder, 1)
    if callable(made):
        made(steps)
        return
    model, loss_of = made
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    steps.ready()
    while steps.begin():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        steps.end(loss)


class Side:
    """The process of one side of a case."""

    def __init__(self, command: list[str], log: Path):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DGLBACKEND": "pytorch"}
        if command[0] != sys.executable:
            environment.pop("PYTHONPATH", None)
        self.log = log
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
            env=environment, cwd=log.parent,  # some repositories write logs to the working directory
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            self.process.wait()
            raise RuntimeError(self.log.read_text().strip()[-3000:])
        return json.loads(line)

    def step(self) -> dict[str, Any]:
        self.process.stdin.write("\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return self.answer()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()


# ---- a case ------------------------------------------------------------------------------------------------


def changed_copy(checkout: Path, changes: tuple[repositories.Change, ...], into: Path) -> Path:
    """The checkout itself without changes, else a copy with them."""
    if not changes:
        return checkout
    copy = into / checkout.name
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "*.gif", "*.png", "*.pdf"))
    for change in changes:
        path = copy / change.file
        text = path.read_text()
        if change.old not in text:
            raise RuntimeError(f"{change.file}: expected the text {change.old!r} to change")
        path.write_text(text.replace(change.old, change.new))
    return copy


def turns(sides: dict[str, Side], epoch: int, args: argparse.Namespace) -> dict[str, list[dict]]:
    """Steps of all sides in turns: first those whose losses are compared, then timed ones. With epochs, the
    same steps serve both."""
    steps: dict[str, list[dict]] = {name: [] for name in sides}
    untimed, least = (0, epoch) if epoch else (args.steps, args.steps + 3)
    for k in range(1, 1 + untimed + args.rounds * (epoch or 1)):
        for name, side in sides.items():
            steps[name].append(side.step())
        timed = sum(step["seconds"] for rows in steps.values() for step in rows[untimed:])
        if timed > args.seconds and k >= least and k % (epoch or 1) == 0:
            break
    return steps


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, or the one that the file .commit names where there is no history."""
    named = checkout / ".commit"
    if named.exists():
        return named.read_text().strip()
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def measure(case: repositories.Repository, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    checkout = folder / case.folder
    with tempfile.TemporaryDirectory() as temporary:
        into = Path(temporary)
        theirs, ours = into / "theirs", into / "ours"
        report = into / "report.json"
        here = [str(Path(__file__).resolve()), "--worker", case.case]
        python = str(args.dgl_python.absolute()) if case.dgl_sparse else sys.executable
        root = changed_copy(checkout, case.to_run_here + case.lines, ours)
        commands = {
            "without": [python, *here, str(changed_copy(checkout, case.to_run_here, theirs))],
            "with": [sys.executable, "-m", "dfgnn.run", *case.options, "--json", str(report)]
            + [*here, str(root)],
        }
        sides = {name: Side(command, into / f"{name}.log") for name, command in commands.items()}
        try:
            versions = {name: side.answer()["versions"] for name, side in sides.items()}
            steps = turns(sides, case.epoch, args)
        finally:
            for side in sides.values():
                side.end()
        # File names in the report are made relative to the repository's root: the rest is this machine's.
        told = json.loads(report.read_text().replace(f"{root.absolute()}{os.sep}", ""))
        return {
            "case": case.case,
            "repository": case.source,
            "commit": commit_of(checkout),
            "what": case.what,
            "options": list(case.options),
            "lines": sum(len(change.new.splitlines()) or 1 for change in case.lines),
            "versions": versions,
            "losses": {
                name: [float(f"{step['loss']:.9g}") for step in rows[: case.epoch or args.steps]]
                for name, rows in steps.items()
            },
            "seconds": {
                name: [round(step["seconds"], 5) for step in rows[0 if case.epoch else args.steps :]]
                for name, rows in steps.items()
            },
            "memory": {name: rows[-1]["memory"] for name, rows in steps.items()},
            "tolerance": case.tolerance,
            "epoch": case.epoch,
            "report": short(told),
        }


def short(report: dict[str, Any]) -> dict[str, Any]:
    """What the table says of a report of `dfgnn.run`."""
    traced = ("class", "modules", "traced", "reason", "milliseconds")
    return {
        **{key: report[key] for key in ("layers", "served")},
        "own_attention": [{"function": use["function"]} for use in report["own_attention"]],
        "traced": [{key: x[key] for key in traced} for x in report.get("traced", [])],
    }


# ---- the table ---------------------------------------------------------------------------------------------


def difference(row: dict[str, Any]) -> float:
    """The largest relative difference of the first losses."""
    pairs = zip(row["losses"]["without"], row["losses"]["with"], strict=True)
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)


def least(row: dict[str, Any], name: str) -> float:
    """The least seconds of a step; with epochs the mean over an epoch's steps of each one's least."""
    seconds, epoch = row["seconds"][name], row.get("epoch", 0) or 1
    return sum(min(seconds[k::epoch]) for k in range(epoch)) / epoch


def times(row: dict[str, Any]) -> float:
    return least(row, "without") / least(row, "with")


def reported(row: dict[str, Any]) -> str:
    """What `dfgnn.run` said, in a line."""
    report, parts = row["report"], []
    traced = {x["class"].rpartition(".")[2]: x["modules"] for x in report.get("traced", []) if x["traced"]}
    for layer in report["layers"]:
        kind = "fused" if layer["fused"] and not layer["fell_back"] else "not replaced"
        name = layer["layer"].rpartition(".")[2]
        parts += [f"{layer['constructed']} {name} {kind}"] * (name not in traced)
    parts += [f"{count} {name} traced" for name, count in traced.items()]
    served = ", ".join(name.rpartition(".")[2] for name in report["served"])
    parts += [f"{served} on dfgnn's kernels"] * bool(served)
    uses = sorted({use["function"].rpartition(".")[2] for use in report["own_attention"]})
    parts += [f"attention of its own by {', '.join(uses)}"] * bool(uses)
    if "--as-dgl" in row["options"]:
        parts.append("dgl is dfgnn.compat")
    return "; ".join(parts) or "nothing"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| repository | what is trained | losses differ by | s/step without | with | times as fast "
        "| MiB without | with | lines | `dfgnn.run` reported |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        seconds = [f"{least(row, name):.3g}" for name in ("without", "with")]
        memory = [f"{row['memory'][name] / 2**20:,.0f}" for name in ("without", "with")]
        name = f"[{row['case']}](https://github.com/{row['repository']}/tree/{row['commit'][:12]})"
        cells = [
            name, row["what"], f"{difference(row):.0e}", *seconds, f"{times(row):.2f}", *memory,
            str(row["lines"]), reported(row),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def wrong(row: dict[str, Any]) -> str | None:
    """Why a row is not as it should be."""
    if difference(row) > row["tolerance"]:
        return f"losses differ by {difference(row):.1e}"
    if times(row) < 0.97:
        return f"{times(row):.2f} times as fast"
    return None


def environment(device: str = "cpu") -> dict[str, Any]:
    from dfgnn.bench.report import environment as of_device

    return of_device(torch.device(device), None)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """These rows, and those of other cases that the file has."""
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    by_case = {row["case"]: row for row in [*before, *rows]}
    lines = [
        json.dumps(by_case[name], separators=(",", ":"))
        for name in repositories.all_repositories()
        if name in by_case
    ]
    head = f'{{"environment": {json.dumps(environment())},\n"rows": [\n'
    text = head + ",\n".join(lines) + "\n]}\n"  # a row per line
    path.write_text(text.replace(f"{ROOT}/", ""))  # files of modules that scripts/repositories holds


def run(args: argparse.Namespace) -> int:
    cases, rows, failed = repositories.all_repositories(), [], []
    unknown = set(args.only or ()) - cases.keys()
    if unknown:
        args.parser.error(f"--only: expected names of {', '.join(cases)}, got {', '.join(unknown)}")
    if args.table:
        text = table(json.loads(args.json.read_text())["rows"])
        print(text)
        if args.page:
            before, _, rest = args.page.read_text().partition("<!-- users -->\n")
            after = rest.partition("<!-- /users -->")[2]
            args.page.write_text(f"{before}<!-- users -->\n{text}\n<!-- /users -->{after}")
        return 0
    for name in args.only or cases:
        case = cases[name]
        if not (args.folder / case.folder).is_dir():
            print(f"{name}: no checkout of {case.source} in {args.folder}", file=sys.stderr)
            continue
        if case.dgl_sparse and args.dgl_python is None:
            print(f"{name}: needs --dgl-python", file=sys.stderr)
            continue
        try:
            rows.append(measure(case, args.folder.resolve(), args))
        except RuntimeError as error:
            failed.append(name)
            print(f"{name}: failed\n{error}", file=sys.stderr, flush=True)
            continue
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        if args.json:
            write(args.json, rows)
    for row in rows:
        reason = wrong(row)
        if reason:
            failed.append(row["case"])
            print(f"{row['case']}: {reason}")
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    if any(argument.partition("=")[0] == "--device" for argument in argv or sys.argv):
        import users_gpu

        return users_gpu.main(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of checkouts")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases")
    parser.add_argument("--steps", type=int, default=5, help="whose losses are compared")
    parser.add_argument("--rounds", type=int, default=10, help="steps that are timed, in turns")
    parser.add_argument("--seconds", type=float, default=60, help="after which timing ends early")
    parser.add_argument("--dgl-python", type=Path, metavar="FILE", help="an interpreter with dgl.sparse")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where rows are written, or replaced")
    parser.add_argument("--table", action="store_true", help="of the rows in --json, without measuring")
    parser.add_argument("--page", type=Path, metavar="FILE", help="with --table: where it is written, too")
    parser.add_argument("--worker", metavar="CASE", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.parser = parser
    if args.worker:
        train(args.worker, args.folder)
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
