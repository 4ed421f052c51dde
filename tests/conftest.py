import contextlib
import faulthandler
import gc
import hashlib
import logging
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key
from covering import EXHAUSTIVE
from forked import LAYERS, PLAIN, Interpreters

# Inductor compiles in this process: each process of its pool would import torch first, which takes longer
# than the few small kernels of the tests.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# What Inductor keeps on disk of other sources is not found: it may call operators that are gone.
_sources = b"".join(path.read_bytes() for path in sorted((Path(__file__).parents[1] / "dfgnn").rglob("*.py")))
torch.compiler.config.cache_key_tag += hashlib.sha256(_sources).hexdigest()
# Where several processes share the tests (pytest -n), each has a core of its own.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
HAS_GPU = torch.cuda.is_available()


def pytest_report_header():
    return None if HAS_GPU else "tests marked gpu are left out: no CUDA GPU, or a torch without CUDA"


def pytest_make_parametrize_id(val):
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """All that is imported and collected stays: looking for garbage in it takes a sixth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config, items):
    """Tests that need a GPU are left out where there is none, rather than skipped one by one; and those
    marked exhaustive, unless they are asked for."""
    marks = [mark for mark, wanted in (("gpu", HAS_GPU), ("exhaustive", EXHAUSTIVE)) if not wanted]
    left_out = [item for item in items if any(map(item.get_closest_marker, marks))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]


def pytest_collection_finish(session):
    """Freezes what was imported and collected, which lives until the end, so that garbage collections in the
    tests need not visit it. An abort ends the process with a traceback, as before DGL was imported, whose
    handler of SIGABRT frees memory: that waits forever where the heap is damaged."""
    gc.collect()
    gc.freeze()
    faulthandler.disable()
    faulthandler.enable(session.config.stash[fault_handler_stderr_fd_key])


@pytest.fixture(params=["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if HAS_GPU else [])])
def device(request):
    return request.param


@pytest.fixture(scope="session")
def dfgnn_run():
    """``python -m dfgnn.run``, in a fork of one process that has imported all that it needs."""
    forks = Interpreters(LAYERS)
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def plain_python():
    """Runs code in a process that has imported torch, and neither dfgnn nor the libraries; gives what it
    printed."""
    forks = Interpreters(PLAIN)

    def run(code, *words, status=0, **options):
        done = forks(*words, code=code, **options)
        assert done.returncode == status, done.stderr
        return done

    run.forks = forks
    yield run
    forks.close()


@pytest.fixture(autouse=True, scope="module")
def _freeze():
    """Freezes also the objects that earlier test files and compilers have left."""
    gc.collect(1)
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _reducers_go_first():
    """No DistributedDataParallel outlives the process group. Else its reducer would be the last to hold the
    group: freeing it joins gloo's threads while it holds the GIL, for which one of these threads may wait."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel as DDP

    made, construct, destroy = weakref.WeakSet(), DDP.__init__, distributed.destroy_process_group

    def constructed(module, *args, **kwargs):
        made.add(module)
        construct(module, *args, **kwargs)

    def destroyed(group=None):
        alive = len(made)
        if alive:
            gc.collect()
            gone = alive - len(made)
            pytest.fail(
                f"{alive} DistributedDataParallel outlive their process group, {gone} of them in reference "
                "cycles: drop them and call gc.collect() before destroy_process_group()"
            )
        destroy(group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDP, "__init__", constructed)
        patch.setattr(distributed, "destroy_process_group", destroyed)
        yield


@pytest.fixture(autouse=True)
def _seed():
    if HAS_GPU:
        torch.manual_seed(0)
    else:  # faster than torch.manual_seed, which also records the call stack for a later start of CUDA
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_said_yet():
    """A layer warns once per class and reason that it falls back: the private record of these warnings is
    cleared."""
    module = sys.modules.get("dfgnn.nn._fused_or_upstream")
    if module is not None:
        module._warned.clear()


@pytest.fixture
def threads():
    """Sets the number of threads up to the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads):
    """On small graphs more threads only wait for each other, and with more torch.compile leaves a sum along
    an index to eager code."""
    threads(1)


@pytest.fixture
def fresh_dynamo():
    """Nothing that was compiled before, or that this test compiles after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def count_calls(monkeypatch):
    """Returns a function that replaces a function of an owner by one that also notes its calls, and gives
    the list that grows with each."""

    def counted(owner, name):
        calls, function = [], getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kw: calls.append(1) or function(*args, **kw))
        return calls

    return counted


@pytest.fixture
def no_collection():
    """The garbage collector does not run: what is freed within the test, references alone have freed."""
    gc.disable()
    yield
    gc.enable()


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @contextlib.contextmanager
    def at_level(self, level):
        root = logging.getLogger()
        before = root.level
        root.setLevel(level)
        yield
        root.setLevel(before)


@pytest.fixture
def caplog():
    """Collects the records of all loggers, also of those with propagate=False, such as torch's."""
    found, root = Records(), logging.getLogger()
    known = (x for x in root.manager.loggerDict.values() if isinstance(x, logging.Logger))
    loggers = [root, *(logger for logger in known if not logger.propagate)]
    for logger in loggers:
        logger.addHandler(found)
    yield found
    for logger in loggers:
        logger.removeHandler(found)


@pytest.fixture
def late_capture(monkeypatch):
    """Delays what capturing a CUDA graph itself writes on its stream, such as the state of dropout's
    generator. Returns a function that the captured code calls before dropout: it sleeps longer than the
    delay, so that the capture is right, and only a replay that does not wait reads the state too early."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def late(graph, *args, **kwargs):
        torch.cuda._sleep(200_000_000)
        begin(graph, *args, **kwargs)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    return lambda: torch.cuda._sleep(600_000_000)
