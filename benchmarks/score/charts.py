"""The pictures of the documents, from the results alone.

``step-times.png``        training steps by library, of the GPU and of the CPU (README.md), and ``-dark``
``attention-DEVICE.png``  attention's kernels on each graph, as multiples of the byte bound
"""

from pathlib import Path
from typing import Any

from dfgnn.bench import records
from dfgnn.bench.palette import COLOURS, ON_DARK

from . import pages

# Device -> which cases are drawn in its panel.
PANELS = {
    "cuda": {"part": "attention", "graphs": ("ogbn-arxiv", "arxiv~"), "what": "attention"},
    "cpu": {"part": "layers", "graphs": ("PubMed", "PubMed~"), "what": "layers"},
}
COMPILED = " compiled"


def draw(results: Path, folder: Path) -> list[str]:
    """Draws every picture for which there are results; a line for each, or why there is none."""
    try:
        import matplotlib
    except ImportError as error:
        return [f"pictures need matplotlib: pip install matplotlib ({error})"]
    matplotlib.use("Agg")
    found = pages.results_of(results)
    panels = {device: bars for device in found if (bars := step_times(found[device], device))}
    lines = []
    if panels:
        lines.append(_save(_step_times(panels), folder / "step-times.png"))
        with matplotlib.rc_context(ON_DARK):
            lines.append(_save(_step_times(panels), folder / "step-times-dark.png"))
    for device, result in found.items():
        if ratios := times_bound(result):
            lines.append(_save(_bound(ratios, device), folder / f"attention-{device}.png"))
    return lines


def step_times(results: dict[str, Any], device: str) -> tuple[str, dict[str, dict[str, float]]] | None:
    """A title, and ms in float32 by layer and library: the fastest way of each, and of compiled PyG."""
    panel = PANELS[device]
    cases = [c for c in pages.cases_of(results, panel["part"]) if c["graph"] in panel["graphs"]]
    if not cases:
        return None
    cases = [c for c in cases if c.get("threads") == cases[-1].get("threads")]
    bars: dict[str, dict[str, float]] = {}
    for case in cases:
        layer = pages.NAMES.get(case["layer"], case["layer"])
        mine = bars.setdefault(f"{case.get('library', '')} {layer}".strip(), {})
        compiled = pages.cases_of(results, "compiled", graph=case["graph"], layer=case["layer"])
        for c in [*case["contestants"], *(c for other in compiled for c in other["contestants"])]:
            ms, library = records.median(c), c["library"]
            if c["dtype"] == "float32" and ms is not None:
                library += COMPILED if c["way"].startswith("compiled") and library != "dfgnn" else ""
                mine[library] = min(ms, mine.get(library, ms))
    run = results["runs"][cases[0]["run"]]
    where = run.get("gpu") or f"{run['cpu']}, {pages.threads_text(cases[0]['threads'])}"
    where = where.replace("(R)", "").replace(" Processor", "")
    return f"{where}: {panel['what']} on {cases[0]['graph']}, {cases[0]['edges']:,} edges", bars


def times_bound(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Graph -> layer and dtype -> dfgnn's time as a multiple of the byte bound."""
    found: dict[str, dict[str, float]] = {}
    for case in pages.cases_of(results, "attention", mode="train"):
        for dtype in pages.dtypes_of(case):
            ms, bound = pages.kernels(case, dtype)
            if ms and bound:
                name = f"{pages.NAMES[case['layer']]} {pages.SHORT[dtype]}"
                found.setdefault(case["graph"], {})[name] = ms / bound
    return found


def _step_times(panels: dict[str, tuple]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.8 * len(panels), 4.6), dpi=110, layout="constrained")
    for axes, (title, groups) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.values()):
        place, ticks = 0.0, []
        for group, bars in groups.items():
            ordered = sorted(bars.items(), key=lambda bar: bar[0] != "dfgnn")
            places = [place + k for k in range(len(ordered))]
            for y, (library, value) in zip(places, ordered):
                colour = COLOURS.get(library.removesuffix(COMPILED), "#999999")
                faint = 0.6 if library.endswith(COMPILED) else 1.0
                axes.barh(y, value, color=colour, alpha=faint, height=0.85)
                axes.text(value, y, f" {library} {pages.number(value)} ms", va="center", fontsize=9)
            ticks.append((sum(places) / len(places), group))
            place = places[-1] + 1.8
        axes.set_yticks(*zip(*ticks))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.45 * max(value for bars in groups.values() for value in bars.values()))
        axes.set_xlabel("milliseconds for a training step, less is better")
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _bound(ratios: dict[str, dict[str, float]], device: str):
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for bars in ratios.values() for name in bars))
    figure = Figure(figsize=(max(6.0, 1.2 * len(ratios) + 2), 4.2), dpi=100, layout="constrained")
    axes, width = figure.add_subplot(), 0.8 / len(names)
    for k, name in enumerate(names):
        drawn = {
            i + (k + 0.5) * width - 0.4: bars[name] for i, bars in enumerate(ratios.values()) if name in bars
        }
        axes.bar(list(drawn), list(drawn.values()), width, label=name, color=f"C{k}")
    axes.axhline(1, color="#222222", linestyle="--", linewidth=1, label="byte bound")
    axes.set_xticks(range(len(ratios)), list(ratios), rotation=30, ha="right")
    axes.set_ylabel("time / byte bound")
    axes.set_title(f"Training step of attention, 4×32, {device}")
    figure.legend(loc="outside lower center", ncols=4, fontsize=7)
    return figure


def _save(figure, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return str(path)
