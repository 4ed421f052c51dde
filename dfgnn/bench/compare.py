"""Finds regressions between two result files, by each row's ratio to the baseline of the same run."""

from pathlib import Path

from ..runtime.programs import Parser, existing_file, number
from .report import geometric_mean, ratio, read_json

_KEY = ("graph", "layer", "heads", "head_dim", "dtype", "mode", "schedule")


def parser() -> Parser:
    result = Parser(
        prog="dfgnn.bench compare",
        description="List what became slower or faster from BEFORE to AFTER, as times of passes x floor. "
        "Exit status 1 if anything became slower by more than the threshold or cannot be measured any more, "
        "2 if the files share no row.",
    )
    for name in ("before", "after"):
        result.add_argument(name, type=existing_file, metavar=f"{name.upper()}.json", help="of --json")
    result.add_argument(
        "--threshold", type=number(least=0), metavar="SHARE", default=0.05, help="relative change that counts"
    )
    return result


def main(argv: list[str]) -> int:
    commands = parser()
    args = commands.parse_args(argv)
    try:
        before, after = _rows(args.before), _rows(args.after)
    except (OSError, ValueError) as error:
        commands.error(str(error))
    shared = [key for key in before if key in after]
    if not shared:
        print("the files share no row")
        return 2
    changes, lost, without = [], [], 0
    for key in shared:
        old, new = _ratios(before[key], after[key])
        if old is None:
            without += 1
        elif new is None:
            lost.append(key)
        else:
            changes.append((new / old - 1, old, new, key))
    slower = sorted((c for c in changes if c[0] > args.threshold), reverse=True)
    faster = sorted(c for c in changes if c[0] < -args.threshold)
    for title, group in (("slower", slower), ("faster", faster)):
        for change, old, new, key in group:
            print(f"{title}: {_name(key)}: {old:.2f} -> {new:.2f} x floor ({change:+.1%})")
    for key in lost:
        print(f"lost: {_name(key)}: {after[key].get('failed', 'no ratio to the floor')}")
    print(
        f"{len(shared)} rows in both: {len(slower)} slower, {len(faster)} faster, {len(lost)} lost, "
        f"{without} without a ratio before; only before: {len(before) - len(shared)}, "
        f"only after: {len(after) - len(shared)}"
    )
    if changes:
        mean = geometric_mean(new / old for _, old, new, _ in changes)
        print(f"after / before, geometric mean of {len(changes)} rows: {mean:.3f}")
    return 1 if slower or lost else 0


def _rows(path: Path) -> dict[tuple, dict]:
    return {tuple(row[k] for k in _KEY): row for row in read_json(path, _KEY)["rows"]}


def _ratios(old: dict, new: dict) -> tuple[float | None, float | None]:
    """Both rows' ratios to the floor, from a kind of timing that both have; from kernels if possible."""
    for kind in ("kernels", "eager"):
        pair = [row.get("x_floor", {}).get(kind) for row in (old, new)]
        if None not in pair:
            return pair[0], pair[1]
    return ratio(old), None


def _name(key: tuple) -> str:
    graph, layer, heads, dim, dtype, mode, schedule = key
    return f"{graph} {layer} {heads}x{dim} {dtype} {mode} {schedule}"
