"""Predict interactions of drugs on ogbl-ddi (Hu et al., NeurIPS 2020) with a GAT or a Graph Transformer;
Hits@20.

    python examples/train_ogbl_ddi.py --model gat --seeds 3

The protocol is that of OGB's example: learned embeddings of the nodes, 2 layers of width 256, a network of 3
layers on the product of the two ends, dropout 0.5, batches of 65,536 pairs, as many random pairs as negative
ones, and 200 epochs. The score varies a lot between seeds, also in the literature.
"""

import datasets
import harness
import torch
import torch.nn.functional as F
from layers import conv, prepare
from torch import nn

from dfgnn.runtime.programs import positive

LAYERS = {"gat": "GATConv", "gatv2": "GATv2Conv", "gt": "TransformerConv"}


class Network(nn.Module):
    def __init__(self, args, num_nodes, dropout=0.5):
        super().__init__()
        width, heads = args.width, args.heads
        self.dropout = dropout
        self.nodes = nn.Embedding(num_nodes, width)
        nn.init.xavier_uniform_(self.nodes.weight)
        sizes = (width, width // heads, heads)
        self.convs = nn.ModuleList(conv(args.impl, LAYERS[args.model], *sizes) for _ in range(args.layers))
        self.predictor = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width), nn.ReLU(),
            nn.Dropout(dropout), nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, edge_index):
        """Embeddings of all nodes."""
        x = self.nodes.weight
        for k, layer in enumerate(self.convs):
            x = layer(x, edge_index)
            if k + 1 < len(self.convs):
                x = F.dropout(F.relu(x), self.dropout, self.training)
        return x

    def score(self, x, pairs):
        return self.predictor(x[pairs[0]] * x[pairs[1]]).squeeze(1).float()


class DDI(harness.Task):
    metric = "Hits@20"

    def __init__(self, args, seed, data):
        super().__init__(args, seed)
        self.data = data
        train = data["train"]
        self.num_nodes = int(max(x.max() for x in data.values())) + 1
        self.edge_index = torch.cat([train, train.flip(0)], 1)
        self.model = prepare(Network(args, self.num_nodes), args)
        self.optimizer = self.adam(0.005)
        self.batch_size = min(args.batch_size, train.shape[1])
        self.steps = train.shape[1] // self.batch_size
        self.steps = min(self.steps, args.max_steps or self.steps)

    def epoch(self):
        train, total = self.data["train"], torch.zeros((), device=self.device)
        order = torch.randperm(train.shape[1], device=self.device).split(self.batch_size)
        for step in range(self.steps):
            positive = train[:, order[step]]
            negative = torch.randint(self.num_nodes, positive.shape, device=self.device)
            total += self.optimize(lambda ends=(positive, negative): self.loss_of(*ends))
        return total / self.steps

    def loss_of(self, positive, negative):
        x = self.model(self.edge_index)
        right, wrong = self.model.score(x, positive), self.model.score(x, negative)
        return F.softplus(-right).mean() + F.softplus(wrong).mean()

    def scores(self):
        with self.autocast():
            x = self.model(self.edge_index)
            found = {k: self.model.score(x, pairs) for k, pairs in self.data.items() if k != "train"}
        return {k: hits(found[k], found[f"{k}_neg"], 20) for k in ("valid", "test")}


def hits(positive, negative, k: int) -> float:
    """OGB's Hits@k: the share of positive pairs with a score above that of the k-th best negative pair."""
    return float((positive > negative.topk(k).values[-1]).double().mean())


def main():
    parser = harness.parser(__doc__, epochs=200)
    parser.add_argument("--model", choices=LAYERS, default="gat")
    parser.add_argument("--layers", type=positive, default=2, metavar="N")
    parser.add_argument("--width", type=positive, default=256, metavar="N")
    parser.add_argument("--heads", type=positive, default=1, metavar="N")
    parser.add_argument("--batch-size", type=positive, default=65_536, metavar="N")
    parser.add_argument("--max-steps", type=positive, metavar="N", help="steps per epoch at most")
    args = parser.parse_args()
    data = {k: x.to(args.device) for k, x in datasets.ddi(args.root).items()}
    harness.main(args, lambda args, seed: DDI(args, seed, data))


if __name__ == "__main__":
    main()
