"""Replaces softmax and sums by index of torch_geometric, torch_scatter and DGL by dfgnn's kernels, for
:func:`dfgnn.patch`: scripts build attention of these functions.

Each has the arguments and results of its original, and calls the original where the kernels do not apply:
another device, dtype or dimension, several indices, an active compiler or transform, or so few values that
Python would take longer than is gained. While no patch is active, all calls go to the original.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import functional
from ..engine import by_index
from ..nn._fused_or_upstream import foreign_mode
from ..nn._graph import as_graph
from ..runtime import torch_internals as internals

#: Name of the original -> number of calls that the kernels have computed.
served: Counter[str] = Counter()
#: The libraries that are currently patched.
active: set[str] = set()

# A sum of fewer than _LEAST_SUM elements goes to the original. So does one that needs gradients and has fewer
# than _LEAST_SUM_ROWS rows or _LEAST_SUM_TRAINED elements: an autograd function in Python costs about 20 µs
# more than PyTorch's.
_LEAST_SUM, _LEAST_SUM_ROWS, _LEAST_SUM_TRAINED = 1 << 14, 4096, 1 << 16
# DGL's kernels are faster in a softmax of fewer than _LEAST_DGL elements, or of fewer than _LEAST_DGL_TRAINED
# that need gradients; and in a sum of more than _MOST_DGL_SUM elements that need none.
_LEAST_DGL, _LEAST_DGL_TRAINED, _MOST_DGL_SUM = 1 << 13, 1 << 15, 1 << 16
# The kernel for u_mul_e_sum is faster than DGL's if heads have at least this number of columns.
_LEAST_COLUMNS = 8


def _ready(library: str) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_scripting() or library not in active:
        return False
    return internals.tracing_state() is None and foreign_mode() is None


def _on_cpu(x: Any) -> bool:
    """The first question: on a GPU nothing else is to be asked, as a step there may wait for Python."""
    return isinstance(x, Tensor) and x.is_cpu


def _trains(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _count(index: Tensor, given: Any) -> int | None:
    """The number of groups; None if the original function has to determine it."""
    if given is None:
        return int(index.max()) + 1 if index.numel() else None
    return given if type(given) is int and given >= 0 else None


def _serve(name: str, compute: Callable[[], Tensor]) -> Tensor | None:
    """The result of ``compute``, counted in ``served``; None if an index is out of range, for which the
    original raises its own error."""
    try:
        out = compute()
    except RuntimeError as error:
        if "dfgnn::index_" not in str(error):
            raise
        return None
    served[name] += 1
    return out


def _softmax(name: str, src: Any, index: Any, dim: Any, num_groups: Any, masked: bool = False) -> Any:
    if not isinstance(src, Tensor) or not isinstance(index, Tensor) or type(dim) is not int:
        return None
    if dim not in (0, -src.dim()) or not by_index.takes(src, index) or src.numel() == 0:
        return None
    groups = _count(index, num_groups)
    if groups is None:
        return None
    return _serve(name, lambda: by_index.softmax(src, index, groups, masked))


def _may_sum(library: str, src: Any) -> bool:
    """A first fast check, because small sums take little longer than the other checks."""
    if not _on_cpu(src) or torch.compiler.is_compiling() or internals.tracing_state() is not None:
        return False
    return src.numel() >= _LEAST_SUM and _ready(library)


def _sum(name: str, src: Any, index: Any, dim: Any, num_groups: Any) -> Any:
    if not isinstance(src, Tensor) or not isinstance(index, Tensor) or type(dim) is not int:
        return None
    if dim not in (0, -src.dim()) or not by_index.takes(src, index) or not src.is_contiguous():
        return None
    # The last condition says that there is a single column.
    if _trains(src) and (
        len(src) < _LEAST_SUM_ROWS or src.numel() < _LEAST_SUM_TRAINED or src.numel() == len(src)
    ):
        return None
    groups = _count(index, num_groups)
    return None if groups is None else _serve(name, lambda: by_index.sums(src, index, groups))


# ---- torch_geometric -------------------------------------------------------------------------------------


#: Name -> torch_geometric's function.
_of_torch_geometric: dict[str, Any] = {}


def _original(name: str) -> Any:
    found = _of_torch_geometric.get(name)
    if found is None:
        module = importlib.import_module(f"torch_geometric.utils._{name}")
        found = _of_torch_geometric[name] = getattr(module, name)
    return found


def softmax(src, index=None, ptr=None, num_nodes=None, dim=0):
    """``torch_geometric.utils.softmax``."""
    out = None
    if _on_cpu(src) and _ready("pyg"):
        name = "torch_geometric.utils.softmax"
        if ptr is None:
            out = _softmax(name, src, index, dim, num_nodes)
        else:
            out = _softmax_of_sorted(name, src, ptr, dim)
    if out is None:
        out = _original("softmax")(src, index, ptr, num_nodes, dim)
    return out


def _softmax_of_sorted(name: str, src: Any, ptr: Any, dim: Any) -> Any:
    if sys.modules["torch_geometric.typing"].WITH_SOFTMAX or not isinstance(src, Tensor) or src.dim() == 0:
        return None  # pyg-lib has a kernel for it
    if type(ptr) is not Tensor or ptr.dim() != 1 or ptr.dtype != torch.int64 or not ptr.is_cpu:
        return None
    count = ptr.diff()
    if len(ptr) < 2 or ptr[0] != 0 or ptr[-1] != len(src) or bool((count < 0).any()):
        return None
    # Without torch_scatter, torch_geometric gives other weights to the edges next to one with a score of inf
    # with ptr than with an index: 0 instead of nan. The maximum of scores is nan if one of them is.
    if not by_index.takes_rows(src) or src.numel() == 0 or not float(src.detach().max()) < math.inf:
        return None
    index = torch.repeat_interleave(count, output_size=len(src))
    # If all scores of a group are -inf, torch_geometric returns 0 with ptr, but nan with an index.
    return _softmax(name, src, index, dim, len(count), masked=True)


def scatter(src, index, dim=0, dim_size=None, reduce="sum"):
    """``torch_geometric.utils.scatter``, which also sums the messages of message passing."""
    out = None
    if _may_sum("pyg", src) and (reduce == "sum" or reduce == "add"):
        out = _sum("torch_geometric.utils.scatter", src, index, dim, dim_size)
    if out is None:
        out = _original("scatter")(src, index, dim, dim_size, reduce)
    return out


# ---- torch_scatter ---------------------------------------------------------------------------------------

#: Name -> torch_scatter's function before the patch.
_of_torch_scatter: dict[str, Any] = {}


def scatter_softmax(src, index, dim=-1, *args, **kwargs):
    """``torch_scatter.scatter_softmax``."""
    out = None
    if _on_cpu(src) and _ready("pyg") and not args and kwargs.keys() <= {"dim_size"}:
        out = _softmax("torch_scatter.scatter_softmax", src, index, dim, kwargs.get("dim_size"))
    return _of_torch_scatter["scatter_softmax"](src, index, dim, *args, **kwargs) if out is None else out


def _scatter_sum(name: str, src, index, dim, out, dim_size) -> Any:
    if out is not None or not _may_sum("pyg", src):
        return None
    return _sum(f"torch_scatter.{name}", src, index, dim, dim_size)


def _sum_named(name: str) -> Callable[..., Any]:
    def summed(src, index, dim=-1, out=None, dim_size=None):
        found = _scatter_sum(name, src, index, dim, out, dim_size)
        return _of_torch_scatter[name](src, index, dim, out, dim_size) if found is None else found

    summed.__name__, summed.__doc__ = name, f"``torch_scatter.{name}``."
    return summed


scatter_sum, scatter_add = map(_sum_named, ("scatter_sum", "scatter_add"))


def scatter_of_torch_scatter(src, index, dim=-1, out=None, dim_size=None, reduce="sum"):
    """``torch_scatter.scatter``."""
    found = None
    if reduce in ("sum", "add"):
        found = _scatter_sum("scatter", src, index, dim, out, dim_size)
    return _of_torch_scatter["scatter"](src, index, dim, out, dim_size, reduce) if found is None else found


# ---- DGL -------------------------------------------------------------------------------------------------

#: Name in dgl.ops -> DGL's function.
_of_dgl: dict[str, Any] = {}


def edge_softmax(graph, logits, eids="__ALL__", norm_by="dst"):
    """``dgl.ops.edge_softmax``."""
    # The size is checked first, because reading attributes of DGL's graph takes as long as a small softmax.
    if isinstance(logits, Tensor) and logits.numel() >= _LEAST_DGL:
        large = not _trains(logits) or logits.numel() >= _LEAST_DGL_TRAINED
        whole = isinstance(eids, str) and eids == "__ALL__" and norm_by == "dst"
        if large and whole and _takes_of_edges(graph, logits):
            ours = as_graph(graph)
            served["dgl.ops.edge_softmax"] += 1
            return by_index.softmax(logits, ours.edge_index[1], ours.num_dst)
    return _of_dgl["edge_softmax"](graph, logits, eids, norm_by)


def copy_e_sum(g, x):
    """``dgl.ops.copy_e_sum``, which DGL's ``update_all`` and ``gspmm`` call to sum edge features."""
    small = isinstance(x, Tensor) and (x.numel() <= _MOST_DGL_SUM or _trains(x))
    if small and _takes_of_edges(g, x):
        ours = as_graph(g)
        served["dgl.ops.copy_e_sum"] += 1
        return by_index.sums(x, ours.edge_index[1], ours.num_dst)
    return _of_dgl["copy_e_sum"](g, x)


def u_mul_e_sum(g, x, y):
    """``dgl.ops.u_mul_e_sum``, for ``x [N, H, D]`` and ``y [E, H, 1]``."""
    if (
        isinstance(x, Tensor)
        and isinstance(y, Tensor)
        and _takes_of_edges(g, y)
        and x.dim() == y.dim() == 3
        and x.dtype == y.dtype
        and y.shape[1:] == (x.shape[1], 1)
        and x.shape[2] >= _LEAST_COLUMNS
        and x.shape[0] == g.num_src_nodes()
        and by_index.takes_rows(x)
    ):
        served["dgl.ops.u_mul_e_sum"] += 1
        return functional.spmm(as_graph(g), y.squeeze(2), x)
    return _of_dgl["u_mul_e_sum"](g, x, y)


def _takes_of_edges(graph: Any, x: Any) -> bool:
    return (
        _ready("dgl")
        and x.dim() > 0
        and x.numel() > 0
        and by_index.takes_rows(x)
        and graph._graph.number_of_etypes() == 1
        and x.shape[0] == graph.num_edges()
        and graph.device.type == "cpu"
    )


# ---- what replaces what ----------------------------------------------------------------------------------


def of(library: str) -> dict[Any, Any]:
    """Original function -> its replacement, for the originals that are loaded."""
    if library == "pyg":
        return _of_pyg()
    module = sys.modules["dgl.ops"]
    pairs = {}
    for ours in (edge_softmax, copy_e_sum, u_mul_e_sum):
        theirs = getattr(module, ours.__name__, None)
        # dgl.ops.edge_softmax may be the module of that name, which contains the function
        theirs = getattr(theirs, ours.__name__, theirs)
        if callable(theirs) and theirs is not ours:
            _of_dgl[ours.__name__] = theirs
        if ours.__name__ in _of_dgl:
            pairs[_of_dgl[ours.__name__]] = ours
    return pairs


def _of_pyg() -> dict[Any, Any]:
    pairs = {
        _original("softmax"): softmax,
        _original("scatter"): scatter,
    }
    for theirs, ours in pairs.items():
        # These attributes make torch.jit.script compile the original in place of our function.
        vars(ours).update(__script_if_tracing_wrapper=True, __original_fn=theirs)
    package = sys.modules.get("torch_scatter")
    for ours in (scatter_softmax, scatter_sum, scatter_add, scatter_of_torch_scatter):
        name = "scatter" if ours is scatter_of_torch_scatter else ours.__name__
        theirs = getattr(package, name, None)
        if callable(theirs) and theirs is not ours:
            _of_torch_scatter[name] = theirs
        if name in _of_torch_scatter:
            pairs[_of_torch_scatter[name]] = ours
    return pairs
