"""Result files: tables, geometric means, and the environment of the measurements."""

import datetime
import json
import math
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from .. import __version__, env
from .peers import SPEEDUPS

_SHORT = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
# Rows that agree in these make one geometric mean over graphs.
_CASE = ("layer", "heads", "head_dim", "dtype", "mode", "schedule")
_COLUMNS = (
    ("layer", 6), ("H x D", 8), ("type", 5), ("mode", 8), ("schedule", 14), ("eager ms", 10),
    ("p20 - p80", 18), ("x floor", 8), ("kernels ms", 11), ("x floor", 8), ("x bound", 8), ("GB/s", 7),
    ("err out", 9), ("err grad", 9), ("extra MB", 9), ("E*H MB", 8), ("plan", 0),
)  # fmt: skip


def environment(device: torch.device, commit: str | None) -> dict:
    """Commit (of the source tree unless given), date, hardware, versions."""
    root = Path(__file__).parents[2]
    changes = _output("git", "-C", str(root), "status", "--porcelain") if (root / ".git").exists() else None
    info: dict[str, Any] = {
        "commit": commit or _output("git", "-C", str(root), "rev-parse", "HEAD"),
        "uncommitted_changes": None if commit or changes is None else bool(changes),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device.type,
        "dfgnn": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if device.type == "cuda":
        info |= {
            "gpu": torch.cuda.get_device_name(device),
            "driver": env.driver() or "unknown",
            "cuda": torch.version.cuda,
        }
    else:
        info |= {"cpu": env.cpu_name(), "threads": torch.get_num_threads()}
    return info


def write_json(path: Path | None, results: Any) -> None:
    """Writes results to a file, making its folders; does nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_text(_finite(results)) + "\n")


def read_json(path: Path, keys: tuple[str, ...]) -> dict:
    """Reads a file of `write_json`. Raises ValueError unless it is one whose rows have these keys."""
    try:
        found = json.loads(path.read_bytes())
        if not all(isinstance(row[key], (str, int)) for row in found["rows"] for key in keys):
            raise TypeError(f"rows without {', '.join(keys)}")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected a file of python -m dfgnn.bench --json, got {type(error).__name__}: {error}"
        ) from error
    return found


def _text(value, indent: str = "") -> str:
    """JSON in which a list or dict is on one line if it is short or has no other inside."""
    line, inner = json.dumps(value, allow_nan=False), indent + " "
    if len(line) <= 150 or not any(bracket in line[1:] for bracket in "[{"):
        return line
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {_text(item, inner)}" for name, item in value.items()]
    else:
        parts = [_text(item, inner) for item in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    body = f",\n{inner}".join(parts)
    return f"{first}\n{inner}{body}\n{indent}{last}"


def _finite(value):
    """`value` rounded to six digits, with NaN and infinity as text, because JSON has neither."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def geometric_mean(values) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def ratio(row: dict) -> float | None:
    """The ratio of a row's time to passes x floor (see `yardsticks`), of kernel times where there are any."""
    found = row.get("x_floor", {})
    return found.get("kernels", found.get("eager"))


def times_bound(row: dict) -> float | None:
    """The ratio of a row's time to the byte bound, of kernel times where there are any. Old files lack it."""
    found = row.get("x_bound", {})
    return found.get("kernels", found.get("eager"))


def plan_text(plans: dict) -> str:
    """A short text for the plans of a row's directions."""

    def text(plan):
        heads = plan.get("heads_per_tile")
        parts = plan.get("source_parts", 1)
        return (
            f"{plan['schedule']} <= {plan['max_edges']}"
            + (f" heads <= {heads}" if heads else "")
            + (f" sources / {parts}" if parts > 1 else "")
        )

    return " / ".join(text(plan) for plan in plans.values())


def means(rows: list[dict]) -> list[dict]:
    """Geometric means over the graphs, per layer, shape, dtype, mode and schedule.

    x_floor and worst: mean and largest ratio to passes x floor; x_bound: ratio to the byte bound. speedups:
    over each peer. oracle: chosen / best plan, with the number of graphs that have several candidates.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if "failed" not in row:
            groups.setdefault(tuple(row[k] for k in _CASE), []).append(row)
    result = []
    for key, group in groups.items():
        record = dict(zip(_CASE, key))
        ratios = {row["graph"]: r for row in group if (r := ratio(row)) is not None}
        if ratios:
            worst = max(ratios, key=ratios.__getitem__)
            record |= {
                "graphs": len(ratios),
                "x_floor": geometric_mean(ratios.values()),
                "worst": {"graph": worst, "x_floor": ratios[worst]},
            }
        bound = {row["graph"]: b for row in group if (b := times_bound(row)) is not None}
        if bound:
            worst = max(bound, key=bound.__getitem__)
            record["x_bound"] = {
                "mean": geometric_mean(bound.values()),
                "worst": {"graph": worst, "x_bound": bound[worst]},
            }
        record["speedups"] = _speedups(group)
        oracle = {row["graph"]: row["oracle"] for row in group if "oracle" in row}
        if oracle:
            worst = max(oracle, key=lambda graph: oracle[graph]["ratio"])
            record["oracle"] = {
                "graphs": len(oracle),
                "with_choice": sum(_has_choice(found) for found in oracle.values()),
                "mean": geometric_mean(found["ratio"] for found in oracle.values()),
                "worst": {"graph": worst, "ratio": oracle[worst]["ratio"]},
            }
        result.append(record)
    return result


def _has_choice(oracle: dict) -> bool:
    return len(oracle["candidates"]) > 1


# ---- text ------------------------------------------------------------------------------------------


def environment_line(info: dict) -> str:
    where = f"{info['gpu']}, driver {info['driver']}, CUDA {info['cuda']}" if "gpu" in info else (
        f"{info['cpu']}, {info['threads']} threads"
    )  # fmt: skip
    dirty = " with changes" if info["uncommitted_changes"] else ""
    return f"{where}, torch {info['torch']}, commit {info['commit']}{dirty}, {info['date']}"


def graph_lines(info: dict) -> str:
    if "unavailable" in info:
        return f"\n{info['name']}: not measured: {info['unavailable']}"
    steps = info["preprocessing_ms"]
    text = ", ".join(
        f"{name.replace('_', ' ')} {ms if isinstance(ms, str) else f'{ms:.3g} ms'}"
        for name, ms in steps.items()
    )
    batch = f"{info['graphs']:,} graphs, " if info["graphs"] > 1 else ""
    return (
        f"\n{info['name']}: {batch}{info['nodes']:,} nodes, {info['edges']:,} edges, "
        f"degree mean {info['mean_degree']:.1f}, max {info['max_degree']:,}\n  preprocessing: {text}"
    )


def yardstick_lines(floor: dict) -> str:
    """Lines for the baselines, and the header of the rows that follow."""

    def text(name):
        yardstick = floor[name]
        if "unavailable" in yardstick:
            return f"unavailable ({yardstick['unavailable']})"
        how = [yardstick["schedule"]] if "schedule" in yardstick else []
        blocks = yardstick.get("column_blocks", 1)  # earlier results have none
        how += [f"{blocks} blocks of columns"] if blocks > 1 else []
        schedule = f" ({', '.join(how)})" if how else ""
        return f"{_ms(yardstick, 'eager')} eager, {_ms(yardstick, 'kernels')} kernels{schedule}"

    cache = ""
    if "fits_l2" in floor:
        fits = "fits" if floor["fits_l2"] else "exceeds"
        sizes = f"{floor['working_set_mb']:.0f} MB, {fits} the L2 cache of {floor['l2_mb']:.0f} MB"
        cache = f"; the working set, {sizes}"
    lowest = ", ".join(f"{ms:.4g} ms {kind}" for kind, ms in floor["floor"].items()) or "none"
    return (
        f"  F = {floor['width']} {_SHORT[floor['dtype']]}: torch.sparse {text('sparse')}; "
        f"gather sum {text('gather_sum')}; floor {lowest}{cache}\n"
        f"  {_columns([name for name, _ in _COLUMNS])}"
    )


def row_lines(row: dict) -> str:
    """A line for the row, and one for each peer."""
    shape = f"{row['heads']}x{row['head_dim']}"
    cells = [row["layer"], shape, _SHORT[row["dtype"]], row["mode"], row["schedule"]]
    if "failed" in row:
        return "  " + _columns(cells) + f" not measured: {row['failed']}"
    eager, times = row["eager"], row["x_floor"]
    error = row["error"]
    cells += [
        _ms(row, "eager"), f"{eager['p20']:.4g} - {eager['p80']:.4g}", _number(times.get("eager"), ".2f"),
        _ms(row, "kernels"), _number(times.get("kernels"), ".2f"), _number(times_bound(row), ".2f"),
        f"{row['gathered_gb_s']:.0f}",
        _number(error.get("out"), ".1e"), _number(error.get("gradients"), ".1e"),
        _number(row.get("extra_mb"), ".1f"), f"{row['edge_tensor_mb']:.1f}",
        plan_text(row["plan"]),
    ]  # fmt: skip
    lines = ["  " + _columns(cells)]
    for name, reason in (("kernels", row.get("kernels", {})), ("error", error)):
        if "unavailable" in reason:
            lines.append(f"      {name} not measured: {reason['unavailable']}")
    if "rows" in error:
        lines.append(f"      error of {error['rows']:,} rows of the output")
    if "oracle" in row:
        lines.append(f"      {_oracle_text(row['oracle'])}")
    for name, peer in row["peers"].items():
        if "unavailable" in peer:
            lines.append(f"      {name}: not measured: {peer['unavailable']}")
            continue
        wrong = f", error {peer['error']['out']:.1e}" if "out" in peer["error"] else ""
        text = f"      {name}: {_ms(peer, 'eager')} ms, dfgnn is {peer['speedup']:.2f} x as fast"
        if "speedup_kernels" in peer:
            text += f", kernels {_ms(peer, 'kernels')} ms, {peer['speedup_kernels']:.2f} x"
        elif "unavailable" in peer.get("kernels", {}):
            text += f", kernels not measured: {peer['kernels']['unavailable']}"
        lines.append(text + wrong)
    return "\n".join(lines)


def _oracle_text(oracle: dict) -> str:
    if not _has_choice(oracle):
        return f"oracle: chosen / best {oracle['ratio']:.2f}, there is one candidate only: {oracle['chosen']}"
    times = ", ".join(
        f"{plan} "
        + (f"{found['ms']:.4g} ms" if "ms" in found else f"not measured: {found['failed']}")
        + (" (too large)" if "too_large" in found else "")
        for plan, found in oracle["candidates"].items()
    )
    return f"oracle: chosen / best {oracle['ratio']:.2f}, best {oracle['best']}; {oracle['kind']}: {times}"


def _speedups(rows: list[dict]) -> dict:
    """{peer: {"graphs", "mean", "least", "kernels"}} over the rows with this peer; "kernels" holds the same
    numbers for times in CUDA graphs."""
    by_peer: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for name, peer in row["peers"].items():
            for key in SPEEDUPS.values():
                if key in peer:
                    by_peer.setdefault(name, {}).setdefault(key, []).append(peer[key])
    summary = {
        name: {
            key: {"graphs": len(values), "mean": geometric_mean(values), "least": min(values)}
            for key, values in by_key.items()
        }
        for name, by_key in by_peer.items()
    }
    eager, kernels = SPEEDUPS.values()
    return {
        name: of.get(eager, {}) | ({"kernels": of[kernels]} if kernels in of else {})
        for name, of in summary.items()
    }


def mean_line(record: dict) -> str:
    shape = f"{record['heads']}x{record['head_dim']}"
    text = f"  {record['layer']} {shape} {_SHORT[record['dtype']]} {record['mode']} {record['schedule']}: "
    if "x_floor" in record:
        worst = record["worst"]
        text += (
            f"{record['x_floor']:.2f} x passes x floor on {record['graphs']} graphs, "
            f"worst {worst['x_floor']:.2f} on {worst['graph']}"
        )
    else:
        text += "no floor"
    if "x_bound" in record:
        summary = record["x_bound"]
        worst = summary["worst"]
        text += f"; {summary['mean']:.2f} x byte bound, worst {worst['x_bound']:.2f} on {worst['graph']}"
    for name, s in record["speedups"].items():
        text += f"; {s['mean']:.2f} x faster than {name} on {s['graphs']}, least {s['least']:.2f}"
        if "kernels" in s:
            k = s["kernels"]
            text += f" (kernels {k['mean']:.2f} on {k['graphs']}, least {k['least']:.2f})"
    if "oracle" in record:
        summary = record["oracle"]
        worst = f"worst {summary['worst']['ratio']:.2f} on {summary['worst']['graph']}"
        choice = f"{summary['with_choice']} of {summary['graphs']} graphs with several candidates"
        text += f"; chosen / best plan {summary['mean']:.2f}, {worst} ({choice})"
    return text


def _columns(cells: list[str]) -> str:
    return " ".join(
        cell.ljust(width) if i < 5 or not width else cell.rjust(width)
        for i, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS))
    ).rstrip()


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _ms(record: dict, kind: str) -> str:
    return _number(record.get(kind, {}).get("median"), ".4g")
