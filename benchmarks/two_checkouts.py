"""Attention's time in two checkouts of this project, in turns: what a change of the kernels costs or brings.

    python benchmarks/two_checkouts.py ../before . --json benchmarks/results/h100-redesign.json

Each checkout, with its libraries compiled, has a process of its own. Both make the same graph and inputs and
then take turns: forward and backward of an attention function, on GPUs replayed from a CUDA graph, so that
only kernels are left ("kernels"), and called from Python ("eager"). A ratio is that of the least of --rounds
samples, after / before; the worst are printed.
"""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DTYPES = ("float32", "bfloat16")
SCORES = ("gat", "gatv2", "dot")
GRAPHS = ("arxiv~", "pattern~", "molhiv~", "collab~", "cora~", "proteins~")
SHAPES = ((4, 32), (8, 8), (8, 64))


def attention(graph: Any, score: str, heads: int, dim: int, dtype: str, device: str) -> Callable[[], Any]:
    """A step of the checkout that this process imports: forward and the gradients of all inputs."""
    from dfgnn import functional

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=getattr(torch, dtype)).requires_grad_()

    torch.manual_seed(0)
    n = graph.num_src
    rows = [tensor(n, heads, dim) for _ in range(3)]
    inputs = {
        "gat": [rows[0], tensor(n, heads), tensor(n, heads)],
        "gatv2": [*rows[:2], tensor(heads, dim)],
        "dot": rows,
    }[score]
    grad = torch.randn_like(rows[0])
    function = getattr(functional, f"{score}_attention")
    return lambda: torch.autograd.grad(function(graph, *inputs), inputs, grad)


def replayed(step: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # graph and inputs may still be in the making there
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording):
        step()

    def replay(kept: Any = step) -> None:  # `kept` keeps alive the step's tensors, which the recording reads
        recording.replay()

    return replay


def milliseconds(step: Callable[[], Any], calls: int, device: str) -> float:
    if device == "cpu":
        begin = time.process_time()
        for _ in range(calls):
            step()
        return (time.process_time() - begin) * 1e3 / calls
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    for _ in range(calls):
        step()
    end_event.record()
    end_event.synchronize()
    return begin_event.elapsed_time(end_event) / calls


def work() -> None:
    """The process of one checkout: a line of JSON asks for a case or for a sample of it, a line answers."""
    from dfgnn.bench import graphs

    graph, name, step = None, "", None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "calls" in order:
                answer = milliseconds(step, order["calls"], order["device"])
            else:
                step = None  # freed before its graph, because a recording must not outlive what it reads
                if order["graph"] != name:
                    graph = None
                    name, graph = order["graph"], graphs.load(order["graph"], order["device"])
                step = attention(graph, *(order[k] for k in ("score", "heads", "dim", "dtype", "device")))
                step = replayed(step) if order["way"] == "kernels" else step
                step()
                answer = "ready"
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), flush=True)


class Checkout:
    def __init__(self, folder: Path) -> None:
        path = os.pathsep.join(filter(None, [str(folder.resolve()), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--worker"],
            env={**os.environ, "PYTHONPATH": path}, cwd=folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, **order: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def compare(checkouts: list[Checkout], case: dict[str, Any], rounds: int, budget: float) -> dict[str, Any]:
    """Samples of the case in both checkouts, in turns, in ms."""
    answers = [checkout.ask(**case) for checkout in checkouts]
    if failed := [answer for answer in answers if answer != "ready"]:
        return {**case, **failed[0]}
    once = checkouts[1].ask(calls=3, device=case["device"])
    calls = max(3, min(200, int(budget * 1e3 / rounds / 2 / max(once, 1e-3))))
    samples: list[list[float]] = [[], []]
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            samples[which].append(round(checkouts[which].ask(calls=calls, device=case["device"]), 5))
    ratio = min(samples[1]) / min(samples[0])
    return {**case, "before ms": samples[0], "after ms": samples[1], "ratio": round(ratio, 4)}


def summary(cases: list[dict[str, Any]]) -> str:
    lines = []
    for way in dict.fromkeys(case["way"] for case in cases):
        measured = [case for case in cases if case["way"] == way and "ratio" in case]
        measured.sort(key=lambda case: -case["ratio"])
        if measured:
            mean = math.exp(sum(math.log(case["ratio"]) for case in measured) / len(measured))
            lines.append(f"{way}: {len(measured)} cases, geometric mean {mean:.4f}, worst:")
        for case in measured[:5]:
            what = f"{case['graph']} {case['score']} {case['heads']}x{case['dim']} {case['dtype']}"
            lines.append(f"  {case['ratio']:.3f}  {what}, {min(case['after ms']):.4g} ms")
    for case in cases:
        if "failed" in case:
            lines.append(f"failed: {case['graph']} {case['score']}: {case['failed']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    from score import json_files

    from dfgnn.bench import report
    from dfgnn.runtime import programs

    parser = programs.Parser(description=__doc__)
    parser.add_argument("before", type=programs.existing_folder)
    parser.add_argument("after", type=programs.existing_folder)
    parser.add_argument("--device", type=programs.device, default="cuda")
    parser.add_argument("--graphs", type=programs.listed(), default=GRAPHS, metavar="NAMES")
    parser.add_argument("--heads", type=programs.listed(shape), default=SHAPES, metavar="HxD")
    parser.add_argument("--rounds", type=programs.positive, default=7, metavar="N")
    parser.add_argument("--seconds", type=programs.number(above=0), default=0.4, help="for each case")
    parser.add_argument("--json", type=programs.file_to_write, metavar="FILE")
    parser.add_argument("--commits", type=programs.listed(count=2), metavar="BEFORE,AFTER")
    args = parser.parse_args(argv)

    ways = ("eager",) if args.device == "cpu" else ("kernels", "eager")
    checkouts = [Checkout(args.before), Checkout(args.after)]
    commits = args.commits or [_commit(folder) for folder in (args.before, args.after)]
    info = report.environment(torch.device(args.device), commits[1])
    results: dict[str, Any] = {"environment": info | {"before": commits[0]}, "cases": []}
    for graph, (heads, dim), dtype, score, way in itertools.product(
        args.graphs, args.heads, DTYPES, SCORES, ways
    ):
        case = {"graph": graph, "score": score, "heads": heads, "dim": dim, "dtype": dtype, "way": way}
        found = compare(checkouts, {**case, "device": args.device}, args.rounds, args.seconds)
        del found["device"]  # the environment has it
        results["cases"].append(found)
        json_files.write_json(args.json, results)
    for checkout in checkouts:
        checkout.close()
    print(summary(results["cases"]))
    return int(any("failed" in case for case in results["cases"]))


def shape(text: str) -> tuple[int, int]:
    from dfgnn.runtime import programs

    heads, _, dim = text.partition("x")
    if not (heads.isdecimal() and dim.isdecimal()):
        raise programs.wrong("heads x columns, such as 8x8", text)
    return int(heads), int(dim)


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or str(folder)


if __name__ == "__main__":
    sys.exit(work() if "--worker" in sys.argv else main())
