"""The tables of the documents, from the results alone: ``PYTHONPATH=benchmarks python -m score.pages``.

What stands between ``<!-- scoreboard:NAME -->`` and ``<!-- /scoreboard -->`` in README.md and in the pages of
docs is written by ``fill``; NAME is the device and the name of a table (``cuda-models``) or one of
``SENTENCES``. A mean is taken over all graphs of its table or not at all. In a comparison the best way of
dfgnn stands against the best way of all others, whose dtype may be float32 where dfgnn's has 16 bits.
"""

import importlib
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dfgnn.bench import records

MARKED = re.compile(r"<!-- scoreboard:([\w-]+) -->(.*?)<!-- /scoreboard -->", flags=re.DOTALL)
DEVICES = ("cuda", "cpu")
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
NAMES = {"gat": "GAT", "gatv2": "GATv2", "dot": "dot product"}
DASH = "–"
Case = dict[str, Any]


def results_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Device -> the content of its results file, for the devices that have one."""
    paths = {device: folder / f"{device}.json" for device in DEVICES}
    return {device: records.read(path) for device, path in paths.items() if path.is_file()}


def pages_of(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def fill(root: Path, results: Path) -> list[Path]:
    """Fills all pages and returns those that changed. Raises ValueError for an unknown name."""
    changed, found = [], results_of(results)
    for page in pages_of(root):
        text = page.read_text()
        new = filled(text, found, page.name)
        if new != text:
            page.write_text(new)
            changed.append(page)
    return changed


def filled(text: str, results: dict[str, dict], page: str) -> str:
    """The text of a page with its tables."""

    def replaced(match: re.Match) -> str:
        name = match[1]
        content = rendered(name, results, page)
        space = "\n" if match[2].startswith("\n") else ""
        return f"<!-- scoreboard:{name} -->{space}{content}{space}<!-- /scoreboard -->"

    if text.count("<!-- scoreboard:") != text.count("<!-- /scoreboard -->"):
        raise ValueError(f"{page}: expected an end, <!-- /scoreboard -->, for each <!-- scoreboard:NAME -->")
    return MARKED.sub(replaced, text)


def rendered(name: str, results: dict[str, dict], page: str = "") -> str:
    if name in SENTENCES:
        return SENTENCES[name](results)
    device, _, table = name.partition("-")
    if device not in DEVICES or table not in TABLES:
        names = [*SENTENCES, *(f"{d}-{t}" for d in DEVICES for t in TABLES)]
        raise ValueError(f"{page}: scoreboard:{name}: expected one of {', '.join(names)}")
    if device not in results:
        return missing(device)
    return TABLES[table](results[device]) or missing(device)


def missing(device: str) -> str:
    return f"*Not measured yet: `make scoreboard ARGS='--device {device}'` does.*"


# ---- reading ---------------------------------------------------------------------------------------------


def cases_of(results: dict, *parts: str, **options) -> list[Case]:
    """Measured cases of these parts with these values."""
    return [
        case
        for case in results["cases"]
        if case["part"] in parts
        and "contestants" in case
        and all(case.get(name) == value for name, value in options.items())
    ]


def fullest(cases: list[Case]) -> list[Case]:
    """Returns the case with the most ways among cases that differ in their ways alone."""
    found: dict[str, Case] = {}
    for case in cases:
        name = records.key({k: v for k, v in case.items() if k != "ways"})
        if name not in found or len(case["contestants"]) > len(found[name]["contestants"]):
            found[name] = case
    return list(found.values())


def dtypes_of(case: Case) -> list[str]:
    return list(dict.fromkeys(c["dtype"] for c in case["contestants"]))


def times(case: Case, dtype: str) -> dict[tuple[str, str], dict]:
    """(library, way): contestant."""
    return {(c["library"], c["way"]): c for c in case["contestants"] if c["dtype"] == dtype}


def best_of(contestants: Iterable[dict]) -> tuple[float, dict] | None:
    """(ms, contestant) with the smallest median of the samples; None if none was measured."""
    measured = [(ms, c) for c in contestants if (ms := records.median(c)) is not None]
    return min(measured, key=lambda pair: pair[0]) if measured else None


def is_ours(contestant: dict) -> bool:
    return contestant["library"] == "dfgnn"


def is_other(contestant: dict) -> bool:
    """Whether the contestant does the whole work with another library than dfgnn."""
    return not is_ours(contestant) and contestant["library"] != "the loader alone"


def comparison(case: Case, dtype: str) -> tuple[float, dict, float, dict] | None:
    """(dfgnn's best ms, its contestant, the best ms of other libraries, its contestant)."""
    ours = best_of(c for c in case["contestants"] if is_ours(c) and c["dtype"] == dtype and is_whole(c))
    allowed = ("float32", dtype) if dtype != "float32" else ("float32",)
    others = best_of(c for c in case["contestants"] if is_other(c) and c["dtype"] in allowed)
    return (*ours, *others) if ours and others else None


def is_whole(contestant: dict) -> bool:
    """Whether it does the whole work of the case ("without edges" does less)."""
    return contestant["way"] != "without edges"


def number(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def milliseconds(contestant: dict | None) -> str:
    if contestant is None:
        return ""
    ms = records.median(contestant)
    return number(ms) if ms is not None else why(contestant["failed"])


def why(failed: str) -> str:
    if "OutOfMemory" in failed or "out of memory" in failed:
        return "out of memory"
    if failed.startswith(("ModuleNotFoundError", "ImportError")):
        return "not installed"
    if failed.startswith("NotImplementedError"):
        return "not there"
    return "failed"


def threads_text(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def mean(values: list[float | None]) -> str:
    """The geometric mean, if all of them are there."""
    known = [v for v in values if v is not None]
    if not known or len(known) < len(values):
        return DASH
    return number(math.exp(sum(map(math.log, known)) / len(known)))


def table(heads: list[str], rows: list[list[str]], left: int = 1) -> str:
    align = ["---"] * left + ["--:"] * (len(heads) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, align, *rows])


def note(cases: list[Case]) -> str:
    """What was not installed, and which graphs could not be had."""
    absent: dict[str, bool] = {}
    for c in (c for case in cases for c in case["contestants"]):
        gone = why(c["failed"]) == "not installed" if "failed" in c else False
        name = c["library"] if c["way"] != "NeighborLoader" else "PyG's sampler (pyg-lib)"
        absent[name] = absent.get(name, True) and gone
    names = [name for name, gone in absent.items() if gone]
    return f"\n\nNot installed there: {', '.join(names)}." if names else ""


# ---- tables ----------------------------------------------------------------------------------------------


def setup(results: dict) -> str:
    lines = []
    for run in results["runs"]:
        if "gpu" in run:
            where = f"{run['gpu']}, driver {run['driver']}, CUDA {run['cuda']}"
        else:
            where = f"{run['cpu']}, {threads_text(run['threads'])}"
        changes = " with uncommitted changes" if run["uncommitted_changes"] else ""
        also = [f"{k} {run[k]}" for k in ("torch_geometric", "dgl", "turbo_gnn", "pyg_lib") if run.get(k)]
        commit = (run["commit"] or "unknown")[:12]
        lines.append(
            f"{where}; torch {run['torch']}, {', '.join(also)}; commit {commit}{changes}, {run['date'][:10]}"
        )
    return "\n".join(f"- {text}." for text in dict.fromkeys(lines))


def label(case: Case) -> str:
    name = NAMES.get(case["layer"], case["layer"])
    layers = f", {case['layers']} layers" if "layers" in case else ""
    columns = f"{case['in']:,} → " if "in" in case else ""
    return f"{name}{layers}, {columns}{case['heads']}×{case['head_dim']}"


def graph_name(case: Case) -> str:
    batch = f", batches of {case['batch']}" if "batch" in case else ""
    return f"{case['graph']}{batch}"


def graph_label(case: Case) -> str:
    return f"{graph_name(case)}, {case['edges']:,} edges"


def who(contestant: dict, dtype: str = "") -> str:
    """Library and way, and the type where it is another one."""
    name = f"{contestant['library']} {contestant['way']}".removesuffix(" eager")
    return name if dtype in ("", contestant["dtype"]) else f"{name} {SHORT[contestant['dtype']]}"


WHAT = {
    "fresh": "new edge_index each step", "model-inference": "inference", "inference": "inference",
    "dropout": "dropout", "edges": "features of edges", "dense": "all pairs", "molecules": "loader included",
    "sampled": "sampling included",
}  # fmt: skip


def extremes(*parts: str, heading: str = "model") -> Callable[[dict], str]:
    """A row per layer or model, part and library over all graphs, shapes, types and numbers of threads: the
    least gain, with the strongest alternative and dfgnn's fastest way there, and the greatest."""

    def render(results: dict) -> str:
        groups: dict[str, list[tuple[float, Case, str, tuple]]] = {}
        cases = fullest(cases_of(results, *parts))
        for case in cases:
            layers = f", {case['layers']} layers" if "layers" in case else ""
            more = f", {WHAT[case['part']]}" if case["part"] in WHAT else ""
            name = (
                f"{case.get('library', '')} {NAMES.get(case['layer'], case['layer'])}{layers}{more}".strip()
            )
            for dtype in dtypes_of(case):
                if (found := comparison(case, dtype)) is not None:
                    groups.setdefault(name, []).append((found[2] / found[0], case, dtype, found))
        rows = []
        for name, of in groups.items():
            least, case, dtype, (ours, mine, theirs, other) = min(of, key=first)
            threads = [threads_text(case["threads"])] if "threads" in case else []
            where = [graph_name(case), shape_of(case), SHORT[dtype], *threads]
            row = [name, number(least), ", ".join(where), f"{number(theirs)}, {who(other, dtype)}"]
            row += [f"{number(ours)}, {who(mine)}", f"{number(max(of, key=first)[0])} of {len(of)}"]
            rows.append((least, row))
        rows.sort(key=first)
        heads = [heading, "least gain", "on", "strongest alternative, ms", "dfgnn, ms", "greatest, of cases"]
        return table(heads, [row for _, row in rows]) + note(cases) if rows else ""

    return render


def first(pair: tuple) -> float:
    return pair[0]


def shape_of(case: Case) -> str:
    columns = f"{case['in']:,} → " if "in" in case else ""
    return f"{columns}{case['heads']}×{case['head_dim']}"


def bounds(results: dict) -> str:
    """Times the byte bound of dfgnn's kernels, by shape: geometric mean over the graphs, and the worst."""
    cases = [c for c in cases_of(results, "attention", "shapes") if c["mode"] == "train"]
    rows = []
    for heads, dim, threads in dict.fromkeys((c["heads"], c["head_dim"], c.get("threads")) for c in cases):
        mine = [c for c in cases if (c["heads"], c["head_dim"], c.get("threads")) == (heads, dim, threads)]
        shape = f"{heads}×{dim}" + (f", {threads_text(threads)}" if threads else "")
        for dtype in dict.fromkeys(d for c in mine for d in dtypes_of(c)):
            cells, graphs = [], 0
            for layer in NAMES:
                found = {
                    c["graph"]: kernels(c, dtype)
                    for c in mine
                    if c["layer"] == layer and dtype in dtypes_of(c)
                }
                ratios = {graph: ms / bound for graph, (ms, bound) in found.items() if ms and bound}
                worst, graphs = max(ratios, key=ratios.__getitem__, default=""), max(graphs, len(found))
                cells.append(
                    mean([*ratios.values()])
                    + (f" ({ratios[worst]:.2f}, {worst})" if graphs > 1 and worst else "")
                )
            rows.append([shape, SHORT[dtype], str(graphs), *cells])
    return table(["shape", "type", "graphs", *NAMES.values()], rows, 2) if rows else ""


def kernels(case: Case | None, dtype: str) -> tuple[float | None, float | None]:
    """ms of dfgnn's kernels and the byte bound, by the kind of timing that both have."""
    if case is None:
        return None, None
    found, bound = times(case, dtype), case["byte_bound"].get(dtype, {})
    for way, kind in (("captured", "kernels"), ("eager", "eager")):
        ms = records.median(found.get(("dfgnn", way), {}))
        if ms is not None and kind in bound:
            return ms, bound[kind]
    return None, None


def alternatives(results: dict) -> str:
    """How many times the strongest alternative's time, per graph, layer and dtype, and whose that is."""
    cases = [c for c in cases_of(results, "attention", "compiled") if c["mode"] == "train"]
    names = list(
        dict.fromkeys((c["layer"], d) for c in cases if c["part"] == "attention" for d in dtypes_of(c))
    )
    keys = list(dict.fromkeys((c["graph"], c.get("threads")) for c in cases))
    rows, values, untried = [], {}, False
    for graph, threads in keys:
        cells = []
        for layer, dtype in names:
            of = [c for c in cases if (c["graph"], c.get("threads"), c["layer"]) == (graph, threads, layer)]
            found = [f for c in of if (f := comparison(c, dtype))]
            # Ratios are taken within a case, whose contestants took turns; the smallest ratio is shown.
            least = min(found, key=lambda f: f[2] / f[0], default=None)
            values[graph, threads, layer, dtype] = least[2] / least[0] if least else None
            # A star marks cells in which compiled PyG, often the strongest, was not measured.
            tried = any(c["part"] == "compiled" for c in of)
            untried = untried or bool(least) and not tried
            star = "" if tried else "\\*"
            name = who(least[3], dtype).replace("compiled and captured", "compiled") if least else ""
            cells.append(f"{number(least[2] / least[0])}{star}, {name}" if least else DASH)
        rows.append([f"{graph}, {threads_text(threads)}" if threads else graph, *cells])
    if not rows:
        return ""
    means = [mean([values[(*key, *name)] for key in keys]) for name in names]
    rows.append([f"geometric mean of {len(keys)}", *means])
    heads = ["times as fast as", *(f"{NAMES[layer]} {SHORT[dtype]}" for layer, dtype in names)]
    remark = "\n\n\\* PyG was not compiled for this case." if untried else ""
    return table(heads, rows) + remark + note([c for c in cases if c["part"] == "attention"])


def memory(results: dict) -> str:
    """MB at the peak above inputs and results, dfgnn's and PyG's."""
    cases = cases_of(results, "attention", mode="train")
    layers = list(dict.fromkeys(c["layer"] for c in cases))
    rows = []
    for graph in dict.fromkeys(c["graph"] for c in cases):
        of = {c["layer"]: c for c in cases if c["graph"] == graph}
        one = next(iter(of.values()))
        for dtype in dtypes_of(one)[:1]:
            size = {"float32": 4}.get(dtype, 2)
            features = one["nodes"] * one["heads"] * one["head_dim"] * size / 1e6
            cells = [graph, SHORT[dtype], number(features), number(one["edges"] * one["heads"] * 4 / 1e6)]
            for layer in layers:
                found = times(of[layer], dtype) if layer in of else {}
                pair = [found.get((library, "eager"), {}) for library in ("dfgnn", "PyG")]
                cells.append(" / ".join(megabytes(c) for c in pair))
            rows.append(cells)
    heads = ["graph", "type", "N·F", "E·H in fp32", *(f"{NAMES[layer]}: dfgnn / PyG" for layer in layers)]
    return table(heads, rows, 2) if rows else ""


def megabytes(contestant: dict) -> str:
    if "extra_mb" in contestant:
        return number(contestant["extra_mb"])
    return why(contestant["failed"]) if "failed" in contestant else DASH


def accuracy(results: dict) -> str:
    """The largest relative error against float64 over all graphs and shapes, output / gradients."""
    cases = cases_of(results, "attention", "shapes", "inference")
    libraries = ("dfgnn", "PyG", "DGL", "turbo-gnn", "dgNN")
    worst: dict[tuple, dict[str, float]] = {}
    for case in cases:
        for c in case["contestants"]:
            for kind, value in c.get("error", {}).items():
                if kind != "rows":
                    mine = worst.setdefault((case["layer"], c["dtype"], c["library"]), {})
                    mine[kind] = max(mine.get(kind, 0.0), value)
    rows = []
    for layer, dtype in dict.fromkeys(key[:2] for key in worst):
        cells = []
        for library in libraries:
            found = worst.get((layer, dtype, library), {})
            cells.append(" / ".join(f"{found[k]:.1e}" for k in ("out", "gradients") if k in found) or DASH)
        rows.append([NAMES[layer], SHORT[dtype], *cells])
    return table(["function", "type", *libraries], rows, 2) if rows else ""


def break_even(results: dict) -> str:
    """Preprocessing, and after how many eager steps it has paid against the fastest eager alternative: of
    each graph the function for which that is latest."""
    latest: dict[str, tuple[float, list[str]]] = {}
    for case in cases_of(results, "attention", mode="train"):
        for dtype in dtypes_of(case)[:1]:
            mine = [c for c in case["contestants"] if c["dtype"] == dtype and c["way"] == "eager"]
            ours, others = best_of(filter(is_ours, mine)), best_of(filter(is_other, mine))
            spent = case["preprocessing_ms"]
            if "unavailable" in spent:
                continue
            total = sum(ms for ms in spent.values() if isinstance(ms, int | float))
            row = [case["graph"], NAMES[case["layer"]]]
            row += [number(spent[k]) for k in ("csr", "reverse_csr", "plan", "reverse_plan")]
            if not ours or not others:
                continue
            gain = others[0] - ours[0]
            steps = math.ceil(total / gain) if gain > 0 else math.inf
            row.append(f"{steps:,}, {others[1]['library']}" if gain > 0 else "never")
            latest[case["graph"]] = max(latest.get(case["graph"], (-1.0, row)), (steps, row), key=first)
    heads = ["graph", "function", "CSR", "reverse CSR", "plan", "reverse plan", "pays after steps"]
    rows = [row for _, row in sorted(latest.values(), key=first, reverse=True)]
    return table(heads, rows, 2) if rows else ""


TABLES: dict[str, Callable[[dict], str]] = {
    "setup": setup,
    "alternatives": alternatives,
    "bounds": bounds,
    "functions": extremes("dropout", "inference", "edges", "dense", heading="function"),
    "layers": extremes("layers", heading="layer"),
    "models": extremes("models", "sizes", "model-inference", "fresh", "molecules", "sampled"),
    "limits": lambda results: limits(results),
    "memory": memory,
    "accuracy": accuracy,
    "break-even": break_even,
}


# ---- sentences of README ---------------------------------------------------------------------------------


def headline(results: dict[str, dict]) -> str:
    """GAT's attention on the GPU compared with PyG's, compiled and not. dfgnn's times are those of the case
    in which it takes turns with compiled PyG; the other was the first of its process, whose eager calls are
    slow."""
    if "cuda" not in results:
        return missing("cuda")
    options = {"layer": "gat", "heads": 4, "head_dim": 32, "mode": "train"}
    cases = cases_of(results["cuda"], "attention", **options)
    compiled = [c for c in cases_of(results["cuda"], "compiled", **options) if times(c, "float32")]
    compiled = [c for c in compiled if cases and c["graph"] == cases[0]["graph"]]
    if not cases or not compiled:
        return missing("cuda")
    case, gpu = compiled[0], results["cuda"]["runs"][compiled[0]["run"]]["gpu"]
    found, plain = times(case, "float32"), times(cases[0], "float32")
    ours, replayed = (records.median(found.get(("dfgnn", way), {})) for way in ("eager", "captured"))
    theirs = records.median(plain.get(("PyG", "eager"), {}))
    best = best_of(filter(is_other, found.values()))
    if ours is None or replayed is None or theirs is None or best is None:
        return missing("cuda")
    way = {"compiled": "under `torch.compile`"}.get(best[1]["way"], "compiled and replayed")
    return (
        f"On an {gpu} a training step of GAT attention on {case['graph']} ({case['edges'] / 1e6:.1f} million "
        f"edges, {case['heads']} heads of {case['head_dim']} numbers, float32) takes {number(ours)} ms, "
        f"replayed from a CUDA graph {number(replayed)} ms. PyG's operations take {number(theirs)} ms, {way} "
        f"{number(best[0])} ms."
    )


def summary(results: dict[str, dict]) -> str:
    """A row per task of the README: the strongest alternative and the best of dfgnn."""
    wanted: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
        ("cpu", ("layers",), ("PubMed",)),
        ("cpu", ("models",), ("Cora",)),
        ("cuda", ("attention", "compiled"), ("ogbn-arxiv",)),
        ("cuda", ("models",), ("Cora", "arxiv")),  # where others' models were compiled, too
    ]
    rows = []
    for device, parts, graphs in wanted:
        cases = fullest(cases_of(results.get(device, {"cases": []}), *parts))
        cases = [case for case in cases if case["graph"].removesuffix("~") in graphs]
        threads = {case.get("threads") for case in cases}
        by_task: dict[tuple[str, str, str], list[Case]] = {}
        for case in cases:
            if case.get("threads") == max(threads, key=lambda count: count or 0):
                task = label(case), graph_label(case), case.get("library", "")
                by_task.setdefault(task, []).append(case)
        for (what, graph, library), of in by_task.items():
            found = [(c, f) for c in of if (f := comparison(c, "float32"))]
            if not found:
                continue
            # Ratios are taken within a case, whose contestants took turns; the smallest ratio is shown.
            case, least = min(found, key=lambda pair: pair[1][2] / pair[1][0])
            run = results[device]["runs"][case["run"]]
            where = run.get("gpu") or f"CPU, {threads_text(case['threads'])}"
            cells = [f"{number(ms)}, {c['library']} {c['way']}" for ms, c in (least[2:], least[:2])]
            rows.append([f"{library} {what}".strip(), graph, where, *cells, number(least[2] / least[0])])
    if not rows:
        return missing("cuda")
    heads = ["layer or model", "graph", "on", "strongest alternative, ms", "dfgnn, ms", "times as fast"]
    return table(heads, rows, 5)


def limits(results: dict) -> str:
    """For each layer the case whose step is furthest from its limits: what is left besides its matrix
    products, as a multiple of the plain sums; and the median over all cases."""
    found: dict[str, list[tuple[float, list[str]]]] = {}
    for case in cases_of(results, "layers"):
        ours = best_of(filter(is_ours, case["contestants"]))
        of = {c["way"]: records.median(c) for c in case.get("limits", [])}
        products, sums = of.get("matrix products"), of.get("plain sums")
        if ours and products and sums:
            share = (ours[0] - products) / sums
            threads = [threads_text(case["threads"])] if "threads" in case else []
            where = ", ".join([graph_name(case), shape_of(case), *threads])
            row = [where, *map(number, (ours[0], products, sums)), f"{share:.1f}"]
            found.setdefault(f"{case['library']} {case['layer']}", []).append((share, row))
    rows = []
    for name, of_layer in found.items():
        share, row = max(of_layer, key=first)
        middle = sorted(map(first, of_layer))[len(of_layer) // 2]
        rows.append((share, [name, *row, f"{middle:.1f} of {len(of_layer)}"]))
    rows.sort(key=first, reverse=True)
    heads = ["layer", "worst", "step", "matrix products", "plain sums", "(step − products) / sums", "median"]
    return table(heads, [row for _, row in rows], 2) if rows else ""


def of_program(program: str, file: str) -> Callable[[dict[str, dict]], str]:
    """The table of a file of its own, which a program of benchmarks writes."""
    path = Path(__file__).parents[1] / "results" / file
    return lambda results: importlib.import_module(program).table(path)


SENTENCES: dict[str, Callable[[dict[str, dict]], str]] = {
    "headline": headline,
    "summary": summary,
    "weather": of_program("weather_mesh", "h200-weather-mesh.json"),
    "blocks": of_program("block_attention", "h200-blocks.json"),
}


def main() -> None:
    from . import charts

    root = Path(__file__).parents[2]
    results = root / "benchmarks" / "results"
    for path in [*fill(root, results), *charts.draw(results, root / "docs" / "pictures")]:
        print(path)


if __name__ == "__main__":
    main()
