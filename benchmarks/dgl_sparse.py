"""Attention written with ``dgl.sparse``: as one call, as three pieces, and dense, N × N.

    python benchmarks/dgl_sparse.py --dtypes float32,bfloat16 --repeats 10

The shapes are those of a weather model's processor (graph_weather, GenCast): a mesh of 2,562 nodes, 216
neighbours each, 4 heads of 128 in tensors ``[N, D, H]``. A step is ``bsddmm``, ``softmax`` and ``bspmm``,
and the gradients of query, key and value. Ways take turns within a process; the smallest CPU time of all
rounds counts, on a GPU the smallest time with a wait for it.
"""

import argparse
import time

import torch

import dfgnn.compat.sparse as dglsp


def mesh(nodes: int, neighbours: int, device: str) -> torch.Tensor:
    """Each node with those around it on a ring of rows, a stand-in for a mesh's nearest ones."""
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
    """Gathered and scattered in PyTorch."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=2562)
    parser.add_argument("--neighbours", type=int, default=216)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--ways", default=",".join(WAYS))
    args = parser.parse_args()
    n, shape = args.nodes, (args.nodes, args.nodes)
    ends = mesh(n, args.neighbours, args.device)
    allowed = torch.zeros(shape, dtype=torch.bool, device=args.device).index_put(
        (ends[0], ends[1]), ends[0] >= 0
    )
    for name in args.dtypes.split(","):
        dtype = getattr(torch, name)
        size = (n, args.hidden // args.heads, args.heads)
        q, k, v = (torch.randn(size, device=args.device).to(dtype).requires_grad_() for _ in range(3))
        mask = torch.zeros(shape, dtype=dtype, device=args.device).masked_fill(~allowed, -float("inf"))
        best = dict.fromkeys(args.ways.split(","), float("inf"))
        scale = size[1] ** -0.5
        for _ in range(args.repeats):
            for key in best:
                adj = dglsp.spmatrix(ends, shape=shape)  # as models do, in every step
                best[key] = min(
                    best[key], step_time(WAYS[key], (adj, q * scale, k, v, mask), (q, k, v), args.device)
                )
        exact = dense(adj, *(x.double() for x in (q * scale, k, v, mask)))
        for key, seconds in best.items():
            error = (WAYS[key](adj, q * scale, k, v, mask) - exact).abs().max().item()
            print(f"{name:9} {key:19} {1e3 * seconds:9.1f} ms, {error:.1e} from dense float64")


if __name__ == "__main__":
    main()
