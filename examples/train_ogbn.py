"""Node classification on a large graph: full graph, or ``--sampled`` neighbourhoods.

    python examples/train_ogbn.py --dataset ogbn-arxiv
    python examples/train_ogbn.py --dataset ogbn-arxiv --sampled --stages
    python examples/train_ogbn.py --dataset reddit~ --impl pyg --amp bf16 --epochs 20

ogbn-arxiv has OGB's features where its file is there, and else features of the structure alone (averages of
random vectors along random walks). A name with ~ is a random graph with the size and about the degrees of
that data set (python -m dfgnn.bench --help has them), with random features and labels, for time and memory;
reddit~/8 has an eighth of its edges.

Three layers of 4 heads and 128 numbers, x = relu(norm(attention(x) + linear(x))), dropout, a linear head.
Sampled: ``--fanouts`` neighbours per layer; ``--loader dfgnn`` samples on the device, a block for each layer,
``subgraph`` one graph for all layers, and ``pyg`` such graphs with torch_geometric's NeighborLoader, which
needs pyg-lib or torch-sparse. ``--capture`` replays steps on samples of the first two. ``--host-features``
leaves features in pinned host memory.
"""

import datasets
import harness
import torch
import torch.nn.functional as F
from layers import conv, prepare
from node_classification import FullGraph
from sampled_nodes import Sampled
from torch import nn

from dfgnn import sampling
from dfgnn.runtime.programs import integer, listed, number, positive, wrong

LAYERS = {"gat": "GATConv", "gatv2": "GATv2Conv", "gt": "TransformerConv"}


class Network(nn.Module):
    def __init__(self, args, in_channels, classes):
        super().__init__()
        options = {"root_weight": False} if args.model == "gt" else {"add_self_loops": False}
        width, heads = args.width, args.heads
        sizes = [in_channels] + [width] * (args.layers - 1)
        self.convs = nn.ModuleList(
            conv(args.impl, LAYERS[args.model], size, width // heads, heads, **options) for size in sizes
        )
        self.lins = nn.ModuleList(nn.Linear(size, width) for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in sizes)
        self.head = nn.Linear(width, classes)
        self.dropout = args.dropout

    def forward(self, x, edges):
        """edges: an edge_index for all layers, or a list of (edge_index, number of destinations)."""
        for k, (layer, lin, norm) in enumerate(zip(self.convs, self.lins, self.norms)):
            if isinstance(edges, list):
                edge_index, num_dst = edges[k]
                target = x[:num_dst]
                h = layer((x, target), edge_index) + lin(target)
            else:
                h = layer(x, edges) + lin(x)
            x = F.dropout(F.relu(norm(h)), self.dropout, self.training)
        return self.head(x)


class Full(FullGraph):
    def scores(self):
        # On a random graph there is nothing to learn: no time is spent on evaluation.
        return {"valid": 0.0, "test": 0.0} if "~" in self.args.dataset else super().scores()


def load(args):
    """The data, on the device but for features that are to stay on the host."""
    if "~" in args.dataset:
        from dfgnn.bench.graphs import load as load_twin

        name, _, part = args.dataset.partition("/")
        graph = load_twin(name, args.device)  # has self loops
        edge_index, n = graph.edge_index, graph.num_nodes
        if part:
            edge_index = edge_index[:, torch.rand(edge_index.shape[1], device=args.device) < 1 / int(part)]
        x, y = torch.randn(n, args.width, device=args.device), torch.randint(40, (n,), device=args.device)
        split = {k: torch.arange(i, n, 3, device=args.device) for i, k in enumerate(datasets.SPLITS)}
        data = datasets.Nodes(x=x, edge_index=edge_index.contiguous(), y=y, splits=[split])
    else:
        data = datasets.arxiv(args.root)
        if data.x is None:
            data.x = datasets.structural_features(data.edge_index, len(data.y))
    host = data.x
    data = data.to(args.device)
    on_host = args.host_features and torch.device(args.device).type == "cuda"
    data.rows = sampling.host_rows(host.cpu().contiguous()) if on_host else data.x
    return data


def fanout(text):
    value = integer(-1)(text)
    if value == 0:
        raise wrong("a number of neighbours, or -1", text)
    return value


def main():
    parser = harness.parser(__doc__, epochs=500)
    parser.add_argument("--dataset", default="ogbn-arxiv", metavar="NAME")
    parser.add_argument("--model", choices=LAYERS, default="gat")
    parser.add_argument("--layers", type=positive, default=3, metavar="N")
    parser.add_argument("--width", type=positive, default=128, metavar="N")
    parser.add_argument("--heads", type=positive, default=4, metavar="N")
    parser.add_argument("--dropout", type=number(least=0, below=1), default=0.5, metavar="P")
    parser.add_argument("--lr", type=number(above=0), default=2e-3, metavar="RATE")
    parser.add_argument("--sampled", action="store_true", help="train on sampled neighbourhoods")
    parser.add_argument("--loader", choices=["dfgnn", "subgraph", "pyg"], default="dfgnn")
    parser.add_argument(
        "--fanouts", type=listed(fanout), default=(5, 10, 15), help="in the order of the layers; -1: all"
    )
    parser.add_argument("--batch-size", type=positive, default=1024, metavar="N")
    parser.add_argument(
        "--workers", type=integer(0), default=0, metavar="N", help="processes of torch_geometric's loader"
    )
    parser.add_argument("--max-steps", type=positive, metavar="N", help="steps per epoch at most")
    parser.add_argument(
        "--host-features", action="store_true", help="gather features from pinned host memory"
    )
    args = parser.parse_args()
    if args.sampled and len(args.fanouts) != args.layers:
        parser.error(
            f"--fanouts: expected a number for each of {args.layers} layers, got {len(args.fanouts)}"
        )
    harness.set_seed(0)
    data = load(args)

    def make(args, seed):
        model = prepare(Network(args, data.x.shape[1], int(data.y.max()) + 1), args)
        inputs = (data.x, data.edge_index), data.y, data.splits[0]
        task = Sampled(args, seed, model, data) if args.sampled else Full(args, seed, model, *inputs)
        task.optimizer = task.adam(args.lr)
        return task

    harness.main(args, make)


if __name__ == "__main__":
    main()
