"""Train GAT, GATv2 or a Graph Transformer on ogbg-molhiv (Hu et al., NeurIPS 2020); ROC-AUC, scaffold split.

    python examples/train_ogbg_molhiv.py --model gat --seeds 3

The protocol is that of "Do We Need Anisotropic Graph Neural Networks?" (Tailor et al., ICLR 2022, arXiv
2104.01481): 4 layers, 8 heads and one in the last, batch norm, ReLU, residuals, mean over the atoms, a
network of three layers; at most 100 epochs, patience 20. ``--bonds`` has the bonds' features in the
attention, which the Graph Transformer (with a feed-forward network in every layer) always has.
"""

import datasets
import harness
import torch
import torch.nn.functional as F
from graph_batches import Embeddings, GraphBatches, UnitVectors, mean_pool
from layers import conv, prepare
from torch import nn
from torchmetrics.functional.classification import binary_auroc

from dfgnn.runtime.programs import positive

LAYERS = {"gat": "GATConv", "gatv2": "GATv2Conv", "gt": "TransformerConv"}
# Numbers of values of the features of atoms and bonds, as in ogb.utils.features.
ATOM, BOND = (119, 5, 12, 12, 10, 6, 6, 2, 2), (5, 6, 2)


class Layer(nn.Module):
    def __init__(self, args, width, heads, bonds):
        super().__init__()
        edges = {"edge_dim": sum(BOND)} if bonds else {}
        self.attention = conv(args.impl, LAYERS[args.model], width, width // heads, heads, **edges)
        self.norm = nn.BatchNorm1d(width)
        self.feed_forward = None
        if args.model == "gt":
            inner = nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
            self.feed_forward = nn.Sequential(*inner, nn.BatchNorm1d(width))

    def forward(self, x, *edges):
        x = x + F.relu(self.norm(self.attention(x, *edges)))
        return x if self.feed_forward is None else x + self.feed_forward(x)


class Network(nn.Module):
    def __init__(self, args, width, layers=4, heads=8):
        super().__init__()
        bonds = args.bonds or args.model == "gt"
        self.atoms, self.bonds = Embeddings(ATOM, width), UnitVectors(BOND) if bonds else None
        all_heads = [heads] * (layers - (args.model != "gt")) + [1] * (args.model != "gt")
        self.layers = nn.ModuleList(Layer(args, width, h, bonds) for h in all_heads)
        self.readout = nn.Sequential(
            nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, width // 4), nn.ReLU(),
            nn.Linear(width // 4, 1),
        )  # fmt: skip

    def forward(self, batch):
        x, edges = self.atoms(batch.x), (batch.edge_index,)
        if self.bonds is not None:
            edges += (self.bonds(batch.edge_attr),)
        for layer in self.layers:
            x = layer(x, *edges)
        return self.readout(mean_pool(x, batch)).squeeze(1)


class Molhiv(GraphBatches):
    metric = "ROC-AUC"

    def __init__(self, args, seed, data, split):
        width, batch_size = (184, 64) if args.model == "gatv2" else (240, 32)
        self.batch_size = args.batch_size or batch_size
        super().__init__(args, seed, data, split)
        self.model = prepare(Network(args, args.width or width), args)
        self.optimizer = self.adam(10**-3.5, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.optimizer, mode="max", factor=0.5, patience=10, min_lr=1e-5
        )
        self.best = harness.Best(args.patience)

    def loss_of(self, batch):
        return F.binary_cross_entropy_with_logits(self.model(batch).float(), batch.y.squeeze(1))

    def scores(self):
        found = {}
        for name in ("valid", "test"):
            batches, logits = zip(*self.outputs(name))
            labels = torch.cat([batch.y.squeeze(1) for batch in batches])
            found[name] = float(binary_auroc(torch.cat(logits), labels.long()))
        return found

    def after_epoch(self, scores):
        self.scheduler.step(scores["valid"])


def main():
    parser = harness.parser(__doc__, epochs=100)
    parser.add_argument("--model", choices=LAYERS, default="gat")
    parser.add_argument("--bonds", action="store_true", help="features of the bonds in the attention")
    parser.add_argument(
        "--patience",
        type=positive,
        default=20,
        metavar="EPOCHS",
        help="epochs without a better validation result",
    )
    parser.add_argument(
        "--width", type=positive, metavar="N", help="default: the published setting, as the batch size"
    )
    parser.add_argument("--batch-size", type=positive, metavar="N")
    parser.add_argument("--train-graphs", type=positive, metavar="N", help="train on the first of them only")
    args = parser.parse_args()
    data, split = datasets.molhiv(args.root, args.device)
    split["train"] = split["train"][: args.train_graphs]
    harness.main(args, lambda args, seed: Molhiv(args, seed, data, split))


if __name__ == "__main__":
    main()
