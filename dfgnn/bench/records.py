"""The one file of results: what was measured of which commit on which machine, in samples.

    {"schema": 1,
     "runs": [{"commit", "date", "device", "gpu" or "cpu", "threads", "torch", ...}, ...],
     "cases": [{"part", "graph", ..., "run": index of runs,
                "contestants": [{"library", "way", "dtype", "ms": [samples], "extra_mb", "error"}]}, ...]}

A contestant that could not be measured has ``failed``, the reason, in the place of ``ms``; a case whose graph
could not be had has ``unavailable``.
"""

import json
import os
import statistics
from pathlib import Path
from typing import Any

SCHEMA = 1
# The keys that identify a case; all other keys are results.
KEYS = (
    "part", "graph", "layer", "library", "layers", "heads", "head_dim", "in", "mode", "dropout", "fresh",
    "compiled", "batch", "dtypes", "ways", "peers", "refinement", "grid", "threads", "schedules", "oracle",
)  # fmt: skip


class Records:
    """The file at ``path``, read if it is there; each addition writes it anew. Without a path nothing is
    written.

    environment: of this run. Raises ValueError where the file holds results of another commit or machine.
    """

    def __init__(self, path: Path | None, environment: dict[str, Any]) -> None:
        self.path = path
        self.results: dict[str, Any] = {"schema": SCHEMA, "runs": [], "cases": []}
        if path is not None and path.is_file():
            self.results = read(path)
            for run in self.results["runs"]:
                for name in ("commit", "gpu", "cpu"):
                    if run.get(name) != environment.get(name):
                        raise ValueError(
                            f"{path}: expected results of {name} {environment.get(name)}, found "
                            f"{run.get(name)}: give --json another path, or --fresh to start anew"
                        )
        self.results["runs"].append(environment)

    def has(self, case: dict[str, Any]) -> bool:
        """Whether the case was measured, in this run or before."""
        return any(key(found) == key(case) and "contestants" in found for found in self.results["cases"])

    def add(self, case: dict[str, Any], found: dict[str, Any]) -> None:
        others = [other for other in self.results["cases"] if key(other) != key(case)]
        record = {**case, "run": len(self.results["runs"]) - 1, **found}
        self.results["cases"] = [*others, record]
        self.write()

    def of(self, case: dict[str, Any]) -> dict[str, Any]:
        """What was measured of the case."""
        return next(found for found in self.results["cases"] if key(found) == key(case))

    def remove(self, case: dict[str, Any]) -> None:
        self.results["cases"] = [found for found in self.results["cases"] if key(found) != key(case)]
        self.write()

    def write(self) -> None:
        """Whole or not at all: a run that is stopped leaves the file of the case before."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(text(self.results))
        os.replace(part, self.path)


def key(case: dict[str, Any]) -> str:
    return json.dumps({name: case[name] for name in KEYS if name in case}, sort_keys=True)


def text(results: dict[str, Any]) -> str:
    """A line per run and case."""

    def lines(records: list[dict]) -> str:
        return ",\n".join(json.dumps(record, allow_nan=False) for record in records)

    runs, cases = lines(results["runs"]), lines(results["cases"])
    return f'{{"schema": {results["schema"]},\n"runs": [\n{runs}\n],\n"cases": [\n{cases}\n]}}\n'


def read(path: Path) -> dict[str, Any]:
    """Raises ValueError for a file of another shape."""
    results = json.loads(path.read_text())
    if not isinstance(results, dict) or results.get("schema") != SCHEMA:
        raise ValueError(f"{path}: expected results of python -m dfgnn.bench, schema {SCHEMA}")
    return results


def differences(before: dict[str, Any], after: dict[str, Any], tolerance: float = 0.05) -> list[str]:
    """The contestants of a case whose medians differ between two measurements by more than this share of the
    smaller one, in words; and those that one of them lacks."""
    second = {(c["library"], c["way"], c["dtype"]): median(c) for c in after.get("contestants", [])}
    found = []
    for contestant in before["contestants"]:
        name = contestant["library"], contestant["way"], contestant["dtype"]
        a, b = median(contestant), second.get(name)
        if a is None and b is None:
            continue
        if a is None or b is None or abs(a - b) > tolerance * min(a, b):
            found.append(f"{' '.join(name)}: {a} ms, then {b} ms")
    return found


def median(contestant: dict[str, Any]) -> float | None:
    return statistics.median(contestant["ms"]) if contestant.get("ms") else None
