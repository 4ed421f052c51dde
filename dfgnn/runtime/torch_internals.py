"""Every private name of PyTorch that dfgnn uses, why it is needed, and what would take its place.

A new release of PyTorch may rename or drop any of these; then this is the file to mend. Most are PyTorch's
objects themselves rather than wrappers, because every call uses them and a Python frame costs time.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
import warnings
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as _module
from torch.utils._pytree import tree_flatten, tree_map

__all__ = [
    "FakeTensor",
    "StorageWeakRef",
    "get_eval_frame_callback",
    "temporarily_clear_interpreter_stack",
    "tree_flatten",
    "tree_map",
]

_functorch = torch._C._functorch

# ---- calls below autograd: the engine's autograd functions call operators without recording them again.
# A public guard for redispatch below autograd would replace it; torch.no_grad costs an operator more than the
# kernels of a small graph take.
BelowAutograd = torch._C._AutoDispatchBelowAutograd
WithoutDispatchKeys = torch._C._ExcludeDispatchKeyGuard
DispatchKeySet, DispatchKey = torch._C.DispatchKeySet, torch._C.DispatchKey
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
# A Function's C++ apply, without Python code for torch.func. A flag of Function would replace it.
function_apply = torch._C._FunctionBase.__dict__["apply"]
# F.linear would replace it, if it did not first look for overrides of Tensor in Python.
linear = torch._C._nn.linear
# torch.sparse.mm(reduce=) would replace it, if it returned which element of a row is the extreme.
extremes_of_neighbours = torch.ops.aten._sparse_mm_reduce_impl.default

# ---- what autograd is doing: the user may modify results, and saved tensors may have hooks. Public functions
# of the same meaning would replace these.
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
graph_task = torch._C._current_graph_task_id  # that runs on this thread; -1 outside of backward
backward_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
is_multithreading_enabled = torch._C._is_multithreading_enabled
# torch.nn.modules.module._has_any_global_hook() would read them in a Python frame.
_GLOBAL_HOOKS = tuple(
    getattr(_module, f"_global_{name}")
    for name in (
        "backward_pre_hooks",
        "backward_hooks",
        "forward_pre_hooks",
        "forward_hooks",
        "forward_hooks_always_called",
        "forward_hooks_with_kwargs",
    )
)
has_any_global_hook = functools.partial(any, _GLOBAL_HOOKS)


def meta_counts_all() -> Any:
    """A context in which `nonzero` of a meta tensor returns the shape for a tensor without zeros. A public
    option would replace it."""
    from torch.fx.experimental import _config  # slow to import, and of use on meta alone

    return _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]


# ---- which mode is active, asked at every call. One public question for "plain eager" would replace these.
transforms_active = torch._C._are_functorch_transforms_active
interpreter_stack_top = _functorch.peek_interpreter_stack
is_wrapped_by_functorch = _functorch.is_functorch_wrapped_tensor
is_batched_by_functorch = _functorch.is_batchedtensor
is_wrapped_for_gradients = _functorch.is_gradtrackingtensor
unwrap_functorch = _functorch.get_unwrapped
is_functional_tensor = torch._is_functional_tensor
num_dispatch_modes = torch._C._len_torch_dispatch_stack
num_function_modes = torch._C._len_torch_function_stack
foreach_mul = torch._foreach_mul
dispatch_mode, function_mode = torch._C._get_dispatch_stack_at, torch._C._get_function_stack_at


def dispatch_mode_intervenes() -> bool:
    """Whether a dispatch mode is active that may compute something else; one with ``only_looks`` does not."""
    modes = map(dispatch_mode, range(num_dispatch_modes()))
    return not all(getattr(mode, "only_looks", False) for mode in modes)


# Modes before dispatch, which torch counts in four Python frames, turn this key on.
is_key_included, PRE_DISPATCH = torch._C._dispatch_tls_is_dispatch_key_included, DispatchKey.PreDispatch
DisableTorchFunction = torch._C.DisableTorchFunction
tracing_state = torch._C._get_tracing_state
# torch.compiler.is_compiling() takes two Python frames, `is_dynamo_recording() or
# compiler._is_compiling_flag` takes one. While it records, Dynamo takes `is_dynamo_recording()` for True, and
# so never comes to read the flag.
compiler, is_dynamo_recording = torch.compiler, torch.compiler.is_dynamo_compiling
# Unlike torch.compiler.disable, `_disable_dynamo` does not import the compiler where nothing is compiled.
disable_dynamo = _disable_dynamo

# The modules of functions in the graphs that Dynamo records; some descriptors of tensors have none.
MODULES_OF_FUNCTIONS = {
    "torch", "torch._C._nn", "torch.nn.functional", "torch.functional", "_operator", None
}  # fmt: skip

# ---- operations that are documented nowhere but widely used.
assert_async = torch._assert_async
assert_scalar = torch.ops.aten._assert_scalar.default  # by which Dynamo checks numbers that it records
foreach_copy = torch._foreach_copy_


@contextlib.contextmanager
def made_on_host() -> Any:
    """A context in which ``torch.tensor(numbers, device=...)`` is a tensor on the host first, whose copy a
    dispatch mode sees."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def without_frame(op: Any) -> Any:
    """The C++ function that an operator's overload calls. OpOverload.__call__ only calls it, at the cost of a
    Python frame."""
    return op._op


def is_exporting() -> bool:
    """torch.compiler.is_exporting, which up to torch 2.11 is True for everything that Dynamo records."""
    return torch.compiler._is_exporting_flag


def exports_onnx() -> bool:
    """torch.onnx.is_in_onnx_export, but faster where nothing is being exported or traced."""
    recording = torch.compiler._is_exporting_flag or tracing_state() is not None
    return recording and torch.onnx.is_in_onnx_export()


def disable_current_modes() -> Any:
    """A context without dispatch modes; its module is imported by compilers only."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def inductor_uses_cuda_graphs() -> bool:
    """Whether Inductor is loaded and set to put what it compiles into CUDA graphs."""
    inductor = sys.modules.get("torch._inductor.config")
    return inductor is not None and inductor.triton.cudagraphs


#: What a CUDA graph that Inductor cuts may do, and the remedy.
OF_CUTS = (
    "torch 2.11 was seen to compute other gradients where it cuts a CUDA graph: set "
    "torch._inductor.config.graph_partition = False"
)


def inductor_cuts_cuda_graphs() -> bool:
    """Whether Inductor, where an operator cannot be in a CUDA graph, captures what is before and behind it as
    CUDA graphs of their own, instead of capturing nothing."""
    inductor = sys.modules.get("torch._inductor.config")
    return inductor_uses_cuda_graphs() and getattr(inductor, "graph_partition", False)


def storage_of(x: Any) -> Any:
    """A number that is equal for tensors that share memory, fake tensors included; None for layouts that do
    not consist of one storage. torch.Tensor.data_ptr would replace it, if fake tensors had one."""
    return x.untyped_storage()._cdata if x.layout == torch.strided else None


def compiled_calls(module: Any) -> list[str]:
    """The attributes of a module that hold compiled code: ``module.compile()`` and ``torch.compile(module)``.
    A public way to ask would replace it."""
    names = ["forward"] * isinstance(module, torch._dynamo.OptimizedModule) + ["_compiled_call_impl"]
    return [name for name in names if module.__dict__.get(name) is not None]


#: Options of Inductor that are off because of defects of torch 2.11, seen on a GPU with dfgnn's operators.
#: graph_partition cuts a graph at an operator that a CUDA graph cannot contain; such a graph then added rows
#: up in memory that another of its parts had cleared, and got other numbers. Without it, it runs without CUDA
#: graphs. coalesce_tiling_analysis chooses tiles with which a sum over the rows of a slice read at addresses
#: that are not aligned.
_AVOIDED = {"graph_partition": False, "triton.coalesce_tiling_analysis": False}


def names_of_inductor() -> list[str]:
    """The names of Inductor's options."""
    from torch._inductor import list_options

    return list_options()


def inductor_modes() -> list[str]:
    from torch._inductor import list_mode_options

    return [*dict.fromkeys(("default", *list_mode_options()))]


def inductor_options(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The options of Inductor that a mode of ``torch.compile`` stands for, updated by ``options``."""
    from torch._inductor import list_mode_options

    return {**(list_mode_options(mode) if mode and mode != "default" else {}), **options}


def compile_fx(graph_module: Any, example_inputs: Any, options: dict[str, Any], ours: bool) -> Any:
    """Dynamo's graph, compiled as ``torch.compile(backend="inductor", options=options)`` would. If the graph
    has operators of dfgnn (``ours``), the options of `_AVOIDED`, with which Inductor is known to compute
    wrong numbers, are off. Inductor has no public function for this."""
    from torch._inductor import config as known
    from torch._inductor.compile_fx import compile_fx as inductor

    avoided = {name: value for name, value in _AVOIDED.items() if ours and name in known.get_config_copy()}
    return inductor(graph_module, example_inputs, config_patches={**avoided, **options})


@contextlib.contextmanager
def compiling() -> Any:
    """A context within which torch.compiler.is_compiling() is True. From torch 2.13 on it is True anyway
    while a backend works."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def tag_compiled_code(tag: str) -> None:
    """Makes torch.compile reuse code that it cached on disk only where the tag is the same. The cache's own
    key has the names of operators, but not what dfgnn replaces them by, which may change from version to
    version."""
    config = torch.compiler.config
    config.cache_key_tag = f"{config.cache_key_tag} {tag}".strip()


def compiled(model: Any, backend: Any, dynamic: bool | None, fullgraph: bool) -> Any:
    """The same as ``torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph)``, but the
    code runs within `NumbersRecorded`, and so is recorded within it. torch.compile has no argument for such a
    context of a backend."""
    backend.backend_ctx_ctor = NumbersRecorded
    return torch._dynamo.optimize(backend, nopython=fullgraph, dynamic=dynamic)(model)


class NumbersRecorded:
    """A context within which Dynamo records ``int(tensor)`` as a symbol, also in other threads."""

    __slots__ = ()
    _depth, _before = 0, False

    def __enter__(self) -> None:
        cls, config = NumbersRecorded, torch._dynamo.config
        if cls._depth == 0:
            cls._before, config.capture_scalar_outputs = config.capture_scalar_outputs, True
        cls._depth += 1

    def __exit__(self, *error: Any) -> None:
        cls = NumbersRecorded
        cls._depth -= 1
        if cls._depth == 0:
            torch._dynamo.config.capture_scalar_outputs = cls._before

    @classmethod
    def restart(cls) -> None:
        """Lets Dynamo record this code again, so that its graph ends at ``int(tensor)``; a backend calls
        this. Does nothing if the program itself has set Dynamo to record numbers."""
        if cls._depth and not cls._before and torch._dynamo.config.capture_scalar_outputs:
            torch._dynamo.config.capture_scalar_outputs = False
            raise torch._dynamo.exc.TensorifyScalarRestartAnalysis("dfgnn: numbers that nothing needs")


#: Settings of Dynamo while `Recording`.
_RECORDING = {
    "capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True, "recompile_limit": 8,
    "skip_nnmodule_hook_guards": False, "trace_numpy": False, "rewrite_assert_with_torch_assert": False,
}  # fmt: skip


class Recording:
    """A context within which Dynamo records ``int(tensor)`` and sizes that depend on values as symbols,
    records the same code up to ``times`` times, records it anew when a submodule gets a hook, and calls
    numpy's functions and assertions about values as they are."""

    __slots__ = ("before", "times")

    def __init__(self, times: int):
        self.times = times

    def __enter__(self) -> None:
        config = torch._dynamo.config
        self.before = {name: getattr(config, name) for name in _RECORDING}
        for name, value in _RECORDING.items():
            setattr(config, name, value)
        config.recompile_limit = self.times

    def __exit__(self, *error: Any) -> None:
        for name, value in self.before.items():
            setattr(torch._dynamo.config, name, value)


def has_higher_order_operators(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph that Dynamo has recorded calls operators that take functions, such as checkpoints."""
    return any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in graph.graph.nodes)


def is_of_compiler(error: BaseException) -> bool:
    """Whether an error was raised while Dynamo recorded code: by an assertion of its own on what it does not
    know, say."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(file == torch._dynamo.convert_frame.__file__ for file in files)


def aot_eager(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """What runs a graph's operations one by one, forward and backward recorded by PyTorch's compiler."""
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def graph_break(reason: str) -> None:
    """Makes Dynamo end its graph here; called while it records."""
    torch._dynamo.graph_break(reason)


def replaced_kernels(kernels: dict[str, Any], device_type: str) -> tuple[Any, dict[str, Any]]:
    """Registers functions for operators of PyTorch on a type of device. Returns what `put_back_kernels`
    takes, and the kernels that they replace; does nothing without torch.library.get_kernel."""
    if not hasattr(torch.library, "get_kernel"):
        return None, {}
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(device_type.upper()))
    key = device_type.upper()
    theirs = {name: torch.library.get_kernel(f"aten::{name}", key) for name in kernels}
    made = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # PyTorch warns that an operator's kernel is replaced
        warnings.simplefilter("ignore")
        for name, kernel in kernels.items():
            made.impl(name, kernel, key)
    return made, {name: functools.partial(kernel.call_boxed, keys) for name, kernel in theirs.items()}


def put_back_kernels(made: Any) -> None:
    """Undoes `replaced_kernels`."""
    if made is not None:
        made._destroy()


def parametrizations_are_cached() -> bool:
    """Whether the context `torch.nn.utils.parametrize.cached` is entered."""
    return bool(torch.nn.utils.parametrize._cache_enabled)


def current_stream(device: torch.device) -> int:
    """The stream of a device on which operators run now, as a number; 0 on the CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def gpu_sleep(milliseconds: float) -> None:
    """Launches a kernel on the current stream that only waits, for about this long on a GPU of up to 2 GHz.
    PyTorch has no public function for that; a product of large matrices could take its place."""
    torch.cuda._sleep(int(2e6 * milliseconds))
