"""What a step's kernels do over time, for distributed.py: recorded by torch's profiler, and drawn."""

import json
import tempfile
from pathlib import Path

import torch

from dfgnn.bench.palette import COLOURS as OF_LIBRARIES

# dfgnn's kernels have its usual colour; each other kind of kernel another one.
COLOURS = OF_LIBRARIES["dfgnn"], "#3f7fbf", "#9aa1a8", "#8e6bb0", "#2a9d8f"


def timeline(step):
    """Kernels of one step: [[what, begin, length], ...] in microseconds; and how much of the all-to-all lies
    under other kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    begin = min(float(e["ts"]) for e in kernels)
    found = sorted([kind_of(e["name"]), float(e["ts"]) - begin, float(e["dur"])] for e in kernels)
    found.sort(key=lambda event: event[1])
    others = [(b, b + d) for kind, b, d in found if kind not in ("exchange", "all-reduce")]
    exchanges = [(b, b + d) for kind, b, d in found if kind == "exchange"]
    total = sum(b - a for a, b in exchanges)
    hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in exchanges for c, d in others if c < b and a < d)
    return {
        "events": [[kind, round(b, 1), round(d, 1)] for kind, b, d in found if d >= 5],
        "exchange_us": total,
        "under_others": hidden / total if total else None,
    }


def kind_of(kernel):
    name = kernel.lower()
    if "nccl" in name:
        return "all-reduce" if "allreduce" in name else "exchange"
    if "dfgnn" in name:
        return "attention"
    return "products" if any(word in name for word in ("gemm", "cutlass", "cublas", "nvjet")) else "other"


def plot(path, picture):
    """What a step's kernels do, by kind, over time: one band per model and dtype."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    result = json.loads(Path(path).read_text())
    rows = [row for row in result["full"]["rows"] if "timeline" in row]
    kinds = dict(zip(("attention", "products", "other", "exchange", "all-reduce"), COLOURS))
    figure, axes = plt.subplots(len(rows), 1, figsize=(11, 1.6 * len(rows) + 0.8), squeeze=False)
    for axis, row in zip(axes[:, 0], rows):
        for place, (kind, colour) in enumerate(kinds.items()):
            bars = [(b / 1e3, d / 1e3) for k, b, d in row["timeline"]["events"] if k == kind]
            axis.broken_barh(bars, (-place - 0.4, 0.8), facecolors=colour)
        axis.set_yticks([-k for k in range(len(kinds))], list(kinds))
        share = row["timeline"]["under_others"]
        axis.set_title(
            f"{row['model']} {row['dtype']}: {share:.0%} of the all-to-all beside other kernels", fontsize=9
        )
    axes[-1, 0].set_xlabel("ms of a training step on one of the GPUs")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
