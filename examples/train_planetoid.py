"""Train GAT or a Graph Transformer on Cora, CiteSeer or PubMed as the GAT paper does (arXiv 1710.10903).

    python examples/train_planetoid.py --dataset Cora --model gat --seeds 10

Real data through torch_geometric: from --root where it is there, else downloaded to it. The last line printed
is the test accuracy over the seeds, at the epoch that early stopping on the validation set chooses.
"""

import argparse
import copy
import os
import shutil
import statistics
import tempfile
import warnings

import torch
import torch.nn.functional as F
from models import CitationGAT, CitationGT, accuracy
from tqdm import tqdm

import dfgnn


def load(name, root):
    """The graph with self-loops, row-normalised features, labels and masks of the public split."""
    from torch_geometric.datasets import Planetoid

    with tempfile.TemporaryDirectory() as scratch:
        processed = os.path.join(root, name, "processed")
        if os.path.isdir(os.path.join(root, name, "raw")) and not _complete(processed):
            # The loader writes its processed files beside the raw ones, which are to stay as they are.
            shutil.copytree(os.path.join(root, name, "raw"), os.path.join(scratch, name, "raw"))
            root = scratch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the age of the pickled files
            data = Planetoid(root, name)[0]
    graph = dfgnn.Graph.from_edge_index(data.edge_index, num_nodes=data.num_nodes).add_self_loops()
    features = data.x / data.x.sum(1, keepdim=True).clamp(min=1)
    return graph, features, data.y, (data.train_mask, data.val_mask, data.test_mask)


def _complete(processed):
    return os.path.isfile(os.path.join(processed, "data.pt"))


def train(data, args, seed):
    """Test accuracy of one run."""
    torch.manual_seed(seed)
    graph, features, labels, (train_mask, val_mask, test_mask) = data
    network = {"gat": CitationGAT, "gt": CitationGT}[args.model]
    out_heads = 8 if args.dataset == "PubMed" and args.model == "gat" else 1
    model = network(features.shape[1], int(labels.max()) + 1, out_heads=out_heads).to(args.device)
    weight_decay = 1e-3 if args.dataset == "PubMed" else 5e-4
    lr = 0.01 if args.dataset == "PubMed" else 0.005
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
    best_loss, best_accuracy, kept, waited = float("inf"), 0.0, copy.deepcopy(model.state_dict()), 0
    with tqdm(range(args.epochs), desc=f"{args.dataset} {args.model} seed {seed}") as progress:
        for _ in progress:
            model.train()
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(graph, features)[train_mask], labels[train_mask]).backward()
            optimizer.step()

            model.eval()
            with torch.no_grad():
                logits = model(graph, features)[val_mask]
            loss, val = F.cross_entropy(logits, labels[val_mask]).item(), accuracy(logits, labels[val_mask])
            progress.set_postfix_str(f"val loss {loss:.3f} accuracy {val:.1f} %", refresh=False)
            # As in the authors' code: patience counts from the last time that either was at its best, and the
            # parameters kept are those of the last time that both were.
            waited += 1
            if loss <= best_loss or val >= best_accuracy:
                if loss <= best_loss and val >= best_accuracy:
                    kept = copy.deepcopy(model.state_dict())
                best_loss, best_accuracy, waited = min(loss, best_loss), max(val, best_accuracy), 0
            if waited == args.patience:
                break
    model.load_state_dict(kept)
    with torch.no_grad():
        return accuracy(model(graph, features)[test_mask], labels[test_mask])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", choices=["Cora", "CiteSeer", "PubMed"], default="Cora")
    parser.add_argument("--model", choices=["gat", "gt"], default="gat")
    parser.add_argument(
        "--root", default="data/planetoid", help="folder that holds, or is to hold, the data sets"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs, with seeds 0, 1, ...")
    parser.add_argument("--epochs", type=int, default=1000, help="at most")
    parser.add_argument("--patience", type=int, default=100, help="epochs without a better validation result")
    args = parser.parse_args()

    graph, features, labels, masks = load(args.dataset, args.root)
    print(f"{args.dataset}: {graph}")
    data = (
        graph.to(args.device),
        features.to(args.device),
        labels.to(args.device),
        [m.to(args.device) for m in masks],
    )
    results = [train(data, args, seed) for seed in range(args.seeds)]
    deviation = statistics.stdev(results) if len(results) > 1 else 0.0
    print(f"test accuracy: {statistics.mean(results):.1f} ± {deviation:.1f} %")


if __name__ == "__main__":
    main()
