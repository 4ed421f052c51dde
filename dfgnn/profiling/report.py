"""The results of ``dfgnn.profile``: `Profile` and `Comparison`, as tables, advice and timelines."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .trace import Step

_ROWS = 12  # most kernels or operators in a table
_COLOURS = {
    "operator": "#4c78a8",
    "other thread": "#72b7b2",
    "launch": "#f58518",
    "wait": "#e45756",
    "kernel": "#54a24b",
    "copy": "#b279a2",
    "set": "#9d9d9d",
}
# Kind of a `Span` -> its lane in a timeline; other kinds are in the lane "device".
_LANES = {
    "operator": "operators",
    "other thread": "other threads",
    "launch": "launches",
    "wait": "launches",
}
# A launch-bound step with at most this number of launches spends the host's time on something else.
_FEW = 10
# Advice is given if it gains at least this share of a step's time.
_GAIN = 0.05


class Operator(NamedTuple):
    """An operator or kernel: its own milliseconds per step, without what it calls, and its calls per step."""

    name: str
    ms: float
    calls: float


@dataclass(frozen=True, repr=False)
class Profile:
    """The measurements of one step: see `dfgnn.profile`. Printing it shows a table."""

    name: str
    device: str
    on_gpu: bool
    step_ms: float
    host_ms: float
    device_ms: float
    tklqt_ms: float
    kernels: int
    launches: int  # calls that launch kernels: a CUDA graph has many kernels and one launch
    copies: int  # copies between host and device, and fills of memory
    waits: int  # calls that wait for the device
    waits_ms: float
    peak_bytes: int | None
    calling_thread_ms: float | None = None  # step time with backward in the calling thread, if it was not
    by_kernel: list[Operator] = field(default_factory=list)
    by_operator: list[Operator] = field(default_factory=list)
    timeline: Step | None = None

    @property
    def verdict(self) -> str:
        """ "launch-bound", "bandwidth-bound", or on the CPU "host"."""
        if not self.on_gpu:
            return "host"
        return "launch-bound" if self.host_ms > self.device_ms else "bandwidth-bound"

    @property
    def advice(self) -> list[str]:
        """What makes the step faster, in words."""
        lines = []
        if not self.on_gpu:
            names = ", ".join(o.name for o in self.by_operator[:3])
            return [f"the step runs on the CPU; most of its time is in {names}"]
        if self.verdict == "launch-bound":
            idle = 1 - min(self.device_ms / self.step_ms, 1.0)
            lines.append(
                f"the device is idle for {idle:.0%} of a step: faster kernels change nothing, fewer do"
            )
            if self.launches > _FEW:
                lines.append(
                    f"dfgnn.capture replays the {self.launches} launches as one CUDA graph; "
                    "torch.compile fuses what lies between attentions"
                )
            else:
                lines.append("there are few launches left: look at the loader and at what else the host does")
            if self.calling_thread_ms is not None and self.calling_thread_ms < (1 - _GAIN) * self.step_ms:
                lines.append(
                    "backward runs in another thread; in the calling one, by "
                    "torch.autograd.set_multithreading_enabled(False), which suits a single GPU, a step "
                    f"takes {self.calling_thread_ms:.3f} ms"
                )
        else:
            top = self.by_kernel[0] if self.by_kernel else None
            share = "" if top is None else f"; {top.ms / self.device_ms:.0%} of it is {_short(top.name, 48)}"
            lines.append(f"the device is at work for {self.device_ms:.3f} ms of the step{share}")
            lines.append(
                "bfloat16 autocast halves what is read, Graph.autotune and Graph.reorder change how; "
                "capture will not help much"
            )
        if self.waits:
            lines.append(
                f"the host waits {self.waits} times for the device in each step ({self.waits_ms:.3f} ms): "
                "look for .item(), .cpu(), boolean indexing and prints"
            )
        return lines

    def __repr__(self) -> str:
        lines = [f"{self.name} on {self.device}: {self.verdict}"]
        lines += [f"  {label:<36}{value}" for label, value in self._numbers()]
        lines += _table("kernel", self.by_kernel) if self.on_gpu else []
        lines += _table("host time by operator", self.by_operator)
        return "\n".join([*lines, *(f"  -> {text}" for text in self.advice)])

    def _numbers(self) -> list[tuple[str, str]]:
        rows = [("time per step", f"{self.step_ms:.3f} ms"), ("host time", f"{self.host_ms:.3f} ms")]
        if self.calling_thread_ms is not None:
            rows.insert(1, ("  backward in the calling thread", f"{self.calling_thread_ms:.3f} ms"))
        if self.on_gpu:
            copied = f", {self.copies} copies and settings" if self.copies else ""
            rows += [
                ("device time", f"{self.device_ms:.3f} ms"),
                ("kernels", f"{self.kernels} in {self.launches} launches{copied}"),
                ("kernel launch and queueing (TKLQT)", f"{self.tklqt_ms:.3f} ms"),
                ("waits for the device", f"{self.waits} ({self.waits_ms:.3f} ms)"),
            ]
        if self.peak_bytes is not None:
            rows.append(("peak memory", f"{self.peak_bytes / 2**20:.1f} MiB"))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """The numbers and tables, for a JSON file."""
        skipped = ("by_kernel", "by_operator", "timeline")
        numbers = {key: value for key, value in vars(self).items() if key not in skipped}
        return numbers | {
            "verdict": self.verdict,
            "by_kernel": [o._asdict() for o in self.by_kernel],
            "by_operator": [o._asdict() for o in self.by_operator],
        }

    def compare(self, after: Profile) -> Comparison:
        """This profile beside that of the same step after a change, such as `dfgnn.accelerate`."""
        return Comparison(self, after)

    def plot(self, path: str | Path) -> None:
        """Draws one step as a timeline of host and device to a file; its suffix determines the format.

        Raises ImportError where matplotlib is not installed.
        """
        _draw([self], path)


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two profiles of a step: see `Profile.compare`. Printing it shows a table."""

    before: Profile
    after: Profile

    @property
    def speedup(self) -> float:
        """Time per step before, over that after."""
        return self.before.step_ms / self.after.step_ms

    def __repr__(self) -> str:
        before, after = self.before, self.after
        rows: list[tuple[str, float | None, float | None, str]] = [
            ("time per step, ms", before.step_ms, after.step_ms, ".3f"),
            ("host time, ms", before.host_ms, after.host_ms, ".3f"),
        ]
        in_calling_thread = before.calling_thread_ms, after.calling_thread_ms
        if None not in in_calling_thread:
            rows.insert(1, ("  in the calling thread", *in_calling_thread, ".3f"))
        if before.on_gpu and after.on_gpu:
            rows += [
                ("device time, ms", before.device_ms, after.device_ms, ".3f"),
                ("kernels", before.kernels, after.kernels, "d"),
                ("launches", before.launches, after.launches, "d"),
                ("TKLQT, ms", before.tklqt_ms, after.tklqt_ms, ".3f"),
                ("waits for the device", before.waits, after.waits, "d"),
            ]
        if before.peak_bytes is not None and after.peak_bytes is not None:
            rows.append(("peak memory, MiB", before.peak_bytes / 2**20, after.peak_bytes / 2**20, ".1f"))
        lines = [f"{'':<24}{_short(before.name, 15):>16}{_short(after.name, 15):>16}{'ratio':>10}"]
        for label, x, y, form in rows:
            ratio = f"{x / y:.2f} x" if x and y else "-"
            lines.append(f"{label:<24}{format(x, form):>16}{format(y, form):>16}{ratio:>10}")
        lines.append(f"{'verdict':<24}{before.verdict:>16}{after.verdict:>16}")
        return "\n".join([*lines, *(f"  -> {text}" for text in after.advice)])

    def plot(self, path: str | Path) -> None:
        """Draws a step of both, as `Profile.plot` does, on one scale."""
        _draw([self.before, self.after], path)


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


def _table(title: str, rows: list[Operator]) -> list[str]:
    if not rows:
        return []
    total = sum(row.ms for row in rows)
    lines = [f"  {'ms':>9} {'share':>6} {'calls':>7}  {title}"]
    for row in rows[:_ROWS]:
        lines.append(f"  {row.ms:>9.4f} {row.ms / total:>6.1%} {row.calls:>7g}  {_short(row.name, 88)}")
    rest = rows[_ROWS:]
    if rest:
        ms = sum(row.ms for row in rest)
        calls = sum(row.calls for row in rest)
        lines.append(f"  {ms:>9.4f} {ms / total:>6.1%} {calls:>7g}  {len(rest)} more")
    return lines


def _draw(profiles: list[Profile], path: str | Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(f"a timeline needs matplotlib: pip install matplotlib ({error})") from error
    figure = Figure(figsize=(12, 0.8 + 1.7 * len(profiles)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(profiles), 1, sharex=True, squeeze=False)[:, 0]
    kinds = set()
    for axis, profile in zip(axes, profiles):
        step = profile.timeline
        spans = [*step.host, *step.device] if step is not None else []
        lanes = ["device", "launches", "operators"] if profile.on_gpu else ["operators"]
        if any(span.kind == "other thread" for span in spans):  # usually backward
            lanes.insert(-1, "other threads")
        for span in spans:
            lane = _LANES.get(span.kind, "device")
            if lane not in lanes:
                continue
            kinds.add(span.kind)
            axis.broken_barh(
                [(span.begin / 1e3, (span.end - span.begin) / 1e3)],
                (lanes.index(lane) - 0.4, 0.8),
                facecolor=_COLOURS[span.kind],
                edgecolor="white" if span.kind == "operator" else "none",
                linewidth=0.2,
            )
        axis.set_yticks(range(len(lanes)), lanes)
        axis.set_title(
            f"{profile.name}: {profile.step_ms:.3f} ms per step, {profile.verdict}", loc="left", fontsize=10
        )
    axes[-1].set_xlabel("ms, under the profiler, which lengthens the host's part")
    handles = [Patch(color=_COLOURS[kind], label=kind) for kind in _COLOURS if kind in kinds]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8)
    figure.savefig(path, dpi=150)
