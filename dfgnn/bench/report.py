"""What is printed of results, and what is kept of the machine that they are from."""

import datetime
import math
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch

from .. import __version__, env
from .records import key

_SHORT = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}


def environment(device: torch.device, commit: str | None) -> dict:
    """Commit (of the source tree unless given), date, hardware, versions; None for what is not installed."""
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
    return info | {name: env.version(name) for name in ("torch_geometric", "dgl", "turbo_gnn", "pyg_lib")}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# ---- text ------------------------------------------------------------------------------------------


def environment_line(info: dict) -> str:
    where = f"{info['gpu']}, driver {info['driver']}, CUDA {info['cuda']}" if "gpu" in info else (
        f"{info['cpu']}, {info['threads']} threads"
    )  # fmt: skip
    dirty = " with changes" if info["uncommitted_changes"] else ""
    return f"{where}, torch {info['torch']}, commit {info['commit']}{dirty}, {info['date']}"


def name_of(case: dict) -> str:
    """A case in one line."""
    shape = f"{case['heads']}x{case['head_dim']}"
    more = [case.get("library", ""), f"x {case['layers']}" if "layers" in case else "", shape]
    more += [case.get("mode", ""), "+".join(case.get("ways", case.get("dtypes", [])))]
    return " ".join(filter(None, [case["part"], case["graph"], case["layer"], *more]))


def graph_line(name: str, result: dict) -> str:
    """The graph of a case, and what a Graph and plans of it take once."""
    text = f"{name}: {result['nodes']:,} nodes, {result['edges']:,} edges"
    if "largest_degree" in result:
        text += f", at most {result['largest_degree']:,} into a node"
    spent = result.get("preprocessing_ms", {})
    once = [f"{what.replace('_', ' ')} {_ms(ms)}" for what, ms in spent.items() if not isinstance(ms, str)]
    return text + (f"\n  once: {', '.join(once)}" if once else "")


def case_lines(case: dict, result: dict) -> str:
    """The case, and a line for each contestant: its time, also as a multiple of passes x floor and of the
    byte bound; how many times as fast dfgnn's fastest way is in the same dtype; errors of output / gradients
    against float64; and the peak of memory."""
    if "unavailable" in result:
        return f"{name_of(case)}: not measured: {result['unavailable']}"
    lines = [name_of(case)]
    for dtype, floor in result.get("floor", {}).items():
        bound = result["byte_bound"][dtype]
        kinds = [f"{floor[kind]:.4g} ms {kind}, byte bound {ms:.4g}" for kind, ms in bound.items()]
        lines.append(f"    {_SHORT[dtype]} {result['passes']} x floor of {'; '.join(kinds) or 'none'}")
    own: dict[str, float] = {}
    for c in result["contestants"]:
        if _is_ours(c) and "ms" in c:
            own[c["dtype"]] = min(_time(c), own.get(c["dtype"], math.inf))
    lines += [f"    {_contestant(c, result, own.get(c['dtype']))}" for c in result["contestants"]]
    if (found := oracle(result)) is not None:
        lines.append(f"    chosen / best plan {found[0]:.2f}, best: {found[1]}")
    return "\n".join(lines)


def _is_ours(contestant: dict) -> bool:
    return contestant["library"] == "dfgnn"


def _time(contestant: dict) -> float:
    """The median time of a contestant that was measured, in ms."""
    return statistics.median(contestant["ms"])


def _contestant(c: dict, result: dict, own: float | None) -> str:
    name = f"{c['library']} {c['way']} {_SHORT[c['dtype']]}"
    if "ms" not in c:
        return f"{name}: not measured: {c['failed']}"
    ms = _time(c)
    words = [f"{ms:.4g} ms ({min(c['ms']):.4g} to {max(c['ms']):.4g})"]
    if _is_ours(c):
        kind = "kernels" if "captured" in c["way"] else "eager"
        floor = result.get("floor", {}).get(c["dtype"], {}).get(kind)
        bound = result.get("byte_bound", {}).get(c["dtype"], {}).get(kind)
        words += [f"{ms / (result['passes'] * floor):.2f} x floor"] if floor else []
        words += [f"{ms / bound:.2f} x bound"] if bound else []
    elif own is not None:
        words.append(f"dfgnn is {ms / own:.2f} x as fast")
    error = c.get("error", {})
    if error:
        text = " / ".join(f"{error[k]:.1e}" for k in ("out", "gradients") if k in error)
        words.append(f"error {text}" + (f" of {error['rows']:,.0f} rows" if "rows" in error else ""))
    words += [f"{c['extra_mb']:.1f} MB"] if "extra_mb" in c else []
    words += [c["plan"] + (" (too large)" if c.get("too_large") else "")] if "plan" in c else []
    return f"{name}: {', '.join(words)}"


def oracle(result: dict) -> tuple[float, str] | None:
    """(chosen / best, the best plan) of the first type of a case with several plans, by captured calls if all
    plans have such times; None for other cases. Plans that are too large cannot be the best."""
    ours = [c for c in result["contestants"] if _is_ours(c) and "plan" in c and "ms" in c]
    ours = [c for c in ours if c["dtype"] == ours[0]["dtype"]]
    captured = [c for c in ours if c["way"].startswith("captured")]
    eager = [c for c in ours if c["way"].startswith("eager")]
    same = captured if len(captured) == len(eager) else eager
    chosen = next((_time(c) for c in same if "," not in c["way"]), None)
    if len(same) < 2 or chosen is None:
        return None
    best = min((c for c in same if not c.get("too_large")), key=_time, default=same[0])
    return max(chosen / _time(best), 1.0), best["plan"]


def means(cases: list[dict]) -> list[str]:
    """Geometric means over graphs, of cases that differ in the graph alone, with the worst graph of each: the
    times of dfgnn's calls as multiples of the byte bound, and of the chosen plan as a multiple of the
    best."""
    groups: dict[str, list[dict]] = {}
    for case in cases:
        if "byte_bound" in case and "contestants" in case:
            groups.setdefault(key({**case, "graph": ""}), []).append(case)
    lines = []
    for group in groups.values():
        values: dict[str, dict[str, float]] = {}
        for case in group:
            for c in case["contestants"]:
                kind = {"captured": "kernels", "eager": "eager"}.get(c["way"], "")
                bound = case["byte_bound"][c["dtype"]].get(kind)
                if _is_ours(c) and bound and "ms" in c:
                    name = f"{c['way']} {_SHORT[c['dtype']]}, times byte bound"
                    values.setdefault(name, {})[case["graph"]] = _time(c) / bound
            if case.get("oracle") and (found := oracle(case)) is not None:
                values.setdefault("chosen / best plan", {})[case["graph"]] = found[0]
        for name, of in values.items():
            if len(of) > 1:
                mean, worst = math.exp(sum(map(math.log, of.values())) / len(of)), max(of, key=of.__getitem__)
                what = f"{group[0]['layer']} {group[0]['heads']}x{group[0]['head_dim']} {group[0]['mode']}"
                text = f"{mean:.2f} on {len(of)} graphs, worst {of[worst]:.2f} on {worst}"
                lines.append(f"  {what} {name}: {text}")
    return lines


def _ms(value: float) -> str:
    return f"{value:.3g} ms"
