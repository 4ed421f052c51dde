"""Attention written with ``dgl.sparse``: as one call, as three pieces, and dense, N × N.

    python benchmarks/dgl_sparse.py --dtypes float32 bfloat16 --repeats 10

The shapes are those of a weather model's processor (graph_weather, GenCast): a mesh of 2,562 nodes, 216
neighbours each, 4 heads of 128 in tensors ``[N, D, H]``. A step is ``bsddmm``, ``softmax`` and ``bspmm``,
and the gradients of query, key and value. The variants run in turns in one process; the smallest CPU time of
all rounds counts, on a GPU the smallest time until it has finished.
"""

import json
import sys
import time

import torch

import dfgnn.compat.sparse as dglsp
from dfgnn.bench.report import environment
from dfgnn.runtime.programs import Parser, device, file_to_write, positive


def mesh(nodes: int, neighbours: int, device: str) -> torch.Tensor:
    """Connects each node to the nearest ones on a ring, in place of a mesh's neighbours."""
    row = torch.arange(nodes).repeat_interleave(neighbours)
    offset = torch.arange(neighbours) - neighbours // 2
    return torch.stack([row, (row + offset.repeat(nodes)) % nodes]).to(device)


def one_call(adj, q, k, v, mask):
    return dglsp.bspmm(dglsp.bsddmm(adj, q, k.transpose(1, 0)).softmax(), v)


def three_pieces(adj, q, k, v, mask):
    scores = dglsp.bsddmm(adj, q, k.transpose(1, 0))
    scores = dglsp.val_like(adj, scores.val)
    weights = dglsp.val_like(adj, scores.softmax().val)
    return dglsp.bspmm(weights, v)


def plain(adj, q, k, v, mask):
    """The same attention by gather and scatter in PyTorch."""
    row, col = adj.row, adj.col
    score = (q[row] * k[col]).sum(1)
    high = score.new_full((len(q), score.shape[1]), -float("inf"))
    index = row[:, None].expand_as(score)
    high = high.scatter_reduce(0, index, score.detach(), "amax")
    exp = (score - high[row]).exp()
    weight = exp / exp.new_zeros(high.shape).index_add(0, row, exp)[row]
    return torch.zeros_like(v).index_add(0, row, weight[:, None] * v[col])


def dense(adj, q, k, v, mask):
    score = torch.einsum("idh,jdh->hij", q, k) + mask
    return torch.einsum("hij,jdh->idh", score.softmax(2), v)


WAYS = {"one call": one_call, "three pieces": three_pieces, "gather and scatter": plain, "dense": dense}


def step_time(way, arguments, inputs, device: str) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    begin = clock()
    torch.autograd.grad(way(*arguments).square().sum(), inputs)
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - begin


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--nodes", type=positive, default=2562, metavar="N")
    parser.add_argument("--neighbours", type=positive, default=216, metavar="N", help="of each node")
    parser.add_argument("--heads", type=positive, default=4, metavar="N")
    parser.add_argument("--hidden", type=positive, default=512, metavar="N", help="columns of all heads")
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32"], choices=["float32", "float64", "float16", "bfloat16"]
    )
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--repeats", type=positive, default=10, metavar="N", help="rounds of all ways")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write the results here")
    args = parser.parse_args(argv)
    if args.hidden % args.heads:
        parser.error(f"--heads: expected a number that divides --hidden {args.hidden}, got {args.heads}")
    torch.set_num_threads(1)
    rows = []
    n, shape = args.nodes, (args.nodes, args.nodes)
    ends = mesh(n, args.neighbours, args.device)
    allowed = torch.zeros(shape, dtype=torch.bool, device=args.device).index_put(
        (ends[0], ends[1]), ends[0] >= 0
    )
    for name in args.dtypes:
        dtype = getattr(torch, name)
        size = (n, args.hidden // args.heads, args.heads)
        q, k, v = (torch.randn(size, device=args.device).to(dtype).requires_grad_() for _ in range(3))
        mask = torch.zeros(shape, dtype=dtype, device=args.device).masked_fill(~allowed, -float("inf"))
        best = dict.fromkeys(WAYS, float("inf"))
        scale = size[1] ** -0.5
        for _ in range(args.repeats):
            for key in best:
                adj = dglsp.spmatrix(ends, shape=shape)  # models make the matrix anew in every step
                best[key] = min(
                    best[key], step_time(WAYS[key], (adj, q * scale, k, v, mask), (q, k, v), args.device)
                )
        exact = dense(adj, *(x.double() for x in (q * scale, k, v, mask)))
        for key, seconds in best.items():
            error = (WAYS[key](adj, q * scale, k, v, mask) - exact).abs().max().item()
            rows.append({"dtype": name, "way": key, "ms": round(1e3 * seconds, 4), "error": error})
            print(f"{name:9} {key:19} {1e3 * seconds:9.1f} ms, {error:.1e} from dense float64")
    if args.json:
        options = {key: getattr(args, key) for key in ("nodes", "neighbours", "heads", "hidden", "repeats")}
        result = {
            "environment": environment(torch.device(args.device), None),
            "options": options,
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
