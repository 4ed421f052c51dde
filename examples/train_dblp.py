"""Classify the authors of DBLP (four types of nodes, six of edges) with HGT or RGAT.

    python examples/train_dblp.py --model hgt --seeds 10

hgt is the network of torch_geometric's example hgt_dblp.py: a linear layer per type of node, HGTConv (Hu et
al., WWW 2020) with 2 heads, a linear head. rgat has two RGATConv (Busbridge et al., arXiv 1904.05811) on all
nodes as one graph with types of edges.
"""

import datasets
import harness
import torch
import torch.nn.functional as F
from layers import prepare
from node_classification import FullGraph
from torch import nn


class HGT(nn.Module):
    def __init__(self, sizes, relations, classes, hidden=64, heads=2, layers=1):
        super().__init__()
        from torch_geometric.nn import HGTConv

        self.inputs = nn.ModuleDict({kind: nn.Linear(size, hidden) for kind, size in sizes.items()})
        metadata = list(sizes), relations
        self.convs = nn.ModuleList(HGTConv(hidden, hidden, metadata, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, classes)

    def forward(self, x, edges):
        x = {kind: lin(x[kind]).relu() for kind, lin in self.inputs.items()}
        for conv in self.convs:
            x = conv(x, edges)
        return self.head(x["author"])


class RGAT(nn.Module):
    def __init__(self, sizes, relations, classes, hidden=64, heads=2, dropout=0.5):
        super().__init__()
        from torch_geometric.nn import RGATConv

        self.inputs = nn.ModuleDict({kind: nn.Linear(size, hidden) for kind, size in sizes.items()})
        self.conv1 = RGATConv(hidden, hidden // heads, len(relations), heads=heads)
        self.conv2 = RGATConv(hidden, hidden, len(relations), heads=1)
        self.head = nn.Linear(hidden, classes)
        self.dropout = dropout

    def forward(self, x, edges):
        authors = len(x["author"])
        edge_index, edge_type = edges
        x = torch.cat([lin(x[kind]).relu() for kind, lin in self.inputs.items()])
        x = F.relu(self.conv1(F.dropout(x, self.dropout, self.training), edge_index, edge_type))
        x = F.relu(self.conv2(F.dropout(x, self.dropout, self.training), edge_index, edge_type))
        return self.head(x[:authors])


def as_one_graph(x, edges):
    """(edge_index, edge_type) with the nodes of all types numbered one type after the other."""
    first, total = {}, 0
    for kind in x:
        first[kind], total = total, total + len(x[kind])
    parts = [
        torch.stack([index[0] + first[src], index[1] + first[dst]]) for (src, _, dst), index in edges.items()
    ]
    types = [torch.full((part.shape[1],), k) for k, part in enumerate(parts)]
    return torch.cat(parts, 1), torch.cat(types)


class DBLP(FullGraph):
    def __init__(self, args, seed, data):
        sizes = {kind: x.shape[1] for kind, x in data.x.items()}
        network = {"hgt": HGT, "rgat": RGAT}[args.model](sizes, list(data.edges), int(data.y.max()) + 1)
        model = prepare(network, args)
        to = lambda x: x.to(args.device)  # noqa: E731
        x = {kind: to(part) for kind, part in data.x.items()}
        if args.model == "rgat":
            edges = tuple(map(to, as_one_graph(data.x, data.edges)))
        else:
            edges = {kind: to(index) for kind, index in data.edges.items()}
        split = {k: to(i) for k, i in data.split.items()}
        super().__init__(args, seed, model, (x, edges), to(data.y), split)
        self.optimizer = self.adam(0.005, weight_decay=0.001)


def main():
    parser = harness.parser(__doc__, epochs=100, impls=("dfgnn", "pyg"))
    parser.add_argument("--model", choices=["hgt", "rgat"], default="hgt")
    args = parser.parse_args()
    data = datasets.dblp(args.root)
    harness.main(args, lambda args, seed: DBLP(args, seed, data))


if __name__ == "__main__":
    main()
