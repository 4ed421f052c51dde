"""Runs first in each interpreter that a script starts by multiprocessing: patches the libraries there."""

import contextlib
import sys
import traceback
from pathlib import Path


def start(folder: str, impl: str, in_calling_thread: bool) -> None:
    """Imports the libraries, patched if impl is "dfgnn", and counts layers, as the parent process does."""
    root = str(Path(__file__).parents[2])
    sys.path.append(root)  # for these imports alone: the script's sys.path may lack dfgnn's folder
    try:
        import torch

        from dfgnn.run import index_sums
        from dfgnn.run.layers import LIBRARIES, Layers, import_libraries
    finally:
        sys.path.remove(root)
    # The libraries that the script's main module has imported; all, if only its functions import them.
    loaded = [library for library, package in LIBRARIES.items() if package in sys.modules]
    import_libraries(impl, loaded or LIBRARIES)
    if in_calling_thread:
        torch.autograd.set_multithreading_enabled(False)
    if impl == "dfgnn":
        for sums in index_sums.of_this_machine():
            sums.install()
    Layers(impl, in_calling_thread, folder).install()


def as_dgl() -> None:
    """Lets ``import dgl`` give dfgnn.compat in this process."""
    root = str(Path(__file__).parents[2])
    sys.path.append(root)
    try:
        from dfgnn.compat import install_as_dgl
    finally:
        sys.path.remove(root)
    install_as_dgl(force=True)


if __name__ == "dfgnn_run_as_dgl":
    as_dgl()
if __name__ == "dfgnn_run_child":
    try:
        start(*OPTIONS)  # type: ignore[name-defined]  # noqa: F821 - set by runpy.run_path
    except Exception:
        with contextlib.suppress(OSError, AttributeError):  # raised if there is no stderr
            sys.stderr.write("dfgnn.run: this process has the libraries' own layers:\n")
            traceback.print_exc()
