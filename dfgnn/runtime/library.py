"""Finds and loads the compiled libraries, which register the operators under ``torch.ops.dfgnn``.

``libdfgnn_cpu.so`` holds the schemas and the CPU kernels; only the wheel for any platform lacks it, and has
the schemas alone (`uncompiled`). ``libdfgnn_cuda.so`` is loaded
where it was built and torch has CUDA, even without a GPU; if it cannot be, :func:`require_cuda_library` says
why at the first call with a CUDA tensor.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import torch

# DFGNN_LIBRARY_DIR selects other builds of the libraries, such as those of `make sanitize`.
DIRECTORY = Path(os.environ.get("DFGNN_LIBRARY_DIR") or Path(__file__).parents[1] / "lib")


def _load_cpu() -> bool:
    """Load the CPU library; returns whether there is one."""
    path, schemas = DIRECTORY / "libdfgnn_cpu.so", DIRECTORY / "schemas.txt"
    if schemas.is_file() and not path.is_file():
        from . import uncompiled

        uncompiled.define(schemas)
        return False
    if not path.is_file():
        raise ImportError(
            f"dfgnn's compiled library {path} is missing. In a source tree, build it with "
            "`python setup.py build_native`; otherwise reinstall dfgnn."
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"dfgnn's compiled library {path} does not load into torch {torch.__version__}; "
            "dfgnn needs torch >= 2.10 on the platform that it was built for."
        ) from error
    return True


def _load_cuda() -> str | None:
    """Load the CUDA library; returns why that is not possible, or None."""
    path = DIRECTORY / "libdfgnn_cuda.so"
    if torch.version.cuda is None:
        return f"the installed torch {torch.__version__} has no CUDA support. Install a CUDA build of torch."
    if not path.is_file():
        return (
            f"this installation of dfgnn was built without CUDA ({path} is missing). Install a dfgnn wheel "
            "that was built where nvcc is present, or build from source with the CUDA toolkit: "
            "`DFGNN_CUDA=1 pip install --no-build-isolation .`"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path} does not load into torch {torch.__version__}: {error.__cause__ or error}"
    return None


#: Whether kernels are installed. If not, everything is computed by PyTorch's own operations.
compiled = _load_cpu()
_cuda_problem = _load_cuda()


def has_cuda_library() -> bool:
    return _cuda_problem is None


def graph_dropper(device_type: str) -> Callable[[int], None]:
    """The function that frees a graph of ``torch.ops.dfgnn.graph_handle`` in this device type's library."""
    # This is a plain C function and not an operator, because finalizers call it, under any mode. PyDLL keeps
    # the interpreter locked, so that no other thread reads the tensors while they are freed.
    if not compiled:
        return lambda number: None
    drop = getattr(
        ctypes.PyDLL(str(DIRECTORY / f"libdfgnn_{device_type}.so")), f"dfgnn_drop_graph_{device_type}"
    )
    drop.argtypes, drop.restype = [ctypes.c_int64], None
    return drop


def _checksum_of_cpu() -> tuple[Callable[[int, int], int], Callable[[int, int], int]]:
    if not compiled:
        return (lambda address, size: 0,) * 2
    found = []
    for load in (ctypes.PyDLL, ctypes.CDLL):
        function = load(str(DIRECTORY / "libdfgnn_cpu.so")).dfgnn_checksum_cpu
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint64
        found.append(function)
    return found[0], found[1]


#: These map (address, bytes) to a checksum of CPU memory, or to 0 if none can be computed. The short one
#: keeps the interpreter locked, because unlocking costs more than reading little memory.
short_checksum, long_checksum = _checksum_of_cpu()


def require_cuda_library() -> None:
    """Raise RuntimeError, saying how to get CUDA support, unless the CUDA kernels can be called."""
    if _cuda_problem is not None:
        raise RuntimeError(f"dfgnn cannot compute on CUDA tensors: {_cuda_problem}")
