"""The cases of scripts/users.py on a GPU: ``python scripts/users.py FOLDER --device cuda --json FILE``.

Each way of training a case has its own process, and all make the same model and inputs:

eager      the repository with the libraries alone
inductor   its modules by ``torch.compile``; reduce-overhead is the same with CUDA graphs
run        as it is under ``python -m dfgnn.run``; run --capture the same with that flag
line       the same with the changed lines of the case
capture    the same as run, its step by ``dfgnn.capture``
compile    its modules by ``torch.compile(backend="dfgnn")``; compile, reduce-overhead with CUDA graphs;
           compile, capture its step by ``dfgnn.capture``; inductor, capture the same without dfgnn's kernels

A step is forward, backward and Adam, timed from idle to idle. Several cases are prepared at once. While steps
of one are timed, in turns, all processes of the others are stopped (SIGSTOP), so that nothing else runs on
the machine or its GPU. The host is slow for seconds at times: where the two least times of a way, in two
turns, differ by more than a twentieth, more turns are taken; a row where they never agreed says by how much
(`disagreement`).

Written per case and size, in float32 and with ``--bfloat16`` under bfloat16's autocast: the first losses;
milliseconds of each step; how much memory a step takes beyond what was allocated before it; and of the
unchanged way and the fastest of dfgnn's the kernels' number and milliseconds in steps that are recorded, with
those of dfgnn and of matrix products apart. A way that fails or takes too long is told.

With ``--device cpu`` the same is rehearsed without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import repositories
import users
from users_table import AGREE, disagreement

UPSTREAM = ("eager", "inductor", "reduce-overhead")
WAYS = (*UPSTREAM, "run", "run --capture", "line", "capture", "compile", "compile, reduce-overhead",
        "compile, capture", "inductor, capture")  # fmt: skip
BY_RUN = ("run", "run --capture", "line", "capture")
CONFIGURATIONS = (("base", "float32"), ("large", "float32"), ("large", "bfloat16"))
#: Turns of timing, at least and at most.
LEAST_TURNS, MOST_TURNS = 4, 16
_PRODUCTS = re.compile(r"gemm|cutlass|nvjet|xmma|splitK|cublas", re.IGNORECASE)


# ---- a way: one process ------------------------------------------------------------------------------------


def use_cores(cores: set[int]) -> None:
    """Moves all threads of this process to these cores."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)


def compile_modules(model: torch.nn.Module, way: str) -> None:
    """Compiles the model, or the modules of a list, in place."""
    mode = "reduce-overhead" if way.endswith("reduce-overhead") else None
    parts = model if isinstance(model, (torch.nn.ModuleList, torch.nn.ModuleDict)) else [model]
    for part in parts.values() if isinstance(parts, torch.nn.ModuleDict) else parts:
        if way.startswith("compile"):
            import dfgnn

            part._compiled_call_impl = dfgnn.compile(part._call_impl, mode=mode, dynamic=False)
        else:
            part.compile(mode=mode, dynamic=False)


class Way:
    """What a process does when it is asked: builds a case, takes steps, times them, records them."""

    def __init__(self, case: str, folder: Path, way: str, device: str):
        self.case, self.folder, self.way = repositories.all_repositories()[case], folder, way
        self.device, self.on_gpu = torch.device(device), device == "cuda"
        self.steps = 0
        # The driver gave this process the cores on which no steps are timed.
        self.others = os.sched_getaffinity(0)
        self.timing = set(range(os.cpu_count() or 1)) - self.others or self.others

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def prepare(self, size: str, dtype: str) -> dict[str, Any]:
        """Builds the case and takes three steps, of which the first compiles."""
        use_cores(self.others)
        self.model = self.loss_of = self.optimizer = None
        torch._dynamo.reset()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
        torch.manual_seed(0)
        scale = self.case.large if size == "large" else 1
        with self.device:
            self.model, self.loss_of = self.case.build(self.folder, scale)
            self.model.to(self.device)  # torch.Tensor(sizes) does not know the default device
        self.autocast = dtype != "float32"
        if self.way.partition(",")[0] in ("inductor", "reduce-overhead", "compile"):
            compile_modules(self.model, self.way)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        if self.way == "capture" or self.way.endswith(", capture"):
            import dfgnn

            self.captured = dfgnn.capture(self.loss_under_autocast, self.model, self.optimizer)
        self.steps = 0
        # dfgnn.run times attention of a script's own in the first step: nothing else may run then.
        return {} if self.way in BY_RUN else self.first_steps()

    def first_steps(self) -> dict[str, Any]:
        start = time.process_time()  # as the process may be stopped meanwhile
        losses = [self.step()]
        first = time.process_time() - start
        losses += [self.step() for _ in range(2)]
        self.synchronize()
        if self.on_gpu:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
                self.step()  # the first profile takes seconds to start
                self.synchronize()
            torch.cuda.empty_cache()
        return {"losses": [float(f"{x.item():.9g}") for x in losses], "first_step_seconds": round(first, 2)}

    def step(self) -> torch.Tensor:
        torch.manual_seed(self.steps)
        self.steps += 1
        if self.way == "capture" or self.way.endswith(", capture"):
            return self.captured()
        self.optimizer.zero_grad()
        loss = self.loss_under_autocast()
        loss.backward()
        self.optimizer.step()
        return loss.detach().clone()  # a CUDA graph would write the next step's loss into the same memory

    def loss_under_autocast(self) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return self.loss_of()

    def time(self, seconds: float) -> dict[str, Any]:
        use_cores(self.timing)
        times: list[float] = []
        self.step()
        end = time.perf_counter() + seconds
        while len(times) < 2 or (time.perf_counter() < end and len(times) < 50):
            self.synchronize()
            start = time.perf_counter()
            self.step()
            self.synchronize()
            times.append(round(1000 * (time.perf_counter() - start), 4))
        return {"ms": times}

    def memory(self) -> dict[str, Any]:
        """What a step takes, in bytes."""
        if not self.on_gpu:
            return {"memory": 0}
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        self.synchronize()
        return {"memory": torch.cuda.max_memory_allocated() - before}

    def record(self, steps: int = 2) -> dict[str, Any]:
        """The kernels of a few steps."""
        if not self.on_gpu:
            return {"kernels": 0, "gpu_ms": 0.0}
        self.step()
        self.synchronize()
        out: dict[str, Any] = {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(steps):
                self.step()
            self.synchronize()
        took: Counter[str] = Counter()
        kernels = 0
        for event in profile.profiler.kineto_results.events():
            if event.device_type() == torch.autograd.DeviceType.CUDA:
                took[event.name()] += event.duration_ns() if hasattr(event, "duration_ns") else 0
                kernels += 1
        total = sum(took.values())
        per = 1e6 * steps
        out["kernels"] = kernels // steps
        out["gpu_ms"] = round(total / per, 4)
        out["dfgnn_ms"] = round(sum(t for name, t in took.items() if "dfgnn" in name) / per, 4)
        out["product_ms"] = round(
            sum(t for name, t in took.items() if "dfgnn" not in name and _PRODUCTS.search(name)) / per, 4
        )
        out["longest"] = [[name[:60], round(t / per, 3)] for name, t in took.most_common(4)]
        return out


def serve(case: str, folder: Path, way: str, device: str) -> None:
    """The main function of a way's process: answers each line of standard input by one of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    served = Way(case, folder, way, device)
    repositories.absent_if_missing("pandas", "scipy", "sklearn", "matplotlib", "ogb", "lightning_utilities")
    for line in sys.stdin:
        asked = json.loads(line)
        what = asked.pop("do")
        try:
            answer = getattr(served, what)(**asked)
        except torch.OutOfMemoryError as error:
            answer = {"failed": f"out of memory: {error}"[:200], "memory_ran_out": True}
            served.model = served.loss_of = served.optimizer = None
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


class Process:
    """The process of a way, from the driver's side."""

    def __init__(self, command: list[str], log: Path, caches: Path):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DGLBACKEND": "pytorch",
            "PYTHONHASHSEED": "0",  # one source of differences between processes
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            # What one way has compiled, another finds.
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        }
        self.log, self.buffer = log, b""
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), env=environment,
            cwd=log.parent, start_new_session=True,  # a group, with the compilers that it starts
        )  # fmt: skip

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, number)

    def ask(self, **what: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(what).encode() + b"\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]

    def answer(self, clock: Callable[[], float], until: float) -> dict[str, Any]:
        """The answer to what was asked. until: when it is given up, by a clock that may stop."""
        while b"\n" not in self.buffer:
            if not select.select([self.process.stdout], [], [], 0.5)[0]:
                if clock() < until:
                    continue
                self.kill()
                return {"failed": "took too long"}
            read = os.read(self.process.stdout.fileno(), 1 << 16)  # type: ignore[union-attr]
            if not read:
                said = self.log.read_text().strip().splitlines() or ["nothing"]
                return {"failed": f"ended, and said last: {said[-1][:300]}"}
            self.buffer += read
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def end(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.process.stdin.close()  # type: ignore[union-attr]
            self.process.wait(timeout=8)
        self.kill()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()


# ---- the driver --------------------------------------------------------------------------------------------


class Driver:
    def __init__(self, args: argparse.Namespace):
        self.args, self.start = args, time.monotonic()
        self.end = self.start + args.until
        # Held while steps are timed, and while a process is started.
        self.alone, self.writing = threading.Lock(), threading.Lock()
        self.quiet, self.quiet_since = 0.0, 0.0  # seconds in which others were stopped
        self.processes: list[Process] = []
        self.rows: list[dict[str, Any]] = []
        self.caches = tempfile.TemporaryDirectory()
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[2:] or cores)  # of all processes but the one whose steps are timed

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.start:6.1f} {text}", flush=True)

    def clock(self) -> float:
        """Seconds in which processes could run: those of timing are left out."""
        now = time.monotonic()
        return now - self.quiet - (now - self.quiet_since if self.quiet_since else 0)

    def started(self, command: list[str], log: Path) -> Process:
        with self.alone:
            self.processes = [process for process in self.processes if process.lives]
            self.processes.append(Process(command, log, Path(self.caches.name)))
            return self.processes[-1]

    @contextlib.contextmanager
    def nothing_else(self, ways: dict[str, Process]) -> Iterator[None]:
        """No process runs but these, which wait until they are asked."""
        with self.alone:
            others = [p for p in self.processes if p not in ways.values() and p.lives]
            self.quiet_since = time.monotonic()
            try:
                for process in others:
                    process.signal(signal.SIGSTOP)
                time.sleep(0.1)  # for the kernels that they had launched
                yield
            finally:
                for process in others:
                    process.signal(signal.SIGCONT)
                self.quiet += time.monotonic() - self.quiet_since
                self.quiet_since = 0.0

    def write(self) -> None:
        if self.args.json:
            head = json.dumps(users.environment(self.args.device))
            with self.writing:
                lines = ",\n".join(map(json.dumps, self.rows))
                self.args.json.write_text(f'{{"environment": {head},\n"rows": [\n{lines}\n]}}\n')

    def commands(self, case: repositories.Repository, into: Path) -> dict[str, list[str]]:
        checkout, device = self.args.folder.resolve() / case.folder, self.args.device
        theirs = users.changed_copy(checkout, case.to_run_here, into / "theirs")
        lines = lines_of(case)
        ours = users.changed_copy(checkout, case.to_run_here + lines, into / "ours") if lines else theirs
        made = {}
        for way in self.args.ways or WAYS:
            if way == "line" and not lines:
                continue
            compiled = way.partition(",")[0] in ("inductor", "reduce-overhead", "compile")
            if compiled and (case.slow_to_compile or way.endswith("reduce-overhead") and not case.graphs):
                continue
            command = [sys.executable]
            if way in BY_RUN:
                command += [
                    "-m",
                    "dfgnn.run",
                    *way.split()[1:],
                    *case.options,
                    "--json",
                    str(into / f"{way}.json"),
                ]
            command += [str(Path(__file__).resolve()), "--worker", case.case, "--way", way]
            command += ["--device", device, str(ours if way == "line" else theirs)]
            made[way] = command
        return made

    def case(self, case: repositories.Repository) -> None:
        if time.monotonic() > self.end - 20:
            self.say(f"{case.case}: no time left")
            return
        with tempfile.TemporaryDirectory() as temporary:
            into = Path(temporary)
            try:
                commands = self.commands(case, into)
            except (RuntimeError, OSError) as error:
                self.say(f"{case.case}: {error}")
                return
            ways = {way: self.started(command, into / f"{way}.log") for way, command in commands.items()}
            row = {
                "case": case.case, "repository": case.source,
                "commit": users.commit_of(self.args.folder / case.folder), "what": case.what,
                "scale": case.large, "lines": len(lines_of(case)), "tolerance": case.tolerance,
                "configurations": {},
            }  # fmt: skip
            self.rows.append(row)
            try:
                for size, dtype in CONFIGURATIONS:
                    if dtype != "float32" and case.case not in self.args.bfloat16:
                        continue
                    if time.monotonic() > self.end:
                        break
                    found = self.configuration(ways, size, dtype)
                    row["configurations"][f"{size}, {dtype}"] = found
                    self.write()
                    self.tell(f"{case.case}, {size} {dtype}", found)
                    eager = found["ways"].get("eager", {})
                    if eager.get("gpu_ms", 0) * case.large > min(eager.get("ms") or [0]):
                        for way in [name for name in ways if name.endswith("reduce-overhead")]:
                            ways.pop(way).end()  # larger graphs keep the GPU busy: CUDA graphs gain nothing
            finally:
                for way in ways.values():
                    way.end()
                reports = {name: into / f"{name}.json" for name in ("run", "run --capture", "line")}
                row["reports"] = {
                    name: {
                        key: told[key] for key in ("layers", "served", "own_attention", "traced", "captured")
                    }
                    for name, file in reports.items()
                    if file.exists() and (told := json.loads(file.read_text()))
                }
                self.write()
                for way in commands:
                    log = (into / f"{way}.log").read_text()
                    if self.args.logs and log:
                        self.args.logs.mkdir(exist_ok=True)
                        name = re.sub(r"\W+", "-", f"{case.case}-{way}")
                        (self.args.logs / f"{name}.log").write_text(log[-20_000:])

    def tell(self, name: str, found: dict[str, Any]) -> None:
        for way, got in found["ways"].items():
            ms = got.get("failed") or f"{min(got['ms']):8.3f} ms"
            more = f"{got.get('gpu_ms', 0):8.3f} of GPU {got.get('kernels', 0):5} kernels "
            more += f"{got.get('memory', 0) / 2**20:7.0f} MiB first {got.get('first_step_seconds', 0)}"
            self.say(f"{name}, {way}: {ms} {more} {got.get('losses')}")
        if found.get("disagreement", 0) > AGREE:
            self.say(f"{name}: refused, the least times differ by {found['disagreement']:.2f}")

    def configuration(self, ways: dict[str, Process], size: str, dtype: str) -> dict[str, Any]:
        """All ways of a case in one size and number format: prepared at once, timed in turns."""
        found: dict[str, dict[str, Any]] = {}
        until = self.clock() + self.args.seconds
        alive = [name for name, way in ways.items() if way.lives]
        for name in alive:
            ways[name].ask(do="prepare", size=size, dtype=dtype)
        for name in alive:
            late = self.args.until - (time.monotonic() - self.start) + self.clock()  # the run's end
            found[name] = ways[name].answer(self.clock, min(until, late))
        with self.nothing_else(ways):
            until = self.clock() + self.args.seconds

            def asked(name: str, **what: Any) -> dict[str, Any]:
                ways[name].ask(**what)
                return ways[name].answer(time.monotonic, time.monotonic() + self.args.seconds)

            for name in alive:
                if found[name].get("memory_ran_out"):  # while other cases ran: try it once more alone
                    found[name] = asked(name, do="prepare", size=size, dtype=dtype)
            for name in alive:
                if name in BY_RUN and "failed" not in found[name]:
                    found[name] = asked(name, do="first_steps")
            timed = [name for name in alive if "failed" not in found[name]]
            apart = 1.0
            for k in range(MOST_TURNS):
                for name in timed:
                    if "failed" not in found[name]:
                        got = asked(name, do="time", seconds=self.args.block)
                        times = got.pop("ms", [])
                        found[name].setdefault("ms", []).extend(times)
                        found[name].setdefault("turns", []).append(min(times, default=math.nan))
                        found[name].update(got)
                live = [name for name in timed if "failed" not in found[name]]
                if k and live:
                    apart = disagreement([found[name]["turns"] for name in live])
                if k >= LEAST_TURNS - 1 and (apart <= AGREE or time.monotonic() > self.end):
                    break
            timed = [name for name in timed if "failed" not in found[name] and found[name].get("ms")]
            ours = [name for name in timed if name not in UPSTREAM]
            fastest = min(ours, key=lambda name: min(found[name]["ms"]), default=None)
            for name in timed:
                found[name].update(asked(name, do="memory"))
                if name in ("eager", "run", "run --capture", fastest):
                    found[name].update(asked(name, do="record"))
        return {"ways": found, "disagreement": round(apart, 4)}

    def stop(self, *_: Any) -> None:
        for process in self.processes:
            process.signal(signal.SIGKILL)  # one that is stopped would stay
        os._exit(1)

    def run(self, cases: list[repositories.Repository]) -> int:
        signal.signal(signal.SIGTERM, self.stop)
        with ThreadPoolExecutor(self.args.at_once) as pool:
            for case, future in [(case, pool.submit(self.case, case)) for case in cases]:
                try:
                    future.result()
                except Exception as error:  # the others' rows are not to be lost
                    self.say(f"{case.case}: {type(error).__name__}: {error}")
        self.write()
        return 0


def lines_of(case: repositories.Repository) -> tuple[repositories.Change, ...]:
    """The changed lines of the case, or of the same case by one call."""
    one_call = repositories.all_repositories().get(f"{case.case}, one call", case)
    return case.lines or one_call.lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of checkouts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases")
    parser.add_argument("--bfloat16", nargs="+", default=(), metavar="CASE", help="in bfloat16, too")
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY", help="these ways")
    parser.add_argument("--at-once", type=int, default=3, help="cases that are prepared at once")
    parser.add_argument("--seconds", type=float, default=150, help="after which a way is given up")
    parser.add_argument("--until", type=float, default=1e6, help="seconds after which nothing is begun")
    parser.add_argument("--block", type=float, default=0.1, help="seconds of timing per way and round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where rows are written")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="where logs of the ways are kept")
    parser.add_argument("--worker", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        serve(args.worker, args.folder, args.way, args.device)
        return 0
    cases = repositories.all_repositories()
    unknown = set(args.only or ()) - cases.keys()
    if unknown:
        parser.error(f"--only: expected names of {', '.join(cases)}, got {', '.join(unknown)}")
    names = args.only or [name for name, case in cases.items() if case.large and not case.lines]
    chosen = [cases[name] for name in names]
    return Driver(args).run([case for case in chosen if (args.folder / case.folder).is_dir()])


if __name__ == "__main__":
    sys.exit(main())
