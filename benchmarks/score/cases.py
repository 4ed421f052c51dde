"""What README.md and docs/performance.md show: cases of a device, the most important first, so that a run
that ends early has measured that.

    PYTHONPATH=benchmarks python -m dfgnn.bench --cases score.cases --device cuda --minutes 25 \\
        --json benchmarks/results/cuda.json
    PYTHONPATH=benchmarks python -m score.pages        # fills the tables and draws the pictures of that

(``make scoreboard ARGS="--device cpu --threads 2"`` does both.) Needs torch_geometric; DGL, turbo-gnn and
dgNN are measured where they are installed, and pictures need matplotlib. Real graphs are those of DFGNN_DATA;
for others random ones of the same size are taken, named with a ~.
"""

import itertools
from typing import Any

from dfgnn.bench.attention import compare_attention

from . import batches, data, dense, models

Case = dict[str, Any]
load = data.load

MEASURES = {
    "attention": compare_attention,
    "compiled": compare_attention,
    "shapes": compare_attention,
    "inference": compare_attention,
    "dropout": compare_attention,
    "models": models.measure,
    "model-inference": models.measure,
    "fresh": lambda case, bench: (models.measure if "layers" in case else models.measure_layer)(case, bench),
    "sizes": models.measure,
    "layers": models.measure_layer,
    "edges": batches.measure_edges,
    "dense": dense.measure_dense,
    "molecules": batches.measure_molecules,
    "sampled": batches.measure_sampled,
}
PARTS = tuple(MEASURES)
LAYERS, CONVS = ("gat", "gatv2", "dot"), ("GATConv", "GATv2Conv", "TransformerConv")
BOTH = ["float32", "bfloat16"]
# The graphs on which a GPU is measured, and over which means are taken.
SMALL = ("ogbn-arxiv", "molhiv", "pattern~", "collab~", "ogbl-ddi", "debian-deps", "reddit-binary")
LARGE = ("reddit~", "proteins~", "products~")
# graph: (layers, heads, columns of a head)
MODELS = {
    "Cora": (2, 8, 8),
    "64 molecules": (4, 4, 32),
    "ogbn-arxiv": (3, 4, 32),
    "PubMed": (2, 8, 8),
    "minesweeper": (15, 1, 64),
    "1024 molecules": (4, 4, 32),
    "CiteSeer": (2, 1, 64),
}
SIZES = ("random-10000-100000", "random-50000-500000", "random-200000-2000000")
PYG_LAYERS = (
    *CONVS, "GATConv edge_dim", "GATv2Conv edge_dim", "TransformerConv edge_dim", "AGNNConv",
    "SuperGATConv MX", "RGATConv", "HGTConv",
)  # fmt: skip
DGL_LAYERS = ("GATConv", "GATv2Conv", "DotGatConv", "AGNNConv", "EGATConv", "EdgeGATConv", "HGTConv")


def functions(
    part: str, graphs, shape=(4, 32), layers=LAYERS, mode="train", dtypes=BOTH, **more
) -> list[Case]:
    """Cases of attention functions."""
    heads, dim = shape
    more = {"peers": [], **more}
    return [
        {"part": part, "graph": graph, "layer": layer, "heads": heads, "head_dim": dim, "mode": mode,
         "dtypes": list(dtypes), **more}
        for graph, layer in itertools.product(graphs, layers)
    ]  # fmt: skip


def whole(part: str, graph: str, convs, ways, dtypes=("float32",), **more) -> list[Case]:
    """Cases of whole models."""
    layers, heads, dim = MODELS.get(graph, (3, 4, 32))
    more = {"mode": "train", **more}
    return [
        {"part": part, "graph": graph, "layer": conv, "layers": layers, "heads": heads, "head_dim": dim,
         "dtypes": list(dtypes), "ways": list(ways), **more}
        for conv in convs
    ]  # fmt: skip


def inference(graph: str, ways) -> list[Case]:
    return whole("model-inference", graph, CONVS, ways, mode="forward")


def single(graph: str, shape, columns: int, library: str, layers, ways, part="layers", **more) -> list[Case]:
    """Cases of single layers."""
    heads, dim = shape
    return [
        {"part": part, "graph": graph, "layer": layer, "library": library, "heads": heads, "head_dim": dim,
         "in": columns, "mode": "train", "ways": list(ways), **more}
        for layer in layers
    ]  # fmt: skip


def mesh(shape: str, refinement: int, grid: int, dtypes, heads=(16, 64)) -> list[Case]:
    return [
        {"part": "edges", "graph": shape, "layer": "dot", "heads": heads[0], "head_dim": heads[1],
         "mode": "train", "refinement": refinement, "grid": grid, "dtypes": list(dtypes)}
    ]  # fmt: skip


def dense(graph: str, dtypes) -> list[Case]:
    return [
        {"part": "dense", "graph": graph, "layer": "dot", "heads": 4, "head_dim": 32, "mode": "train",
         "dtypes": list(dtypes)}
    ]  # fmt: skip


def molecules(batch: int, ways, graph="ogbg-molhiv") -> list[Case]:
    return [
        {"part": "molecules", "graph": graph, "layer": "GATConv", "layers": 4, "heads": 4, "head_dim": 32,
         "mode": "train", "batch": batch, "ways": list(ways)}
    ]  # fmt: skip


def sampled(graph: str, ways) -> list[Case]:
    return [
        {"part": "sampled", "graph": graph, "layer": "GATConv", "layers": 3, "heads": 4, "head_dim": 32,
         "mode": "train", "ways": list(ways)}
    ]  # fmt: skip


def cuda() -> list[Case]:
    first, others = SMALL[:1], (*SMALL[1:], *LARGE)
    peers = ["PyG", "DGL", "turbo-gnn", "dgNN"]
    eager, ways = ["eager"], ["eager", "captured"]
    compilers = ["eager", "compiled", "reduce-overhead", "captured"]
    return [
        *functions("attention", first, peers=peers),
        *functions("compiled", first, compiled=True),
        *(case for graph in list(MODELS)[:2] for case in whole("models", graph, CONVS, ways)),
        *whole("models", "ogbn-arxiv", CONVS, compilers),
        *functions("attention", others, peers=peers),
        *whole("fresh", "Cora", CONVS, eager, fresh=True),
        *functions("dropout", first, dropout=0.5, peers=["PyG"]),
        *sampled("ogbn-arxiv", ways),
        *molecules(32, ways),
        *mesh("processor", 6, 542_080, ["float16"]),
        *functions("inference", first, mode="forward", peers=["PyG"]),
        *(case for graph in ("Cora", "ogbn-arxiv") for case in inference(graph, ways)),
        *dense("cliques-256", BOTH),
        *whole("models", "Cora", CONVS[:1], compilers),
        *whole("models", "64 molecules", CONVS[:1], compilers),
        *functions("shapes", (*first, "reddit~"), (8, 64)),
        *functions("shapes", first, (1, 256), peers=["PyG"]),
        *functions("shapes", first, (4, 32), dtypes=["float16"], peers=["PyG"]),
        *functions("shapes", first, (8, 8), peers=["PyG"]),
        *(case for graph in list(MODELS)[3:] for case in whole("models", graph, ["GATConv"], ways)),
        *whole("models", "Cora", CONVS[1:], compilers),
        *whole("models", "64 molecules", CONVS[1:], compilers),
        *(case for graph in SIZES for case in whole("sizes", graph, CONVS, ways)),
        *whole("models", "ogbn-arxiv", CONVS, ["eager"], dtypes=["bfloat16"]),
        *whole("models", "Cora", CONVS, ways, dtypes=["bfloat16"]),
        *whole("models", "64 molecules", CONVS, ways, dtypes=["bfloat16"]),
        *functions("compiled", first, dtypes=["bfloat16"], compiled=True),
        *molecules(512, ways),
        *mesh("encoder", 6, 542_080, ["float16"]),
        *mesh("decoder", 6, 542_080, ["float16"]),
        *functions("dropout", ("pattern~", "reddit~"), dropout=0.5, peers=["PyG"]),
        *functions("compiled", others, compiled=True),
        *functions("shapes", (*SMALL[1:], "proteins~", "products~"), (8, 64)),
        *functions("shapes", others, (8, 8)),
        *functions("inference", others, mode="forward"),
        *single("random-20000-300000", (4, 32), 128, "PyG", CONVS, compilers[:3]),
        *single("random-20000-300000", (4, 32), 128, "PyG", PYG_LAYERS[3:], ["eager"]),
    ]


def cpu() -> list[Case]:
    graph, peers = "random-100000-1500000", ["PyG", "DGL"]
    eager, both = ["eager"], ["eager", "compiled"]
    small = (("Cora", (8, 8), 64), ("PubMed", (8, 8), 64), ("64 molecules", (4, 32), 128))
    more = (
        ("Cora", (8, 8), 1_433), ("Cora", (1, 7), 64), ("512 molecules", (4, 32), 128),
        ("minesweeper", (1, 64), 64),
    )  # fmt: skip
    fresh = ("random-50-200", "random-2000-5000", "random-8000-12672", "random-20000-100000")
    names = {"PyG": CONVS, "DGL": ("GATConv", "GATv2Conv", "DotGatConv")}

    def both_libraries(shapes, ways) -> list[Case]:
        return [
            case
            for (name, shape, columns), (library, layers) in itertools.product(shapes, names.items())
            for case in single(name, shape, columns, library, layers, ways)
        ]

    return [
        *both_libraries(small, eager),
        *(
            case
            for name in fresh
            for case in single(name, (4, 8), 32, "PyG", CONVS, eager, part="fresh", fresh=True)
        ),
        *molecules(32, eager),
        *molecules(256, eager),
        *whole("models", "Cora", CONVS, both),
        *whole("models", "64 molecules", CONVS, both),
        *both_libraries(more, eager),
        *functions("attention", [graph], peers=peers, dtypes=["float32"]),
        *functions("compiled", [graph], dtypes=["float32"], compiled=True),
        *functions("attention", ["debian-deps"], peers=peers, dtypes=["float32"]),
        *functions("dropout", ["random-20000-300000"], dropout=0.5, peers=peers, dtypes=["float32"]),
        *functions("inference", ["random-20000-300000"], mode="forward", peers=peers, dtypes=["float32"]),
        *inference("Cora", eager),
        *functions("shapes", ["random-20000-300000"], dtypes=["bfloat16"], peers=["PyG"]),
        *functions("shapes", ["random-20000-300000"], (1, 256), dtypes=["float32"], peers=["PyG"]),
        *dense("cliques-128", ["float32"]),
        *mesh("processor", 4, 20_000, ["float32"], (4, 32)),
        *mesh("decoder", 4, 20_000, ["float32"], (4, 32)),
        *sampled("ogbn-arxiv", eager),
        *single("random-20000-300000", (4, 32), 128, "PyG", PYG_LAYERS[:-2], both),
        *single("random-2000-30000", (4, 32), 128, "PyG", PYG_LAYERS[-2:], eager),
        *single("random-20000-300000", (4, 32), 128, "DGL", DGL_LAYERS, eager),
        *(case for name in SIZES[:2] for case in whole("sizes", name, CONVS, eager)),
        *functions("attention", ["ogbn-arxiv"], peers=peers, dtypes=["float32"]),
    ]


def quick(device: str) -> list[Case]:
    """Every part on graphs of a few nodes: to see that it works."""
    ways = ["eager", "captured"] if device == "cuda" else ["eager"]
    graph, peers = "random-300-2000", ["PyG", "DGL"]
    return [
        *functions("attention", ["Cora~", graph], peers=peers),
        *whole("models", "Cora~", CONVS[:1], ways),
        *inference("Cora~", ways)[:1],
        *whole("fresh", graph, CONVS[1:2], ["eager"], fresh=True),
        *functions("dropout", [graph], dropout=0.5, peers=peers),
        *functions("inference", [graph], mode="forward", peers=peers),
        *functions("shapes", [graph], (8, 64), layers=["gat"]),
        *whole("sizes", graph, CONVS[2:], ways),
        *single(graph, (4, 8), 32, "PyG", PYG_LAYERS, ["eager"]),
        *single(graph, (4, 8), 32, "DGL", DGL_LAYERS[:3], ["eager"]),
        *mesh("decoder", 1, 60, ["float32"], (2, 8)),
        *dense("cliques-4", ["float32"]),
        *molecules(4, ways, "molecules~"),
        *sampled("Cora~", ways),
    ]


def cases(device: str, is_quick: bool, compiles: bool = True) -> tuple[list[Case], list[str]]:
    """Cases in their order, and what was replaced by a twin, or left out, for want of the data."""
    listed = quick(device) if is_quick else {"cuda": cuda, "cpu": cpu}[device]()
    found, notes = [], {}
    for case in listed:
        if not compiles:
            if case.get("compiled"):
                continue
            if "ways" in case:
                case = {**case, "ways": [w for w in case["ways"] if w in ("eager", "captured")]}
        name = _available(case)
        if name is None:
            notes[case["graph"]] = f"{case['graph']}: no copy of the data in DFGNN_DATA, left out"
            continue
        if name != case["graph"]:
            notes[case["graph"]] = (
                f"{case['graph']}: no copy of the data in DFGNN_DATA, its twin {name} instead"
            )
        found.append({**case, "graph": name})
    return found, list(notes.values())


def _available(case: Case) -> str | None:
    name = case["graph"]
    if case["part"] == "edges":
        return name
    if case["part"] == "molecules":
        return name if name.endswith("~") or data.chosen("64 molecules") == "64 molecules" else f"{name}~"
    return data.chosen(name)
