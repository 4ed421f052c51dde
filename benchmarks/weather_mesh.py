"""Measures attention with raw edge features on a weather model's graphs: folded, unfolded, without edges.

    python benchmarks/weather_mesh.py --device cuda --dtypes float16,float32 --json FILE
    python benchmarks/weather_mesh.py --refinement 4 --grid 20000 --dtypes float32

The shapes are those of Anemoi (ECMWF): the *processor* is the icosahedral mesh of refinement 6 with the edges
of all refinements, 40,962 nodes and 327,660 edges; the *encoder* leads from 542,080 grid points to the mesh,
each to its two nearest nodes; the *decoder* back, each point from its three nearest nodes. 16 heads of 64
(or ``--heads``, ``--head-dim``), 11 raw features per edge, fp16. Grid points lie on a Fibonacci lattice;
edges are sorted by destination.

A training step gives the gradients of query, key, value and the projection, and of the raw features in the
rows "+ grad" (Anemoi learns some of them). ``--peer FILE`` is a module with a function
``graph_transformer_attention_conv(query, key, value, edges, (row, colptr), (rowptr, edge_ids, edge_dst))``,
such as Anemoi's ``models/src/anemoi/models/triton/gt.py``; it gets projected features, and where it has a
``graph_transformer_attention_fused_conv``, that gets raw ones and the projection. ``--layers`` measures
PyG's TransformerConv after ``dfgnn.accelerate``, with and without ``edge_dim``.
"""

import argparse
import importlib.util
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from score import json_files

import dfgnn
from dfgnn import Graph, functional
from dfgnn.bench import measure, report
from dfgnn.functional import EdgeTerm, Projected

FEATURES = 11
# The variants that ``contestants`` returns without a peer.
WAYS = ("without edges", "folded", "folded + grad", "unfolded", "PyG")


def icosphere(refinement: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors [N, 3], and the edges [2, E] of all refinements up to this one, in both directions."""
    golden = (1 + 5**0.5) / 2
    points = [p for a in (-1, 1) for b in (-golden, golden) for p in ((0.0, a, b), (a, b, 0.0), (b, 0.0, a))]
    xyz = np.array(points) / np.linalg.norm(points[0])
    close = np.linalg.norm(xyz[:, None] - xyz[None], axis=-1) < 1.1
    faces = np.array(
        [
            (a, b, c)
            for a in range(12)
            for b in range(a + 1, 12)
            for c in range(b + 1, 12)
            if close[a, b] and close[b, c] and close[a, c]
        ]
    )
    edges = []
    for level in range(refinement + 1):
        sides = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]])
        unique, inverse = np.unique(np.sort(sides, axis=1), axis=0, return_inverse=True)
        edges += [unique, unique[:, ::-1]]
        if level == refinement:
            break
        middle = xyz[unique].sum(1)
        new = len(xyz) + inverse.reshape(3, -1)
        xyz = np.concatenate([xyz, middle / np.linalg.norm(middle, axis=1, keepdims=True)])
        a, b, c = faces.T
        ab, bc, ca = new
        faces = np.concatenate(
            [np.stack(f, 1) for f in ((a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca))]
        )
    return xyz, np.concatenate(edges).T


def lattice(n: int) -> np.ndarray:
    """n points [n, 3] of a Fibonacci lattice on the sphere, from pole to pole."""
    k = np.arange(n) + 0.5
    z, longitude = 1 - 2 * k / n, np.pi * (1 + 5**0.5) * k
    r = np.sqrt(1 - z * z)
    return np.stack([r * np.cos(longitude), r * np.sin(longitude), z], 1)


def nearest(points: torch.Tensor, mesh: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` nearest nodes of the mesh to each point, [n, count]."""
    step = max(1, 2**27 // len(mesh))
    return torch.cat([(x @ mesh.T).topk(count).indices for x in points.split(step)])


def shapes(refinement: int, grid: int, device: torch.device) -> dict[str, tuple[torch.Tensor, int, int]]:
    """{name: (edge_index sorted by destination, sources, destinations)}"""
    xyz, edges = icosphere(refinement)
    mesh = torch.tensor(xyz, dtype=torch.float32, device=device)
    points = torch.tensor(lattice(grid), dtype=torch.float32, device=device)
    near, n = nearest(points, mesh, 3), len(mesh)
    point = torch.arange(grid, device=device)

    def by_destination(src, dst):
        order = (dst * max(n, grid) + src).argsort()
        return torch.stack([src[order], dst[order]])

    processor = torch.tensor(edges.copy(), device=device)
    return {
        "processor": (by_destination(*processor), n, n),
        "encoder": (by_destination(point.repeat_interleave(2), near[:, :2].flatten()), grid, n),
        "decoder": (by_destination(near.flatten(), point.repeat_interleave(3)), n, grid),
    }


def load_peer(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contestants(edge_index, num_src, num_dst, heads, head_dim, dtype, peers=None) -> dict:
    """{name: (call, leaves)}; leaves: the tensors to differentiate besides the shared query, key and
    value."""
    device, num_edges = edge_index.device, edge_index.shape[1]
    graph = Graph.from_edge_index(edge_index, num_src=num_src, num_dst=num_dst)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(n, heads, head_dim, device=device, dtype=dtype).requires_grad_()
        for n in (num_dst, num_src, num_src)
    )
    attr = torch.randn(num_edges, FEATURES, device=device, dtype=dtype)
    learned = attr.clone().requires_grad_()
    proj = torch.randn(heads * head_dim, FEATURES, device=device, dtype=dtype) / FEATURES**0.5
    proj.requires_grad_()

    def projected(x):
        return F.linear(x, proj).view(num_edges, heads, head_dim)

    def both(term):
        return EdgeTerm(term, term)

    attend = functional.dot_attention
    calls = {
        "without edges": (lambda: attend(graph, query, key, value), ()),
        "folded": (lambda: attend(graph, query, key, value, edge=both(Projected(attr, proj))), (proj,)),
        "folded + grad": (
            lambda: attend(graph, query, key, value, edge=both(Projected(learned, proj))),
            (proj, learned),
        ),
        "unfolded": (lambda: attend(graph, query, key, value, edge=both(projected(attr))), (proj,)),
    }
    src, dst = edge_index
    calls["PyG"] = (lambda: by_pyg(query, key, value, projected(attr), src, dst), (proj,))
    if peers:
        counts = [torch.bincount(x, minlength=n) for x, n in ((dst, num_dst), (src, num_src))]
        colptr, rowptr = (F.pad(c.cumsum(0), (1, 0)) for c in counts)
        ends = (src, colptr), (rowptr, src.argsort(stable=True), dst)
    for name, module in (peers or {}).items():
        plain = module.graph_transformer_attention_conv
        calls[name] = (lambda f=plain: f(query, key, value, projected(attr), *ends), (proj,))
        calls[f"{name} + grad"] = (
            lambda f=plain: f(query, key, value, projected(learned), *ends),
            (proj, learned),
        )
        fused = getattr(module, "graph_transformer_attention_fused_conv", None)
        if fused is not None:
            calls[f"{name}, fused"] = (
                lambda f=fused: f(query, key, value, attr, proj.t().contiguous(), None, *ends),
                (proj,),
            )
    if peers:
        right = calls["unfolded"][0]().detach()
        for name in calls.keys() - {"without edges"}:
            error = float((calls[name][0]().detach() - right).abs().max() / right.abs().max())
            assert error < 0.02, (name, error)
    return {name: (call, (query, key, value, *leaves)) for name, (call, leaves) in calls.items()}


def by_pyg(query, key, value, edges, src, dst):
    """The operations of PyG's TransformerConv with edge_dim."""
    from torch_geometric.utils import scatter, softmax

    n = len(query)
    score = (query[dst] * (key[src] + edges)).sum(-1) / query.shape[-1] ** 0.5
    messages = softmax(score, dst, num_nodes=n).unsqueeze(-1) * (value[src] + edges)
    return scatter(messages, dst, dim=0, dim_size=n, reduce="sum")


def layers(edge_index, num_src, num_dst, heads, head_dim, dtype) -> dict:
    from torch_geometric.nn import TransformerConv

    device, feats = edge_index.device, heads * head_dim
    torch.manual_seed(0)
    ends = [torch.randn(n, feats, device=device, dtype=dtype) for n in (num_src, num_dst)]
    x = tuple(ends) if num_src != num_dst else ends[0]
    attr = torch.randn(edge_index.shape[1], FEATURES, device=device, dtype=dtype)
    found = {}
    for name, edge_dim in (("layer without edges", None), ("layer", FEATURES)):
        layer = TransformerConv(feats, head_dim, heads, edge_dim=edge_dim).to(device, dtype)
        assert dfgnn.accelerate(layer).replaced or type(layer).__module__.startswith("dfgnn")
        args = (x, edge_index) if edge_dim is None else (x, edge_index, attr)
        found[name] = (lambda layer=layer, args=args: layer(*args), tuple(layer.parameters()))
    return found


def measured(call, leaves, device, budget) -> dict:
    out = call()
    grad = torch.randn_like(out)
    del out

    def forward():
        with torch.no_grad():
            call()

    def step():
        torch.autograd.grad(call(), leaves, grad)

    return {
        "forward": measure.eager(forward, device, budget)._asdict(),
        "training": measure.eager(step, device, budget)._asdict(),
        "peak_mb": round(measure.peak_extra(step, 0, device) / 1e6, 1),
    }


TABLE = {
    "raw features": ("folded", "gt_fused, fused", "gt_main"),
    "raw features, learned": ("folded + grad", "gt_main + grad"),
    "given features": ("unfolded", "gt_main"),
}


def table(path: Path) -> str:
    """The table of docs/performance.md, least gain first, compared with the fastest way of the peer."""
    found, results = [], json.loads(path.read_text())
    for row in results["rows"]:
        times = row["times"]
        ms = {name: x["training"]["median"] for name, x in times.items() if "training" in x}
        for what, (ours, *peers) in TABLE.items():
            peer = min((name for name in peers if name in ms), key=ms.__getitem__)
            cells = (
                f"{what}, {row['shape']}, {row['dtype']}", f"{ms[peer] / ms[ours]:.2f}", f"{ms[ours]:.2f}",
                f"{ms[peer]:.2f}{' (projects itself)' if 'fused' in peer else ''}",
                f"{ms['PyG']:.1f}", f"{ms[ours] / ms['without edges']:.2f}",
                f"{times[ours]['peak_mb']:,.0f}", f"{times[peer]['peak_mb']:,.0f}",
            )  # fmt: skip
            found.append((ms[peer] / ms[ours], "| " + " | ".join(cells) + " |"))
    head = (
        "| edges | times as fast | dfgnn, ms | Anemoi's, ms | PyG's, ms | ÷ without edges "
        "| dfgnn, MB | Anemoi's, MB |"
    )
    environment = report.environment_line(results["environment"])
    return "\n".join([f"{environment}\n", head, "|---|" + "--:|" * 7, *(line for _, line in sorted(found))])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--refinement", type=int, default=6)
    parser.add_argument("--grid", type=int, default=542080, help="points of the grid")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--shapes", default="processor,encoder,decoder")
    parser.add_argument("--dtypes", default="float16")
    parser.add_argument("--peer", type=Path, action="append", default=[], help="a module to compare with")
    parser.add_argument("--layers", action="store_true", help="also TransformerConv")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds per measurement")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--commit", help="recorded; default: that of the working tree")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of such a file instead")
    args = parser.parse_args(argv)
    if args.table is not None:
        print(table(args.table))
        return
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    environment = report.environment(device, args.commit)
    print(report.environment_line(environment))
    peers = {path.stem: load_peer(path) for path in args.peer}
    rows = []
    for name, (edge_index, num_src, num_dst) in shapes(args.refinement, args.grid, device).items():
        if name not in args.shapes.split(","):
            continue
        for dtype in args.dtypes.split(","):
            kind = getattr(torch, dtype)
            row = dict(
                shape=name, sources=num_src, destinations=num_dst, edges=edge_index.shape[1], dtype=dtype
            )
            print(f"{name}, {num_src} -> {num_dst}, {row['edges']} edges, {dtype}")
            calls = contestants(edge_index, num_src, num_dst, args.heads, args.head_dim, kind, peers)
            if args.layers:
                calls |= layers(edge_index, num_src, num_dst, args.heads, args.head_dim, kind)
            row["times"] = {}
            for what, (call, leaves) in calls.items():
                try:
                    found = measured(call, leaves, device, args.budget)
                except (RuntimeError, ValueError) as error:
                    row["times"][what] = {"failed": measure.reason(error)}
                    print(f"  {what:20} {measure.reason(error)[:90]}")
                    continue
                row["times"][what] = found
                forward, training = (found[k]["median"] for k in ("forward", "training"))
                print(f"  {what:20} {forward:9.3f} {training:9.3f} ms {found['peak_mb']:9.0f} MB", flush=True)
            rows.append(row)
    if args.json:
        sizes = {"heads": args.heads, "head_dim": args.head_dim, "features": FEATURES}
        json_files.write_json(args.json, {"environment": environment} | sizes | {"rows": rows})


if __name__ == "__main__":
    main()
