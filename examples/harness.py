"""What the training scripts share: arguments, seeds, precision, timing, checkpoints, results.

A script defines a :class:`Task` (model, optimizer, an epoch, scores) and calls ``main(parser, make_task)``.
The same script runs on torch_geometric's layers (``--impl pyg``), on dfgnn's in their place (``--impl
dfgnn``) and, where the script says so, on DGL's (``--impl dgl``).
"""

import contextlib
import importlib.util
import json
import random
import resource
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dfgnn.runtime import programs
from dfgnn.runtime.cuda_graphs import capturing
from dfgnn.runtime.programs import device, file_to_write, folder_to_write, integer, number, positive

missing = [name for name in ("torch_geometric", "tqdm") if importlib.util.find_spec(name) is None]
if missing:
    programs.refuse(f"{' and '.join(missing)} not installed: pip install 'dfgnn[examples]', or make test")

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Parser(programs.Parser):
    """Also refuses arguments that do not go together."""

    def parse_args(self, *args, **kwargs):
        found = super().parse_args(*args, **kwargs)
        if found.impl == "dgl" and importlib.util.find_spec("dgl") is None:
            self.error(
                "--impl dgl: DGL is not installed; it has wheels up to Python 3.11: pip install dgl==1.1.3"
            )
        if found.resume and found.checkpoint is None:
            self.error("--resume: needs --checkpoint DIR")
        if found.capture and torch.device(found.device).type != "cuda":
            self.error(f"--capture: needs a GPU, got --device {found.device}")
        return found


def parser(doc: str, *, epochs: int | None, impls=("dfgnn", "pyg", "dgl")) -> Parser:
    """The arguments that all scripts have."""
    p = Parser(description=doc)
    p.add_argument("--impl", choices=impls, default="dfgnn", help="whose layers compute the attention")
    p.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--root", default="data", metavar="DIR", help="holds, or is to hold, the data sets")
    p.add_argument("--seeds", type=positive, default=1, metavar="N", help="number of runs")
    p.add_argument(
        "--first-seed",
        type=integer(0),
        default=0,
        metavar="SEED",
        help="of the first run; then those that follow",
    )
    p.add_argument("--epochs", type=positive, default=epochs, metavar="N", help="at most")
    p.add_argument("--amp", choices=AMP, help="train under autocast to this type")
    p.add_argument("--compile", action="store_true", help="torch.compile the model")
    p.add_argument("--capture", action="store_true", help="replay training steps from CUDA graphs")
    p.add_argument("--checkpoint", type=folder_to_write, metavar="DIR", help="write checkpoints to it")
    p.add_argument("--checkpoint-every", type=positive, default=10, metavar="EPOCHS")
    p.add_argument("--resume", action="store_true", help="go on from the checkpoints that are there")
    p.add_argument("--logdir", type=folder_to_write, metavar="DIR", help="write curves for TensorBoard")
    p.add_argument(
        "--json", type=file_to_write, metavar="FILE", help="append a line with the results of each run"
    )
    p.add_argument("--stages", action="store_true", help="time forward, backward, ... apart")
    p.add_argument("--profile", action="store_true", help="count the kernels of an epoch after training")
    p.add_argument(
        "--max-seconds", type=number(above=0), metavar="SECONDS", help="stop a run after this time"
    )
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    return p


class Best:
    """Scores of the epoch that was best on the validation set; ``patience`` epochs without a better one end
    the run."""

    def __init__(self, patience: int | None = None):
        self.patience, self.waited, self.scores = patience, 0, None

    def update(self, scores: dict) -> bool:
        """Take the scores of an epoch; False if the run should end."""
        self.waited += 1
        if self.scores is None or scores["valid"] > self.scores["valid"]:
            self.scores, self.waited = scores, 0
        return self.patience is None or self.waited < self.patience


class Stages:
    """Seconds by stage of a step, ``with stages("forward")``; on a GPU by events, without waiting for it."""

    def __init__(self, device: torch.device, on: bool):
        self.on, self.cuda, self.events, self.seconds = on, device.type == "cuda", [], {}

    @contextlib.contextmanager
    def __call__(self, name: str):
        if not self.on:
            yield
            return
        begin = self._now()
        yield
        self.events.append((name, begin, self._now()))

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def collect(self) -> None:
        """Add up what was recorded; the device must have finished."""
        for name, begin, end in self.events:
            seconds = begin.elapsed_time(end) / 1e3 if self.cuda else end - begin
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.events.clear()


class Task:
    """One run. A subclass sets ``model`` and ``optimizer`` (``scheduler``, ``best``) in its constructor."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler = None
    metric = "accuracy"

    def __init__(self, args, seed: int):
        self.args, self.seed, self.device = args, seed, torch.device(args.device)
        self.best = Best()
        self.stages = Stages(self.device, args.stages)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=args.amp == "fp16")

    def epoch(self):
        """Train for an epoch; returns the loss."""
        raise NotImplementedError

    def scores(self) -> dict[str, float]:
        """The scores of the current model: at least "valid" and "test"."""
        raise NotImplementedError

    def can_capture(self) -> bool:
        """Whether this task supports ``--capture``."""
        return False

    def after_epoch(self, scores: dict) -> None:
        """Called with the scores of every epoch, for schedules."""

    def adam(self, lr: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
        """Adam over the model's parameters, fused on a GPU."""
        cuda = self.device.type == "cuda"
        rate = torch.tensor(lr, device=self.device) if cuda and self.args.capture else lr
        return torch.optim.Adam(
            self.model.parameters(), lr=rate, weight_decay=weight_decay,
            fused=cuda or None, capturable=cuda and self.args.capture,
        )  # fmt: skip

    def autocast(self):
        return torch.autocast(self.device.type, AMP.get(self.args.amp), enabled=self.args.amp is not None)

    def optimize(self, loss_of) -> torch.Tensor:
        """One step of the optimizer on the loss that ``loss_of()`` returns."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.stages("forward"), self.autocast():
            loss = loss_of()
        with self.stages("backward"):
            self.scaler.scale(loss).backward()
        with self.stages("update"):
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()

    def replayed(self, fn):
        """``fn``, which takes nothing and returns a tensor; with ``--capture`` from a CUDA graph of it."""
        return Replayed(fn) if self.args.capture else fn


class Replayed:
    """A function that is replayed from a CUDA graph once it has run three times.

    Those three runs are ordinary steps. From then on, each call returns the same tensor.
    """

    def __init__(self, fn, warm_up: int = 3):
        self.fn, self.left, self.graph = fn, warm_up, None
        self.stream = torch.cuda.Stream()

    def __call__(self):
        if self.left:
            self.left -= 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.out = self.fn()
            torch.cuda.current_stream().wait_stream(self.stream)
            return self.out
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with capturing(self.graph, stream=self.stream):
                self.out = self.fn()
            # Capturing begins by writing the state of dropout's generator, on its own stream; the replay
            # below reads that state.
            torch.cuda.current_stream().wait_stream(self.stream)
        self.graph.replay()
        return self.out


def capture(loss_of, model: nn.Module, optimizer, **options):
    """``dfgnn.capture``: a step for batches of changing sizes, from CUDA graphs."""
    import dfgnn

    if not hasattr(dfgnn, "capture"):
        sys.exit("--capture: this dfgnn has no dfgnn.capture, which steps of changing sizes need")
    return dfgnn.capture(loss_of, model, optimizer, **options)


def set_seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what libraries draw from
    torch.manual_seed(seed)


def generators() -> dict:
    """The states of all generators of random numbers, as what torch.load(weights_only=True) reads."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
            "torch": torch.get_rng_state(), "cuda": cuda}  # fmt: skip


def set_generators(state: dict) -> None:
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


PARTS = ("model", "optimizer", "scheduler", "scaler")


def save(path: Path, task: Task, progress: dict) -> None:
    """Saves the state that the rest of the run needs; the file is replaced only by a complete one."""
    parts = {name: getattr(task, name).state_dict() for name in PARTS if getattr(task, name) is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {**parts, "best": vars(task.best), "progress": progress, "generators": generators()},
        path.with_suffix(".tmp"),
    )
    path.with_suffix(".tmp").replace(path)


def load(path: Path, task: Task) -> dict:
    state = torch.load(path, map_location=task.device, weights_only=True)
    for name in PARTS:
        if getattr(task, name) is not None:
            getattr(task, name).load_state_dict(state[name])
    vars(task.best).update(state["best"])
    to_cpu = lambda x: x.cpu() if isinstance(x, torch.Tensor) else x  # noqa: E731 - map_location moved them
    found = {name: to_cpu(x) for name, x in state["generators"].items()}
    found["numpy"] = tuple(map(to_cpu, found["numpy"]))
    set_generators({**found, "cuda": [to_cpu(x) for x in found["cuda"]]})
    return state["progress"]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: on a GPU what was allocated at most since the run began, data included; on the
    CPU the largest resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def profile(task: Task) -> dict:
    """Kernels of one epoch of training, and the share of its time in which the GPU has nothing to do."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    task.model.train()  # scores have left it in evaluation
    synchronize(task.device)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (task.device.type == "cuda")
    with profiler(activities=kinds) as found:
        task.epoch()
        synchronize(task.device)
    if task.device.type != "cuda":
        return {"operators": sum(event.count for event in found.key_averages() if "::" in event.key)}
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, until = 0.0, spans[0][0]
    for begin, end, _ in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    copies = sum(name.startswith(("Memcpy", "Memset")) for *_, name in spans)
    return {"kernels": len(spans) - copies, "copies": copies, "gpu_idle": 1 - busy / (until - spans[0][0])}


def run(args, make_task, seed: int) -> dict:
    """Train once; returns the record of the run."""
    device = torch.device(args.device)
    set_seed(seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    task = make_task(args, seed)
    if args.capture and not task.can_capture():
        programs.refuse("--capture: not with this script, implementation or --amp fp16")
    path = None if args.checkpoint is None else args.checkpoint / f"seed-{seed}.pt"
    progress = {"history": [], "seconds": [], "total": time.perf_counter() - begin, "done": False}
    if args.resume and path is not None:
        if path.exists():
            progress = load(path, task)
            print(f"seed {seed}: goes on after epoch {len(progress['history'])}, from {path}", flush=True)
        else:
            print(f"seed {seed}: begins anew, as there is no {path}", flush=True)
    begin = time.perf_counter() - progress["total"]
    history, first, ended = progress["history"], len(progress["history"]), "epochs"
    epochs = range(first, 0 if progress["done"] else args.epochs)
    board = None
    if args.logdir is not None:
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(args.logdir / f"{args.impl}-seed-{seed}"), purge_step=first)
    with contextlib.ExitStack() as stack:
        bar = None
        if not args.quiet:
            from tqdm import tqdm

            bar = tqdm(initial=first, total=args.epochs, desc=f"{args.impl} seed {seed}", unit="epoch")
            stack.enter_context(bar)
        for epoch in epochs:
            start = time.perf_counter()
            task.model.train()
            loss = float(task.epoch())  # waits for the device
            synchronize(device)
            progress["seconds"].append(time.perf_counter() - start)
            task.stages.collect()
            task.model.eval()
            with torch.no_grad():
                scores = task.scores()
            go_on = task.best.update(scores)
            task.after_epoch(scores)
            progress["total"] = time.perf_counter() - begin
            history.append([progress["total"], loss, scores["valid"], scores["test"]])
            late = args.max_seconds is not None and progress["total"] > args.max_seconds
            progress["done"] = not go_on
            last = not go_on or late or epoch + 1 == args.epochs
            ended = "patience" if not go_on else "time" if late else "epochs"
            if path is not None and (last or (epoch + 1) % args.checkpoint_every == 0):
                save(path, task, progress)
            if board is not None:
                for name, value in {"loss": loss, **scores}.items():
                    board.add_scalar(name, value, epoch)
            if bar is not None:
                bar.set_postfix_str(f"loss {loss:.3f} valid {scores['valid']:.4f}", refresh=False)
                bar.total = epoch + 1 if last else bar.total  # the bar is full also if the run stops early
                bar.update()
            if last:
                break
    if board is not None:
        board.close()
    seconds = progress["seconds"]
    record = {
        "script": Path(sys.argv[0]).name,
        "seed": seed,
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "metric": task.metric,
        **{k: v for k, v in (task.best.scores or {}).items()},
        "epochs": len(history),
        "ended": ended,
        "steps": getattr(task, "steps", 1),
        # The first epochs are left out, because they compile, plan and capture.
        "seconds_per_epoch": statistics.median(seconds[min(4, len(seconds) - 1) :]) if seconds else None,
        "seconds": progress["total"],
        "peak_memory": peak_memory(device),
        "history": history,
        "stages": {k: v / max(len(history) - first, 1) for k, v in task.stages.seconds.items()},
        "versions": versions(device),
    }
    if args.profile and seconds:
        record["profile"] = profile(task)
    if args.json is not None:
        with args.json.open("a") as file:
            file.write(json.dumps(record) + "\n")
    return record


def versions(device: torch.device) -> dict:
    import dfgnn

    found = {"dfgnn": dfgnn.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    for name in ("torch_geometric", "dgl"):
        if name in sys.modules:
            found[name] = sys.modules[name].__version__
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def main(args, make_task) -> list[dict]:
    """Train with every seed and print the test score over them, at the epochs that validation chooses."""
    how = "nothing of this run is kept: --checkpoint DIR would"
    if args.checkpoint is not None:
        how = f"with --resume the same command goes on from what is in {args.checkpoint}"
    records = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        # Backward runs in the calling thread, as always on the CPU. PyTorch's thread per GPU helps with
        # several GPUs; with one, switching to it and back takes longer than a small layer.
        with programs.interruptible(how), torch.autograd.set_multithreading_enabled(False):
            record = run(args, make_task, seed)
        records.append(record)
        print(
            f"seed {seed}: test {record['metric']} {100 * record['test']:.2f} %, {record['epochs']} epochs, "
            f"{1e3 * record['seconds_per_epoch']:.2f} ms per epoch, {record['seconds']:.1f} s in all, "
            f"peak memory {record['peak_memory'] / 2**20:.0f} MiB",
            flush=True,
        )
        if record["stages"]:
            print("  ms per epoch:", {k: round(1e3 * v, 2) for k, v in record["stages"].items()})
        if "profile" in record:
            print("  profile:", record["profile"])
    tests = [100 * record["test"] for record in records]
    deviation = statistics.stdev(tests) if len(tests) > 1 else 0.0
    print(f"test {records[0]['metric']}: {statistics.mean(tests):.2f} ± {deviation:.2f} %")
    return records
