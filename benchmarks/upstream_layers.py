"""Every layer beside the layer of DGL or PyG that it replaces: a training step of the whole layer.

    python benchmarks/upstream_layers.py --library pyg --graphs ogbn-arxiv,ogbl-ddi --device cuda
    python benchmarks/upstream_layers.py --library dgl --graphs random-1000000 --json FILE

Both have the same parameters: ours is a copy of theirs after ``dfgnn.accelerate``. A step is forward and
backward with the gradients of the features (edge features too) and of all parameters, eager; ``--compile``
also runs theirs under torch.compile. Graphs: the names of ``dfgnn-bench``, or ``random-E`` with E edges and
E / 15 nodes. Printed beside the times: the largest difference of the outputs relative to the largest value,
and on CUDA the peak memory of a step. A step that fails is named with its error. SuperGATConv is in
evaluation mode: in training nearly all of its time is the sampling of negative edges, PyG's in both.
"""

import argparse
import copy
import gc
import os
from pathlib import Path

import torch

import dfgnn
from dfgnn.bench import graphs, measure, report

IN_FEATS, EDGE_FEATS, HEADS, HEAD_DIM, TYPES = 128, 16, 4, 32, 4


def pyg_layers(edge_index, n, num_edges, device):
    """{name: (make, arguments)}: a step calls make()(*arguments)."""
    from torch_geometric import nn

    x = torch.randn(n, IN_FEATS, device=device, requires_grad=True)
    edge_attr = torch.randn(num_edges, EDGE_FEATS, device=device, requires_grad=True)
    kind = torch.randint(TYPES, (num_edges,), device=device)
    shape = dict(in_channels=IN_FEATS, out_channels=HEAD_DIM, heads=HEADS)
    relations = [("node", f"type{t}", "node") for t in range(TYPES)]
    by_type = {r: edge_index[:, kind == t] for t, r in enumerate(relations)}
    plain, attributed = (x, edge_index), (x, edge_index, edge_attr)
    return {
        "GATConv": (lambda: nn.GATConv(**shape), plain),
        "GATConv edge_dim": (lambda: nn.GATConv(**shape, edge_dim=EDGE_FEATS), attributed),
        "GATv2Conv": (lambda: nn.GATv2Conv(**shape), plain),
        "GATv2Conv edge_dim": (lambda: nn.GATv2Conv(**shape, edge_dim=EDGE_FEATS), attributed),
        "TransformerConv": (lambda: nn.TransformerConv(**shape), plain),
        "TransformerConv edge_dim": (lambda: nn.TransformerConv(**shape, edge_dim=EDGE_FEATS), attributed),
        "SuperGATConv MX": (lambda: nn.SuperGATConv(**shape, attention_type="MX").eval(), plain),
        "SuperGATConv SD": (lambda: nn.SuperGATConv(**shape, attention_type="SD").eval(), plain),
        "AGNNConv": (lambda: nn.AGNNConv(), plain),
        "RGATConv": (lambda: nn.RGATConv(**shape, num_relations=TYPES), (x, edge_index, kind)),
        "HGTConv": (
            lambda: nn.HGTConv(IN_FEATS, HEADS * HEAD_DIM, (["node"], relations), heads=HEADS),
            ({"node": x}, by_type),
        ),
    }


def dgl_layers(edge_index, n, num_edges, device):
    os.environ.setdefault("DGLBACKEND", "pytorch")
    import dgl
    from dgl import nn

    graph = dgl.graph(tuple(edge_index), num_nodes=n)
    x = torch.randn(n, IN_FEATS, device=device, requires_grad=True)
    edge_attr = torch.randn(num_edges, EDGE_FEATS, device=device, requires_grad=True)
    kinds = torch.zeros(n, dtype=torch.long, device=device), torch.randint(TYPES, (num_edges,), device=device)
    shape, loose = (IN_FEATS, HEAD_DIM, HEADS), dict(allow_zero_in_degree=True)
    plain, attributed = (graph, x), (graph, x, edge_attr)
    return {
        "GATConv": (lambda: nn.GATConv(*shape, **loose), plain),
        "GATv2Conv": (lambda: nn.GATv2Conv(*shape, **loose), plain),
        "DotGatConv": (lambda: nn.DotGatConv(*shape, **loose), plain),
        "AGNNConv": (lambda: nn.AGNNConv(**loose), plain),
        "EGATConv": (lambda: nn.EGATConv(IN_FEATS, EDGE_FEATS, HEAD_DIM, EDGE_FEATS, HEADS), attributed),
        "EdgeGATConv": (
            lambda: nn.EdgeGATConv(IN_FEATS, EDGE_FEATS, HEAD_DIM, HEADS, **loose),
            attributed,
        ),
        "HGTConv": (lambda: nn.HGTConv(IN_FEATS, HEAD_DIM, HEADS, 1, TYPES, dropout=0.0), (graph, x, *kinds)),
    }


def tensors(value):
    """The floating-point tensors in the nested results or arguments of a layer, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = value.values()
    return (
        [t for v in value for t in tensors(v)] if isinstance(value, (tuple, list, type({}.values()))) else []
    )


def step_of(layer, arguments):
    """A training step; it returns the outputs."""
    leaves = [t for t in tensors(arguments) if t.requires_grad] + list(layer.parameters())
    grads = []

    def step():
        out = tensors(layer(*arguments))
        if not grads:
            grads.extend(torch.randn_like(t) for t in out)
        torch.autograd.grad(out, leaves, grads, allow_unused=True)
        return [t.detach() for t in out]

    return step


def measure_step(layer, arguments, device, budget):
    step = step_of(layer, arguments)
    out = step()
    result = {"training": measure.eager(step, device, budget)._asdict()}
    if device.type == "cuda":
        result["peak_mb"] = round(measure.peak_extra(step, 0) / 1e6, 1)
    return out, result


def attempt(function):
    """(what it returns, None) or (None, why not)."""
    try:
        return function(), None
    except Exception as error:  # whatever upstream raises belongs in the table
        return None, measure.reason(error)


def compare(make, arguments, device, args) -> dict:
    torch.manual_seed(0)
    theirs = make().to(device)
    ours = copy.deepcopy(theirs)
    changed = dfgnn.accelerate(ours)
    assert changed.replaced, f"not replaced: {changed}"
    row = {}
    out, row["dfgnn"] = measure_step(ours, arguments, device, args.budget)
    contestants = {"upstream": theirs}
    if args.compile:
        torch.compiler.reset()
        contestants["upstream compiled"] = torch.compile(copy.deepcopy(theirs))
    for name, layer in contestants.items():
        found, error = attempt(lambda layer=layer: measure_step(layer, arguments, device, args.budget))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if error:
            row[name] = {"failed": error}
            continue
        expected, row[name] = found
        row[name]["speedup"] = row[name]["training"]["median"] / row["dfgnn"]["training"]["median"]
        difference = [
            (a - b).abs().max() / b.abs().max().clamp(min=1e-30) for a, b in zip(out, expected) if b.numel()
        ]
        row[name]["difference"] = max(float(d) for d in difference)
    return row


def load(name, device):
    if name.startswith("random-"):
        num_edges = int(name.removeprefix("random-"))
        generator = torch.Generator().manual_seed(0)
        n = num_edges // 15
        return torch.randint(n, (2, num_edges), generator=generator).to(device), n
    graph = graphs.load(name, device)
    return graph.edge_index, graph.num_src


def text(name, row) -> str:
    line = f"  {name:26}{row['dfgnn']['training']['median']:10.3f} ms"
    if "peak_mb" in row["dfgnn"]:
        line += f" {row['dfgnn']['peak_mb']:9.0f} MB"
    for other, r in row.items():
        if other == "dfgnn":
            continue
        if "failed" in r:
            line += f"   {other}: {r['failed'][:60]}"
            continue
        memory = f", {r['peak_mb']:.0f} MB" if "peak_mb" in r else ""
        line += f"   {other} {r['training']['median']:.3f} ms{memory}: {r['speedup']:.2f} x"
        line += f", differs {r['difference']:.0e}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", dest="upstream", choices=("pyg", "dgl"), required=True)
    parser.add_argument("--graphs", default="random-1500000", help="comma-separated")
    parser.add_argument("--layers", help="comma-separated names; default: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per measurement")
    parser.add_argument("--compile", action="store_true", help="also run upstream under torch.compile")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--commit", help="recorded; default: that of the working tree")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    environment = report.environment(device, args.commit)
    print(report.environment_line(environment))
    results = {"environment": environment, "threads": args.threads, "library": args.upstream, "graphs": []}
    for name in args.graphs.split(","):
        edge_index, n = load(name, device)
        num_edges = edge_index.shape[1]
        print(f"{name}: {n} nodes, {num_edges} edges; training step, {args.upstream} as upstream", flush=True)
        make_layers = {"pyg": pyg_layers, "dgl": dgl_layers}[args.upstream]
        rows = {}
        results["graphs"].append({"graph": name, "nodes": n, "edges": num_edges, "layers": rows})
        for layer, (make, arguments) in make_layers(edge_index, n, num_edges, device).items():
            if args.layers and layer not in args.layers.split(","):
                continue
            rows[layer] = compare(make, arguments, device, args)
            print(text(layer, rows[layer]), flush=True)
            report.write_json(args.json, results)


if __name__ == "__main__":
    main()
