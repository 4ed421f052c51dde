"""Node classification on medium-sized graphs, with the settings of published comparisons.

    python examples/train_nodes.py --dataset minesweeper --seeds 10

The network and settings are those of "Classic GNNs are Strong Baselines" (Luo et al., NeurIPS 2024,
arXiv 2406.08993): per layer relu(norm(attention(x) + linear(x))) and dropout, then a linear head; one head of
attention on the graph with edges in both directions and self loops. Run k takes split k where there are
several. ``--model gt`` has TransformerConv in the place of GATConv, ``gatv2`` GATv2Conv.
"""

import datasets
import harness
import torch.nn.functional as F
from layers import conv, prepare
from node_classification import FullGraph
from torch import nn

from dfgnn.runtime.programs import number, positive

LAYERS = {"gat": "GATConv", "gatv2": "GATv2Conv", "gt": "TransformerConv"}
# hidden, layers, lr, dropout, weight decay, normalisation, linear residual, epochs
SETTINGS = {
    "amazon-computers": (64, 2, 1e-3, 0.5, 5e-5, "layer", False, 1000),
    "amazon-photo": (64, 3, 1e-3, 0.5, 5e-5, "layer", True, 1000),
    "coauthor-cs": (256, 1, 1e-3, 0.3, 5e-4, "layer", True, 1500),
    "coauthor-physics": (256, 2, 1e-3, 0.7, 5e-4, "batch", True, 1500),
    "minesweeper": (64, 15, 0.01, 0.2, 0.0, "batch", True, 2000),
    "chameleon-filtered": (256, 2, 0.01, 0.7, 1e-3, "batch", True, 200),
    "amazon-ratings": (512, 4, 1e-3, 0.5, 0.0, "batch", True, 2500),
}
NORMS = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}


class Network(nn.Module):
    def __init__(self, impl, model, in_channels, hidden, layers, classes, dropout, norm, residual):
        super().__init__()
        options = {"bias": False} if model == "gt" else {"bias": False, "add_self_loops": False}
        if model == "gt":
            options["root_weight"] = False
        sizes = [in_channels] + [hidden] * (layers - 1)
        self.convs = nn.ModuleList(conv(impl, LAYERS[model], size, hidden, **options) for size in sizes)
        self.lins = nn.ModuleList(nn.Linear(size, hidden) for size in sizes) if residual else None
        self.norms = nn.ModuleList(NORMS[norm](hidden) for _ in sizes)
        self.head = nn.Linear(hidden, classes)
        self.dropout = dropout

    def forward(self, x, edge_index):
        for k, (layer, norm) in enumerate(zip(self.convs, self.norms)):
            h = layer(x, edge_index)
            h = norm(h if self.lins is None else h + self.lins[k](x))
            x = F.dropout(F.relu(h), self.dropout, self.training)
        return self.head(x)


class Nodes(FullGraph):
    def __init__(self, args, seed, data):
        settings = [given if given is not None else default for given, default in zip(
            (args.hidden, args.layers, args.lr, args.dropout, args.weight_decay, args.norm, None),
            SETTINGS.get(args.dataset, SETTINGS["amazon-ratings"]),
        )]  # fmt: skip
        hidden, layers, lr, dropout, weight_decay, norm, residual = settings
        network = Network(
            args.impl,
            args.model,
            data.x.shape[1],
            hidden,
            layers,
            int(data.y.max()) + 1,
            dropout,
            norm,
            residual,
        )
        model = prepare(network, args)
        metric = "ROC-AUC" if args.dataset in ("minesweeper", "tolokers") else "accuracy"
        split = data.splits[seed % len(data.splits)]
        super().__init__(args, seed, model, (data.x, data.edge_index), data.y, split, metric)
        self.optimizer = self.adam(lr, weight_decay)


def main():
    parser = harness.parser(__doc__, epochs=None)
    names = ", ".join(sorted({*SETTINGS, *datasets.DOWNLOADS}))
    parser.add_argument("--dataset", default="minesweeper", metavar="NAME", help=names)
    parser.add_argument("--model", choices=LAYERS, default="gat")
    parser.add_argument(
        "--hidden", type=positive, metavar="N", help="default, as of --epochs and what follows: as published"
    )
    parser.add_argument("--layers", type=positive, metavar="N")
    parser.add_argument("--lr", type=number(above=0), metavar="RATE")
    parser.add_argument("--dropout", type=number(least=0, below=1), metavar="P")
    parser.add_argument("--weight-decay", type=number(least=0), metavar="RATE")
    parser.add_argument("--norm", choices=NORMS)
    args = parser.parse_args()
    args.epochs = args.epochs or SETTINGS.get(args.dataset, SETTINGS["amazon-ratings"])[-1]
    data = datasets.nodes(args.dataset, args.root).to(args.device)
    harness.main(args, lambda args, seed: Nodes(args, seed, data))


if __name__ == "__main__":
    main()
