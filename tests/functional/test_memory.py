"""Nothing is kept of calls, graphs and failures: memory stays where it is over hundreds of steps."""

import collections
import contextlib
import ctypes
import gc
import random

import pytest
import torch
from loading import load

from dfgnn.graph import cache as _kept
from dfgnn.graph import of_dgl


@pytest.fixture(scope="module")
def soak():
    return load("scripts/soak.py")


def tensors_of(size, step):
    """The largest number of tensors of at least this many bytes that a step allocates and holds at once."""
    step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as found:
        step()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    most = held = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if abs(event.nbytes()) >= size:
            held += 1 if event.nbytes() > 0 else -1
            most = max(most, held)
    return most


@pytest.mark.parametrize("learns", [False, True], ids=["", "learned attributes"])
@pytest.mark.parametrize(
    "name, edge_dim, held",
    [
        *(("GATConv", None, 0), ("GATv2Conv", None, 0), ("TransformerConv", None, 0)),
        *(("GATConv", 64, 0), ("GATv2Conv", 64, 0), ("TransformerConv", 15, 0), ("TransformerConv", 16, 2)),
    ],
)
def test_messages_are_not_stored(name, edge_dim, held, learns):
    """README, "Memory": tensors of E x H x D numbers in a training step on the CPU."""
    pyg = pytest.importorskip("dfgnn.nn.pyg", reason="torch_geometric is not installed")
    edges, heads, dim = 20_000, 4, 16
    options = {} if name == "TransformerConv" else {"add_self_loops": False}
    layer = getattr(pyg, name)(16, dim, heads, edge_dim=edge_dim, **options)
    x, edge_index = torch.randn(300, 16), torch.randint(300, (2, edges))
    attr = () if edge_dim is None else (torch.randn(edges, edge_dim, requires_grad=learns),)

    def step():
        layer(x, edge_index, *attr).sum().backward()
        for leaf in (*layer.parameters(), *attr):
            leaf.grad = None

    # Learned attributes have gradients, which here are as large, and their projection is folded.
    held = int(edge_dim == heads * dim) if learns else held
    assert tensors_of(0.9 * 4 * edges * heads * dim, step) == held


class _Malloc(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def bytes_in_use(device):
    """Bytes that are allocated on the host and on the device. Host: malloc's, 0 without glibc; without the
    large arrays that malloc maps one by one, because the lists of this test are such arrays."""
    host, mallinfo2 = 0, getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is not None:
        mallinfo2.restype = _Malloc
        host = mallinfo2().uordblks
    return host, torch.cuda.memory_allocated() if device == "cuda" else 0


def live():
    """How many objects of each type there are, and entries of the layers' caches."""
    gc.collect()
    found = collections.Counter(type(x).__qualname__ for x in gc.get_objects())
    caches = of_dgl._from_dgl, of_dgl._of_frame, _kept._cache
    counted = "Tensor", "Graph", "Structure", "Side", "Planner", "Direction", "Plan", "Prepared", "traceback"
    contexts = [name for name in found if name.endswith("Backward")]
    return {name: found[name] for name in (*counted, *contexts)}, [len(cache) for cache in caches]


def run(soak, device, steps, seed, step=None):
    """Steps of scripts/soak.py, each with a graph of its own; some raise."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layers = soak.made(device)
    for _ in range(steps):
        graph = soak.random_graph(rng, device)
        with contextlib.suppress(soak.Interrupted):
            (step or soak.step)(rng, graph, layers)


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch, one_thread):
    """One thread, because steps are small, and no oneDNN, which caches code for every shape (see soak.py)."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def grown(soak, device, step=None):
    """Over 100 steps: bytes of the host and the device; objects and entries before and after.

    Bytes are the fewest of three runs: a library's own buffer comes once, a leak every time.
    """
    run(soak, device, 60, seed=1, step=step)
    before, bytes_ = live(), []
    for seed in (2, 3, 4):
        used = bytes_in_use(device)
        run(soak, device, 100, seed=seed, step=step)
        after = live()
        bytes_.append([b - a for a, b in zip(used, bytes_in_use(device))])
    return [min(column) for column in zip(*bytes_)], before, after


def test_steps_leave_nothing(soak, device):
    (host, on_device), before, after = grown(soak, device)
    assert after == before
    assert host < (1 << 19 if device == "cpu" else 16 << 20)
    assert on_device <= 0


def test_a_leak_is_seen(soak):
    """The test notices a graph that is kept in every tenth step, and memory that C code does not free."""
    kept, blocks, libc = [], [], ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def keeps(rng, graph, layers):
        if rng.random() < 0.1:
            kept.append(graph)
            blocks.append(libc.malloc(ctypes.c_size_t(100_000)))

    (host, _), before, after = grown(soak, "cpu", keeps)
    assert after[0]["Graph"] > before[0]["Graph"]
    assert host > 1 << 19 or not hasattr(libc, "mallinfo2")
    for block in blocks:
        libc.free(block)
