"""Train a Graph Transformer and a GAT on CLUSTER, with dfgnn and with unfused PyTorch operations.

    python examples/demo_cluster.py

Ends with a table of accuracy, time and memory, and a picture of the times. Nothing is downloaded: the data
set is generated. The models are trained with dfgnn; then a few steps with unfused operations are timed, and
the trained parameters are tested with them. Each run is a process of its own, so that its peak memory is its
own; all are forks of this one, which has imported what they need. Unknown arguments go to
examples/train_cluster.py.
"""

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

# A thread of OpenMP that waits for the others keeps its core busy, unless it is told otherwise before torch
# is imported. Where other programs want the cores, that made a step take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch._dynamo  # noqa: F401 - optimizers import it
import train_cluster

from dfgnn.runtime.programs import Parser, interruptible, positive

MODELS = {"gt": "Graph Transformer", "gat": "GAT"}
SMALL = ["--graphs", 320, "--batch-size", 16]  # half of what train_cluster.py takes


def train(*arguments):
    """The result of a run of train_cluster.py."""
    fork = multiprocessing.get_context("fork")
    result, to_send = fork.Pipe(duplex=False)

    def run():
        try:
            to_send.send(train_cluster.train(list(map(str, arguments))))
        except KeyboardInterrupt:  # of both processes; the other one tells
            sys.exit(130)

    process = fork.Process(target=run)
    process.start()
    to_send.close()  # so that recv ends when the process does
    try:
        return result.recv()
    except EOFError:
        process.join()
        sys.exit(process.exitcode or 1)  # its own message is above


def picture(rows, width=40):
    """Bars of the times per step, two lines for each model, and how much that is."""
    longest = max(result["seconds_per_step"] for *_, result in rows)
    for (name, _, fused), (_, _, unfused) in zip(rows[::2], rows[1::2]):
        print(f"\n{name}, a training step")
        for label, result in (("dfgnn", fused), ("unfused PyTorch", unfused)):
            seconds = result["seconds_per_step"]
            bar = "█" * max(1, round(width * seconds / longest))
            print(f"  {label:17}{bar} {1e3 * seconds:.0f} ms")
        faster = unfused["seconds_per_step"] / fused["seconds_per_step"]
        smaller = unfused["peak_memory"] / max(1, fused["peak_memory"])
        print(f"  {faster:.1f} times as fast, {smaller:.1f} times less memory")


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--epochs", type=positive, default=4, metavar="N", help="to train with dfgnn")
    parser.add_argument(
        "--unfused-steps", type=positive, default=3, metavar="N", help="to time with unfused operations"
    )
    args, more = parser.parse_known_args()

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model, name in MODELS.items():
            file = Path(folder, model)
            fused = train("--model", model, *SMALL, "--epochs", args.epochs, "--save", file, *more)
            unfused = ["--attention", "unfused", "--steps", args.unfused_steps, "--evaluate", file]
            rows += [
                (name, "dfgnn", fused),
                (name, "unfused PyTorch", train("--model", model, *SMALL, *unfused, *more)),
            ]

    print(f"\n{'model':20}{'attention':18}{'accuracy':>10}{'time per step':>18}{'peak memory':>15}")
    for name, attention, result in rows:
        milliseconds, memory = 1e3 * result["seconds_per_step"], result["peak_memory"] / 2**20
        print(f"{name:20}{attention:18}{result['accuracy']:8.1f} %{milliseconds:15.1f} ms{memory:11.0f} MiB")
    print(
        f"CLUSTER: {rows[0][2]['edges_per_step']:,} edges per step; guessing among 6 classes gets 16.7 %. "
        "Peak memory is what training adds.\nThe rows of unfused PyTorch test the parameters trained with "
        f"dfgnn, and time {args.unfused_steps} steps."
    )
    picture(rows)


if __name__ == "__main__":
    with interruptible("nothing is kept, and the same command begins anew"):
        main()
