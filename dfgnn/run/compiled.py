"""Modules of a script that hold message passing of their own, traced or compiled.

Such a module is of a class of the script, not of a library, whose own code mentions a segment softmax or sum.

By default PyTorch's compiler records its operations, attention among them becomes dfgnn's
(:mod:`dfgnn.compiling`), and what runs is these operations one by one: nothing is compiled, and results are
those of the script up to rounding. The first call of each class in training is a sample: copies of the module
run forward and backward, as written and traced. The class is traced from then on where that was faster and
gave the same numbers; within a step that is captured as a CUDA graph, where the GPU's own time was shorter.
Outside of training, and within a dispatch mode that sees each call (`dfgnn.capture` has one for batches that
change), modules stay as written.

With ``--compile`` each instance is compiled by Inductor, too, when it is first called, and nothing is timed;
a module within another one is compiled as a part of that.
"""

from __future__ import annotations

import functools
import gc
import inspect
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Proxy
from torch.utils._pytree import tree_leaves

from ..compiling import compile
from ..compiling.backend import listeners
from ..compiling.report import Report
from ..compiling.rewrite import rewritten
from ..runtime import cuda_graphs, eager
from ..runtime import torch_internals as internals
from . import indexing
from .layers import shown
from .sample import Copy, milliseconds, milliseconds_of_gpu, random_state, said, tensors_of, unseen

_MESSAGES = re.compile(r"softmax|scatter|index_add|index_put|segment_reduce|^propagate$|update_all")
_SOFTMAX = re.compile(r"softmax|^exp_?$")
_LIBRARIES = {"torch", "torch_geometric", "torch_scatter", "torch_sparse", "pyg_lib", "dgl", "dfgnn"}

#: The most samples of a class. A further one is taken if more modules are constructed after the last one.
_TRIALS = 3
#: Processor seconds that all samples may take; how often code of a class is recorded, also for other sizes.
_SECONDS, _RECORDS = 20.0, 32
#: Numbers in all arguments of a call below which it is too short to gain. Numbers to be copied above which it
#: is left: on a GPU copies of arguments may fail and are told, on a CPU they would end the process.
_LEAST, _MOST = 1 << 14, 1 << 27
#: How much faster a sample has to be, on a CPU and on a GPU. There it is timed from idle to idle, while a
#: whole step may wait for the host: HGT's layer took 0.88 of its time in the sample, and its step 1.25.
_FASTER, _FASTER_ON_GPU = 1.05, 1.2


class Compiled:
    """Makes modules trace, or compile, themselves while it is installed, and notes what was found in them."""

    def __init__(self, started: str, by_inductor: bool):
        self.started, self.by_inductor = started, by_inductor
        self.modules: Counter[str] = Counter()  # class -> number of instances that are compiled
        self.reports: list[Report] = []
        self.trials: dict[type, list[_Trial]] = {}
        self.seconds = 0.0  # that samples took
        self._undo: list[Callable[[], None]] = []

    def install(self) -> Compiled:
        construct = nn.Module.__init__
        constructed = self._constructed

        def __init__(module: Any, *args: Any, **kwargs: Any) -> None:
            construct(module, *args, **kwargs)
            constructed(module)

        nn.Module.__init__ = __init__  # type: ignore[method-assign, assignment]
        self._undo.append(lambda: setattr(nn.Module, "__init__", construct))
        if self.by_inductor:
            listeners.append(self.reports.append)
            self._undo.append(lambda: listeners.remove(self.reports.append))
        return self

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
        for cls in self.trials:
            _put_back(cls)

    def _constructed(self, module: nn.Module) -> None:
        cls = type(module)
        if not passes_messages(cls) or module._compiled_call_impl is not None:
            return
        if self.by_inductor:
            self.modules[f"{cls.__module__}.{cls.__qualname__}"] += 1
            module._compiled_call_impl = compile(module._call_impl)
            return
        trials = self.trials.setdefault(cls, [])
        if not trials or (trials[-1].kept is not None and len(trials) < _TRIALS):
            trials.append(_Trial(cls, self))  # another one: a new model may have other sizes
        trials[-1].modules += 1

    def rows(self) -> dict[str, Any]:
        """What was compiled, and each attention found: its file and line, its form, or why it has none."""
        return {"modules": dict(self.modules), "attention": self._attention(self.reports)}

    def traced(self) -> list[dict[str, Any]]:
        """A row for each class of which a sample was taken: whether it is traced, milliseconds, and why
        not."""
        return [
            {
                "class": f"{cls.__module__}.{cls.__qualname__}",
                "modules": trial.modules,
                "tried": trial.tried,
                "traced": trial.kept,
                "traced_in_graphs": trial.kept_in_graphs,
                "reason": trial.reason,
                "milliseconds": trial.milliseconds,
                "milliseconds_of_gpu": trial.milliseconds_of_gpu,
                "attention": self._attention(trial.reports) if trial.kept or trial.kept_in_graphs else [],
            }
            for cls, trials in self.trials.items()
            for trial in trials
            if trial.kept is not None
        ]

    def _attention(self, reports: list[Report]) -> list[dict[str, Any]]:
        found = dict.fromkeys(x for report in reports for x in report.found)
        return [
            {"file": shown(x.place.file, self.started), "line": x.place.line, "form": x.form,
             "reason": x.reason}
            for x in found
        ]  # fmt: skip


_call = nn.Module._call_impl
_PLAIN = torch.empty(0)


class _Trial:
    """Computes the calls of the modules of one class. kept: whether calls are traced; None: not known yet.
    kept_in_graphs: whether calls that are captured as CUDA graphs are traced."""

    def __init__(self, cls: Any, whole: Compiled) -> None:
        self.cls, self.whole, self.modules, self.until = cls, whole, 0, math.inf
        self.kept: bool | None = None
        self.kept_in_graphs = False
        self.tried = False
        self.reason, self.milliseconds, self.milliseconds_of_gpu = "", [0.0, 0.0], [0.0, 0.0]
        self.reports: list[Report] = []
        self.changed = False
        self.traced: Callable[..., Any] = _call

        def _call_impl(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self(module, *args, **kwargs)

        cls._call_impl = _call_impl

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _call(module, *args, **kwargs)
        # A replica of DataParallel has its own thread.
        if trains() and not getattr(module, "_is_replica", False):
            if self.kept is None:
                self._ask(module, args, kwargs)
            kept = self.kept_in_graphs if cuda_graphs.in_captured_step() else self.kept
            if kept:
                try:
                    return self._traced(module, args, kwargs)
                except Exception as error:  # the script's own call works, or raises the script's own error
                    self._leave(said(error))
            if self.kept is False and not self.kept_in_graphs:
                _put_back(self.cls)
        return _call(module, *args, **kwargs)

    def _leave(self, reason: str) -> None:
        self.kept, self.kept_in_graphs, self.reason = False, False, reason

    def _traced(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        recorded, start = len(self.reports), time.process_time()
        with internals.Recording(2 * _RECORDS):
            out = self.traced(module, *args, **kwargs)
        if len(self.reports) > recorded:
            self.whole.seconds += time.process_time() - start
            if len(self.reports) > _RECORDS or self.whole.seconds > _SECONDS:
                self._leave("calls of other sizes or settings are recorded anew")
                _put_back(self.cls)
        return out

    def _rewritten(self, graph_module: GraphModule, example_inputs: Any) -> Callable:
        if time.process_time() > self.until:
            raise TimeoutError(f"samples take more than {_SECONDS:.0f} s")
        made, report = rewritten(graph_module, 0)
        self.reports.append(report)
        self.changed |= indexing.rewritten(made) or made is not graph_module
        return made.forward

    def _ask(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tensors = tensors_of(args, kwargs)
        on_gpu = any(x.is_cuda for x in (*tensors, *module.parameters()))
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return
        if any(isinstance(x, Proxy) for x in tree_leaves((args, kwargs))):  # torch.fx.symbolic_trace
            return
        start = time.process_time()
        self.kept, self.until = False, start + _SECONDS - self.whole.seconds
        self.reason = _unfit(module, args, kwargs)
        if self.reason:
            return
        self.tried, self.reason = True, "its sample was interrupted"
        try:
            self.reason = self._sample(module, args, kwargs, on_gpu)
        except Exception as error:  # of copying, recording or running it: the script's own call follows
            self.reason = said(error)
        self.kept, self.until = not self.reason, math.inf
        # What the compiler raised and caught holds frames, with what the script's functions hold, and these a
        # graph of gradients that no CUDA graph could be captured while it existed.
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()  # of the copies
        self.whole.seconds += time.process_time() - start

    def _sample(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], on_gpu: bool) -> str:
        """Why the class is not traced."""
        self.traced = torch.compile(_call, backend=self._rewritten)
        with internals.Recording(2 * _RECORDS), unseen((*tensors_of(args, kwargs), *module.parameters())):
            written, traced = (Copy(module, args, kwargs, call) for call in (_call, self.traced))
            before = random_state(on_gpu)
            expected = written.results()
            return self._measured(written, traced, expected, before, on_gpu)

    def _measured(
        self, written: Copy, traced: Copy, expected: Any, before: list[Tensor], on_gpu: bool
    ) -> str:
        """expected: results of the module as written; before: what they began with in the generators."""
        if _differ(before, before := random_state(on_gpu)):  # compared without dropout
            expected = written.results(training=False)
            if _differ(before, random_state(on_gpu)):
                return "it draws random numbers in eval mode, too: results cannot be compared"
            traced.results()
            got = traced.results(training=False)
        else:
            got = traced.results()
        if not self.reports:
            return "PyTorch's compiler did not record it"
        if not self.changed:
            reasons = dict.fromkeys(str(x) for report in self.reports for x in report.refused)
            return "; ".join(reasons) or "no attention was recognised in it"
        if not agree(expected, got):
            return "traced it gives other numbers"
        del expected, got
        steps = [written.step, traced.step]
        self.milliseconds = milliseconds(steps, on_gpu)
        if on_gpu:
            self.milliseconds_of_gpu = milliseconds_of_gpu(steps, self.milliseconds)
        faster = _FASTER_ON_GPU if on_gpu else _FASTER
        slower = self.milliseconds[1] * faster > self.milliseconds[0]
        in_graphs = self.milliseconds_of_gpu if on_gpu else self.milliseconds
        self.kept_in_graphs = in_graphs[1] * _FASTER <= in_graphs[0]
        return "traced it is not faster" if slower else ""


def _put_back(cls: Any) -> None:
    if "_call_impl" in vars(cls):
        del cls._call_impl


def trains() -> bool:
    """Whether a module may be traced now: in training, and in no mode, transform or recording. Not within a
    backward pass either, nor while saved tensors have hooks: a checkpoint's second forward must save the
    tensors, and draw the random numbers, of its first one."""
    if not torch.is_grad_enabled() or not eager.is_eager(_PLAIN) or internals.tracing_state() is not None:
        return False
    if internals.graph_task() != -1 or internals.top_saved_tensors_hooks(False) is not None:
        return False
    if internals.has_any_global_hook():  # it sees the parts of a module, which a traced one does not call
        return False
    modes = map(internals.function_mode, range(internals.num_function_modes()))
    return all(type(mode).__module__.startswith("torch.") for mode in modes)


def _unfit(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str:
    cls: type = type(module)
    if not _has(cls, _SOFTMAX):
        return "it computes no softmax"
    if any(passes_messages(type(part)) for part in module.modules() if part is not module):
        return "it holds other modules that pass messages"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "several processes train together"
    if draws_elsewhere(cls):
        return "it draws from a random generator of its own, which a sample would advance"
    given = [*args, *kwargs.values()]
    if any(type(x).__module__.startswith(("dgl", "dfgnn.compat")) for x in given):
        return "its message passing is DGL's"
    tensors = tensors_of(given)
    copied = [*tensors_of([vars(part) for part in module.modules()]), *(x for x in tensors if x.is_cpu)]
    if sum(x.numel() for x in copied) > _MOST:
        return "copies of it would be large"
    if all(isinstance(x, (Tensor, int, float, str, type(None))) for x in tree_leaves(given)):
        if all(x.is_floating_point() for x in tensors):
            return "there is no index among its arguments"
        if sum(x.numel() for x in tensors) < _LEAST:
            return "its arguments are small"
    return ""


def _differ(a: list[Tensor], b: list[Tensor]) -> bool:
    return not all(map(torch.equal, a, b))


def agree(a: tuple[list[Tensor], list[Tensor]], b: tuple[list[Tensor], list[Tensor]]) -> bool:
    """Whether outputs, and gradients, are equal up to rounding, which in a sum that cancels is large compared
    with its own result, but not compared with the largest one."""
    for some, others in zip(a, b):
        if [x.shape for x in some] != [x.shape for x in others]:
            return False
        floats = [x.is_floating_point() for x in some]
        pairs = [(x.double(), y.double()) for x, y, f in zip(some, others, floats) if f and x.numel()]
        most = max((float(x.abs().max()) for x, _ in pairs), default=0.0)
        low = any(x.dtype in (torch.float16, torch.bfloat16) for x in some) or torch.is_autocast_enabled()
        error = max((float((x - y).abs().max()) for x, y in pairs), default=0.0)
        if not error <= (5e-2 if low else 1e-3) * most:
            return False
    return True


def draws_elsewhere(cls: Any) -> bool:
    """Whether the code of a class names a generator of random numbers that is not the module's."""
    named = [f.__globals__.get(name) for f in _functions(cls) for name in f.__code__.co_names]
    held = [cell.cell_contents for f in _functions(cls) for cell in f.__closure__ or () if _filled(cell)]
    return any(map(is_generator, (*named, *held)))


def is_generator(x: Any) -> bool:
    """Whether it is a generator of random numbers."""
    numpy = sys.modules.get("numpy")
    names = ("Generator", "RandomState", "BitGenerator")
    of_numpy = [getattr(numpy.random, name) for name in names] if numpy else []
    return isinstance(x, (torch.Generator, random.Random, *of_numpy))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def passes_messages(cls: type) -> bool:
    """Whether a class of the script has message passing of its own."""
    return _has(cls, _MESSAGES)


@functools.cache
def _has(cls: Any, words: re.Pattern) -> bool:
    """Whether the code of a class, or of a base that is no library's, names one of these."""
    return any(words.search(name) for f in _functions(cls) for name in f.__code__.co_names)


def _functions(cls: Any) -> list[FunctionType]:
    """The methods of a class and of its bases that are no library's."""
    own = [x for x in cls.__mro__ if x is not object and x.__module__.partition(".")[0] not in _LIBRARIES]
    functions = (inspect.unwrap(f) for base in own for f in vars(base).values() if callable(f))
    return [f for f in functions if inspect.isfunction(f)]
