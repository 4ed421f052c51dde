"""Train one model on CLUSTER; the last line printed is the result as JSON.

    python examples/train_cluster.py --model gt --attention fused

Peak memory is what training adds: to the process's largest resident set on the CPU, to what the model and the
data hold on the GPU.
"""

import json
import resource
import statistics
import sys
import time

import cluster
import torch
import torch.nn.functional as F
from models import GATBlock, GTBlock, NodeClassifier, accuracy
from tqdm import tqdm

from dfgnn import reference
from dfgnn.nn import GraphTransformerConv
from dfgnn.nn.dgl import GATConv
from dfgnn.runtime.programs import (
    Parser,
    device,
    existing_file,
    file_to_write,
    integer,
    interruptible,
    number,
    positive,
)


def unfuse(model):
    """Let the layers compute attention with plain PyTorch operations."""
    for module in model.modules():
        if isinstance(module, GATConv):
            module.attention = reference.gat_attention
        elif isinstance(module, GraphTransformerConv):
            module.attention = reference.dot_attention


class PeakMemory:
    """Bytes used at most since its creation, above those used then."""

    def __init__(self, device):
        self.cuda = torch.device(device).type == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated() if self.cuda else self._resident()

    def __call__(self):
        return (torch.cuda.max_memory_allocated() if self.cuda else self._resident()) - self.before

    @staticmethod
    def _resident():
        # Kilobytes on Linux, bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    logits, labels = zip(*((model(graph, features), labels) for graph, features, labels in batches))
    return accuracy(torch.cat(logits), torch.cat(labels))


def train_step(model, optimizer, graph, features, labels):
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(graph, features), labels)
    loss.backward()
    optimizer.step()
    return loss.item()  # waits for the device


def train(words=None):
    """The result of a training with these arguments, those of the command line by default."""
    parser = Parser(description=__doc__)
    parser.add_argument("--model", choices=["gat", "gt"], default="gt")
    parser.add_argument("--attention", choices=["fused", "unfused"], default="fused")
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=positive, default=10, metavar="N")
    parser.add_argument("--steps", type=positive, metavar="N", help="train for these steps instead of epochs")
    parser.add_argument(
        "--graphs",
        type=positive,
        default=640,
        metavar="N",
        help="graphs to train on; a quarter as many test it",
    )
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="graphs per step")
    parser.add_argument("--layers", type=positive, default=4, metavar="N")
    parser.add_argument("--width", type=positive, default=64, metavar="N")
    parser.add_argument("--heads", type=positive, default=8, metavar="N")
    parser.add_argument("--lr", type=number(above=0), default=5e-3, metavar="RATE")
    parser.add_argument("--seed", type=integer(0), default=0, metavar="N")
    parser.add_argument("--save", type=file_to_write, metavar="FILE", help="write the trained parameters")
    parser.add_argument(
        "--evaluate",
        type=existing_file,
        metavar="FILE",
        help="test these parameters instead of those just trained",
    )
    args = parser.parse_args(words)
    if args.width % args.heads:
        parser.error(f"--heads: expected a number that divides --width {args.width}, got {args.heads}")

    torch.manual_seed(args.seed)
    batches = cluster.make_batches(args.graphs, args.batch_size, seed=args.seed, device=args.device)
    test = cluster.make_batches(
        max(args.graphs // 4, 1), args.batch_size, seed=args.seed + 1, device=args.device
    )
    block = {"gat": GATBlock, "gt": GTBlock}[args.model]
    model = NodeClassifier(block, cluster.NUM_FEATURES, cluster.CLASSES, args.width, args.heads, args.layers)
    model.to(args.device)
    if args.attention == "unfused":
        unfuse(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    steps = args.steps or args.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    seconds, memory, order = [], PeakMemory(args.device), []
    bar = tqdm(total=steps, desc=f"{args.model} {args.attention:7}", unit="step")
    # Backward runs in this thread: with one GPU another thread gains nothing, and costs small graphs time.
    with torch.autograd.set_multithreading_enabled(False), bar as progress:
        model.train()
        for _ in range(steps):
            order = order or torch.randperm(len(batches)).tolist()
            start = time.perf_counter()
            loss = train_step(model, optimizer, *batches[order.pop()])
            seconds.append(time.perf_counter() - start)
            schedule.step()
            progress.update()
            progress.set_postfix_str(f"loss {loss:.3f}", refresh=False)
    peak_memory = memory()
    if args.save:
        torch.save(model.state_dict(), args.save)
    if args.evaluate:
        model.load_state_dict(torch.load(args.evaluate, map_location=args.device))
    return {
        "accuracy": evaluate(model, test),
        "seconds_per_step": statistics.median(seconds),
        "peak_memory": peak_memory,
        "edges_per_step": sum(graph.num_edges for graph, *_ in batches) // len(batches),
    }


if __name__ == "__main__":
    with interruptible("nothing is kept"):
        print(json.dumps(train()))
