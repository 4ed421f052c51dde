"""Train Graph Transformers or a GAT on CLUSTER or PATTERN (arXiv 2003.00982); the data sets are generated.

    python examples/train_sbm.py --dataset CLUSTER --model gt --root data/sbm

gt is the network of Dwivedi and Bresson, "A Generalization of Transformer Networks to Graphs" (arXiv
2012.09699): 10 layers, 8 heads, width 80, batch norm, positions from the Laplacian whose signs are drawn anew
for every batch (their code also clamps scores to ±5, torch_geometric's layer does not). gat has the 16 layers
of 8 x 22 of the benchmark. exphormer has 20 of Exphormer's layers (arXiv 2303.06147) of width 48; of these
``--impl pyg`` means the published operations. Classes are weighted by the size of the others; accuracy is the
mean over classes, per batch, as there. The learning rate is halved where the validation loss stands still for
10 epochs.
"""

import harness
import sbm
import torch
import torch.nn.functional as F
from exphormer import Exphormer
from graph_batches import GraphBatches
from layers import conv, prepare
from torch import nn

from dfgnn.runtime.programs import listed, positive


class GTLayer(nn.Module):
    def __init__(self, impl, width, heads):
        super().__init__()
        options = {"bias": False, "root_weight": False}
        self.attention = conv(impl, "TransformerConv", width, width // heads, heads, **options)
        self.project = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.norms = nn.ModuleList([nn.BatchNorm1d(width), nn.BatchNorm1d(width)])

    def forward(self, x, edge_index):
        x = self.norms[0](x + self.project(self.attention(x, edge_index)))
        return self.norms[1](x + self.feed_forward(x))


class GATLayer(nn.Module):
    def __init__(self, impl, width, heads):
        super().__init__()
        self.attention = conv(impl, "GATConv", width, width // heads, heads, add_self_loops=True)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x, edge_index):
        return x + F.elu(self.norm(self.attention(x, edge_index)))


# layer, layers, width, learning rate
MODELS = {"gt": (GTLayer, 10, 80, 5e-4), "gat": (GATLayer, 16, 176, 1e-3), "exphormer": (None, 20, 48, 5e-4)}


class Network(nn.Module):
    def __init__(self, args, num_features, classes, heads=8):
        super().__init__()
        layer, layers, width, _ = MODELS[args.model]
        layers, width = args.layers or layers, args.width or width
        self.features = nn.Embedding(num_features, width)
        self.positions = nn.Linear(sbm.POSITIONS, width)
        self.exphormer = None if layer else Exphormer(args.impl, width, heads, layers)
        self.layers = nn.ModuleList(layer(args.impl, width, heads) for _ in range(layers) if layer)
        self.readout = nn.Sequential(
            nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, width // 4), nn.ReLU(),
            nn.Linear(width // 4, classes),
        )  # fmt: skip

    def forward(self, batch):
        place = batch.positions
        if self.training:
            place = place * (2.0 * torch.randint(2, place.shape[1:], device=place.device) - 1)
        x = self.features(batch.x) + self.positions(place)
        for layer in self.layers:
            x = layer(x, batch.edge_index)
        return self.readout(x if self.exphormer is None else self.exphormer(x, batch))


class Blocks(GraphBatches):
    def __init__(self, args, seed, data, split):
        self.batch_size = self.eval_batch_size = args.batch_size
        super().__init__(args, seed, data, split)
        self.classes = sbm.CLASSES[args.dataset]
        network = Network(args, sbm.NUM_FEATURES[args.dataset], self.classes)
        self.model = prepare(network, args)
        self.optimizer = self.adam(MODELS[args.model][-1])
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=10)

    def weighted_loss(self, logits, labels):
        counts = F.one_hot(labels, self.classes).sum(0)
        weights = (1 - counts / counts.sum()) * (counts > 0)
        return F.cross_entropy(logits.float(), labels, weight=weights)

    def loss_of(self, batch):
        return self.weighted_loss(self.model(batch), batch.y)

    def scores(self):
        found = {}
        for name in ("valid", "test"):
            recalls, losses = [], []
            for batch, logits in self.outputs(name):
                truth = F.one_hot(batch.y, self.classes).double()
                right = (logits.argmax(1) == batch.y).double()
                recalls.append(((truth * right[:, None]).sum(0) / truth.sum(0).clamp(min=1)).mean())
                losses.append(self.weighted_loss(logits, batch.y))
            found[name] = float(torch.stack(recalls).mean())
            found[f"{name}_loss"] = float(torch.stack(losses).mean())
        return found

    def after_epoch(self, scores):
        self.scheduler.step(scores["valid_loss"])


def main():
    parser = harness.parser(__doc__, epochs=150, impls=("dfgnn", "pyg"))
    parser.add_argument("--dataset", choices=sbm.SIZES, default="CLUSTER")
    parser.add_argument("--model", choices=MODELS, default="gt")
    parser.add_argument(
        "--layers", type=positive, metavar="N", help="default: the published setting, as the width"
    )
    parser.add_argument("--width", type=positive, metavar="N")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N")
    parser.add_argument(
        "--graphs", type=listed(positive, 3), metavar="N,N,N", help="to train on, validate and test"
    )
    args = parser.parse_args()
    counts = args.graphs or sbm.SIZES[args.dataset]
    data, split = sbm.load(args.dataset, counts, args.root, args.device)
    harness.main(args, lambda args, seed: Blocks(args, seed, data, split))


if __name__ == "__main__":
    main()
