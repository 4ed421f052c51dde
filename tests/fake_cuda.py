"""A CUDA device that is none: what programs ask of "cuda" is done on the CPU.

It is for dry runs of the branches that programs take on a GPU. Tensors asked for on "cuda" are made on the
CPU, events read the clock, and what a CUDA graph captures runs once, when it is captured. What only a kernel
can do fails as it does without a GPU.
"""

import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CALLS: list[str] = []


class OnCpu(TorchFunctionMode):
    """Moves what is asked for on "cuda" to the CPU."""

    # dfgnn's layers run their library's own forward under a TorchFunctionMode that a program has defined,
    # because it may change what they compute. A module name of torch's keeps them from it.
    __module__ = "torch.fake_cuda"

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        kwargs = {name: _cpu(value) for name, value in (kwargs or {}).items()}
        if getattr(function, "__name__", "") == "pin_memory":
            return args[0]
        return function(*map(_cpu, args), **kwargs)


def _cpu(value):
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


class Event:
    def __init__(self, enable_timing=False):
        self.time = 0.0

    def record(self, stream=None):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        CALLS.append("elapsed_time")
        return max((end.time - self.time) * 1e3, 1e-6)

    def synchronize(self):
        pass


class Stream:
    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass

    def is_capturing(self):
        return False


class CUDAGraph:
    def replay(self):
        CALLS.append("replay")


@contextlib.contextmanager
def _graph(graph, **options):
    CALLS.append("capture")
    yield


class Profile:
    """A stand-in for torch.profiler.profile: one attention kernel, which overlaps half of an exchange."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def export_chrome_trace(self, path):
        names = {"ncclDevKernel_SendRecv": (0, 20), "dfgnn::forward_kernel": (10, 20)}
        events = [
            {"cat": "kernel", "name": name, "ts": start, "dur": length}
            for name, (start, length) in names.items()
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}))


def _profile(real):
    def profile(*, activities, **options):
        on_device = torch.profiler.ProfilerActivity.CUDA in activities
        return Profile() if on_device else real(activities=activities, **options)

    return profile


def _generator_class():
    """A stand-in for torch.Generator that makes CPU generators. It is a class, because annotations in torch
    use it as a type."""
    real = torch.Generator

    class Meta(type):
        def __instancecheck__(cls, instance):
            return isinstance(instance, real)

    class Generator(metaclass=Meta):
        def __new__(cls, device="cpu"):
            return real(_cpu(device))

    return Generator


@contextlib.contextmanager
def fake_cuda(monkeypatch, memory: int = 80 * 10**9):
    """A context in which torch seems to have a CUDA device. Yields the list of the calls for that device."""
    CALLS.clear()

    def counted(name, result=None):
        def call(*args, **kwargs):
            CALLS.append(name)
            return result

        return call

    properties = SimpleNamespace(
        L2_cache_size=50 * 2**20,
        total_memory=memory,
        multi_processor_count=132,
        name="a fake",
        major=9,
        minor=0,
    )
    stream = Stream()
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": counted("set_device"),
        "synchronize": counted("synchronize"),
        "empty_cache": counted("empty_cache"),
        "memory_allocated": counted("memory_allocated", 0),
        "max_memory_allocated": counted("max_memory_allocated", 4096),
        "reset_peak_memory_stats": counted("reset_peak_memory_stats"),
        "mem_get_info": lambda *_: (memory, memory),
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: "a fake",
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": CUDAGraph,
        "graph": _graph,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda *_: stream,
    }
    autocast = torch.autocast
    with monkeypatch.context() as patch:
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch.accelerator, "current_stream", fakes["current_stream"])
        patch.setattr(torch, "Generator", _generator_class())
        patch.setattr(torch, "autocast", lambda kind, *args, **kwargs: autocast(_cpu(kind), *args, **kwargs))
        patch.setattr(torch.profiler, "profile", _profile(torch.profiler.profile))
        with OnCpu():
            yield CALLS


class _Mode(TorchDispatchMode):
    """Changes no results, so that layers, and compiled code, run as without it."""

    only_looks = supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls):
        return True

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __init_subclass__(cls):
        cls.__module__ = OnCpu.__module__


class _NoWaiting(_Mode):
    """Raises where PyTorch would wait for a GPU: for numbers and shapes that depend on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.intersection(func.tags)
        if func.__name__.startswith(("index.", "index_put")):  # by masks alone
            masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
            # One number on the host, which looks like one on the device here, is filled in by a mask.
            fills = len(masks) == len(args[1]) == 1 and len(args) > 2 and args[2].numel() == 1
            waits = masks and not fills
        if waits:
            raise RuntimeError(f"called a synchronizing CUDA operation ({func})")
        return func(*args, **(kwargs or {}))


class _Operations(_Mode):
    """Records operations and the tensors that they were called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.__name__.startswith(("empty", "new_empty")):
            # .data has the same memory and a version of its own: a CUDA graph's writes are counted by nobody.
            call = tree_map(lambda x: x.data if isinstance(x, torch.Tensor) else x, (args, kwargs or {}, out))
            self.calls.append((func, *call))
        return out

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, out in self.calls:
            pairs = zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)))
            for old, new in pairs:
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder:
    """A stand-in for `dfgnn.runtime.cuda_graphs.Recorder` on the CPU. As of a CUDA graph, a replay runs the
    recorded operations in their memory, and none of the Python that called them."""

    device_type = "cpu"

    def __init__(self, device):
        pass

    def running(self):
        return contextlib.nullcontext()

    def without_waiting(self):
        return _NoWaiting()

    def recorded(self, run):
        with _Operations() as operations:
            out = run()
        return out, operations.replay
