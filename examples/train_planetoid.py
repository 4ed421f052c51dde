"""Train GAT, GATv2 or a Graph Transformer on Cora, CiteSeer or PubMed as the GAT paper does (arXiv
1710.10903).

    python examples/train_planetoid.py --dataset Cora --model gat --seeds 10

Two layers, 8 heads x 8 and one output head (8 for PubMed), dropout 0.6 of features and attention, the public
split. The last line printed is the test accuracy over the seeds, at the epoch that early stopping on the
validation set chooses.
"""

import datasets
import harness
import torch.nn.functional as F
from layers import conv, prepare
from node_classification import FullGraph
from torch import nn
from torch_geometric.utils import add_self_loops, remove_self_loops

from dfgnn.runtime.programs import positive

LAYERS = {"gat": "GATConv", "gatv2": "GATv2Conv", "gt": "TransformerConv"}


class Network(nn.Module):
    def __init__(self, impl, model, in_channels, classes, out_heads, heads=8, hidden=8, dropout=0.6):
        super().__init__()
        self.dropout = dropout
        options = {"dropout": dropout} if model == "gt" else {"dropout": dropout, "add_self_loops": False}
        self.hidden = conv(impl, LAYERS[model], in_channels, hidden, heads, **options)
        self.out = conv(impl, LAYERS[model], heads * hidden, classes, out_heads, concat=False, **options)

    def forward(self, x, edge_index):
        x = F.dropout(x, self.dropout, self.training)
        x = F.elu(self.hidden(x, edge_index))
        return self.out(F.dropout(x, self.dropout, self.training), edge_index)


class PaperStopping(harness.Best):
    """Early stopping as in the authors' code: patience counts from the last epoch in which loss or accuracy
    was best, and the scores are those of the last epoch in which both were."""

    def __init__(self, patience):
        super().__init__(patience)
        self.loss, self.accuracy = float("inf"), 0.0

    def update(self, scores):
        loss, accuracy = scores["valid_loss"], scores["valid"]
        self.waited += 1
        if loss <= self.loss or accuracy >= self.accuracy:
            if self.scores is None or (loss <= self.loss and accuracy >= self.accuracy):
                self.scores = scores
            self.loss, self.accuracy, self.waited = min(loss, self.loss), max(accuracy, self.accuracy), 0
        return self.waited < self.patience


class Planetoid(FullGraph):
    def __init__(self, args, seed, data):
        out_heads = 8 if args.dataset == "PubMed" and args.model != "gt" else 1
        network = Network(args.impl, args.model, data.x.shape[1], int(data.y.max()) + 1, out_heads)
        model = prepare(network, args)
        super().__init__(args, seed, model, (data.x, data.edge_index), data.y, data.splits[0])
        large = args.dataset == "PubMed"
        self.optimizer = self.adam(0.01 if large else 0.005, weight_decay=1e-3 if large else 5e-4)
        self.best = PaperStopping(args.patience)

    def scores(self):
        valid = self.split["valid"]
        found = super().scores()
        return {**found, "valid_loss": float(F.cross_entropy(self.last[valid], self.labels[valid]))}


def main():
    parser = harness.parser(__doc__, epochs=1000)
    parser.add_argument("--dataset", choices=["Cora", "CiteSeer", "PubMed"], default="Cora")
    parser.add_argument("--model", choices=LAYERS, default="gat")
    parser.add_argument(
        "--patience", type=positive, default=100, metavar="N", help="epochs without a better result"
    )
    args = parser.parse_args()
    data = datasets.planetoid(args.dataset, args.root).to(args.device)
    data.edge_index = add_self_loops(remove_self_loops(data.edge_index)[0], num_nodes=len(data.y))[0]
    harness.main(args, lambda args, seed: Planetoid(args, seed, data))


if __name__ == "__main__":
    main()
