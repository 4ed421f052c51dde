"""Counts the rows exchanged when a graph is divided, and evaluates the cost model of docs/scaling.md.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json
    python benchmarks/scaling.py --graphs ogbn-arxiv --parts 2 4 --methods random

Divides real graphs into 2 to 64 parts on the CPU, at random, into contiguous ranges, and by METIS, and
counts for each part what `DistributedGraph` would hold and fetch: nodes, edges, and halo rows, sources that
its edges need and others own. The halo of a random partition is compared with its expectation,

    sum of all parts' halo rows = sum_j (P - 1) (1 - (1 - 1 / P)^d_j),    d_j: out-degree, without loops

because each of the P - 1 parts that do not own j misses it only if none of its d_j edges ends there. Then
the model: a layer of forward and backward takes, of the slowest part,

    compute = edges x passes x bytes of a row / gather rate + nodes x passes x bytes of a row / memory rate
    travel  = 2 x (largest of rows sent and rows received) x bytes of a row / bandwidth + 2 (P - 1) latency
    step    = compute - compute of own edges + max(compute of own edges, travel)

which prints as the speedup of each number of parts.
"""

import argparse
import time
from pathlib import Path

import torch
from score import json_files

from dfgnn.bench import graphs, report
from dfgnn.distributed import parts

# Link -> (GB/s per GPU and direction, seconds per message).
LINKS = {"nvlink": (300.0, 5e-6), "infiniband": (45.0, 10e-6)}
# Bytes per second of an H100, from benchmarks/results/h100-distributed-2.json (products~, GAT 4 x 32, fp32):
# the attention's two passes over 126.2M edges of 512 bytes take 55 ms, and a layer's operations on nodes 12
# ms, which are 25 passes over them. A part also merges (5 passes over its nodes), packs and adds (5 passes
# over the rows that it fetches).
GATHER, POINTWISE = 2.4e12, 2.6e12
WIDTH, BYTES, PASSES, NODE_PASSES, MERGE_PASSES, PACK_PASSES = 128, 4, 2, 25, 5, 5


def divide(name, edge_index, num_nodes, method, count):
    """Nodes, edges and halo rows of each part."""
    begun = time.perf_counter()
    if method == "random":
        owner = torch.randint(count, (num_nodes,), generator=torch.Generator().manual_seed(count))
    else:
        owner, _ = parts.owners("scaling", method, edge_index, num_nodes, num_nodes, True, count)
    seconds = time.perf_counter() - begun
    src, dst = edge_index
    to, of = owner[dst], owner[src]
    between = to != of
    # Each pair (source, part that needs it) once, as source * count + part.
    pairs = (src[between] * count + to[between]).unique()
    received = torch.bincount(pairs % count, minlength=count)
    sent = torch.bincount(owner[pairs // count], minlength=count)
    edges = torch.bincount(to, minlength=count)
    own = torch.bincount(to[~between], minlength=count)
    return {
        "graph": name, "method": method, "parts": count, "seconds": seconds,
        "edges_between": float(between.double().mean()),
        "nodes_most": int(torch.bincount(owner, minlength=count).max()),
        "edges_most": int(edges.max()), "own_edges_least": int(own.min()),
        "halo": int(received.sum()), "halo_most": int(received.max()), "sent_most": int(sent.max()),
    }  # fmt: skip


def expected_halo(out_degrees, count):
    return float(((count - 1) * (1 - (1 - 1 / count) ** out_degrees.double())).sum())


def model(num_nodes, num_edges, row, link):
    """Seconds of a layer, forward and backward, and the speedup over one process."""
    bandwidth, latency = LINKS[link]
    size = WIDTH * BYTES

    def compute(edges, nodes):
        return PASSES * edges * size / GATHER + NODE_PASSES * nodes * size / POINTWISE

    rows = max(row["halo_most"], row["sent_most"])
    more = (MERGE_PASSES * row["nodes_most"] + PACK_PASSES * rows) * size / POINTWISE
    whole = compute(row["edges_most"], row["nodes_most"]) + more
    own = PASSES * row["own_edges_least"] * size / GATHER  # computed while rows are transferred
    travel = 2 * (rows * size / (bandwidth * 1e9) + (row["parts"] - 1) * latency)
    step = whole - own + max(own, travel)
    return {
        "travel_s": travel, "compute_s": whole, "step_s": step,
        "speedup": compute(num_edges, num_nodes) / step,
    }  # fmt: skip


def published(args):
    """The model for larger graphs and more GPUs: power laws of the sizes of ogbn-products and papers100M."""
    rows = []
    for name, nodes, edges in (
        ("products~", 2_449_029, 126_200_000),
        ("papers100M~", 111_059_956, 3_228_124_712),
    ):
        rank = (torch.arange(1, min(nodes, 2_000_000) + 1, dtype=torch.float64) - 0.5) * (
            nodes / min(nodes, 2_000_000)
        )
        degrees = rank.rsqrt()
        degrees = degrees * (edges / nodes / degrees.mean())
        for count in (2, 4, 8, 64, 1024):
            halo = expected_halo(degrees, count) * nodes / len(degrees)
            row = {
                "graph": name, "method": "random", "parts": count, "edges_most": edges / count,
                "nodes_most": nodes / count, "own_edges_least": edges / count**2, "halo": halo,
                "halo_most": halo / count, "sent_most": halo / count,
            }  # fmt: skip
            for fraction, label in ((1.0, "random"), (args.locality, f"{args.locality:g} of it")):
                scaled = {**row, "method": label}
                for key in ("halo", "halo_most", "sent_most"):
                    scaled[key] = row[key] * fraction
                scaled["own_edges_least"] = edges / count * (1 - fraction * (1 - 1 / count))
                for link in LINKS:
                    rows.append({**scaled, "link": link, **model(nodes, edges, scaled, link)})
    return rows


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", nargs="+", default=["ogbn-arxiv", "debian-deps", "github", "ogbl-ddi"])
    parser.add_argument("--parts", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--methods", nargs="+", default=["random", "contiguous", "metis"])
    parser.add_argument(
        "--locality", type=float, default=0.2, help="halo of a good partition to a random one"
    )
    parser.add_argument("--commit", help="recorded; default: that of the working tree")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args(argv)
    rows, worst = [], 0.0
    for name in args.graphs:
        graph = graphs.load(name)
        edge_index = graph.edge_index
        src, dst = edge_index
        degrees = torch.bincount(src[src != dst], minlength=graph.num_nodes)  # loops stay within a part
        for method in args.methods:
            for count in args.parts:
                row = divide(name, edge_index, graph.num_nodes, method, count)
                row["edges"], row["nodes"] = graph.num_edges, graph.num_nodes
                row["halo_to_expected"] = row["halo"] / expected_halo(degrees, count)
                if method == "random":
                    worst = max(worst, abs(row["halo_to_expected"] - 1))
                for link in LINKS:
                    row[link] = model(graph.num_nodes, graph.num_edges, row, link)
                rows.append(row)
                halo, most = row["halo"] / graph.num_nodes, row["edges_most"] * count / graph.num_edges
                print(
                    f"{name:12} {method:10} {count:3} parts: {row['edges_between']:6.1%} of edges between, "
                    f"halo {halo:5.2f} x nodes ({row['halo_to_expected']:.2f} of a random one's), most edges "
                    f"{most:.2f} x mean, speedup {row['nvlink']['speedup']:.1f} / "
                    f"{row['infiniband']['speedup']:.1f}",
                    flush=True,
                )
    print(f"random partitions: halo within {worst:.2%} of what is expected")
    sizes = published(args)
    for row in sizes:
        ratio, travel = row["halo_most"] / row["nodes_most"], row["travel_s"] * 1e3
        print(
            f"{row['graph']:12} {row['parts']:5} GPUs, {row['method']:12} {row['link']:10}: halo "
            f"{ratio:5.2f} x own nodes, travel {travel:7.2f} ms, compute {row['compute_s'] * 1e3:7.2f} ms, "
            f"speedup {row['speedup']:.1f}"
        )
    if args.json:
        result = {"environment": report.environment(torch.device("cpu"), args.commit), "links": LINKS,
                  "rows": rows, "random_halo_error": worst, "published_sizes": sizes}  # fmt: skip
        json_files.write_json(args.json, result)
    return worst


if __name__ == "__main__":
    main()
