"""The graph whose sources are the edges of another one, on which rows of edges are rows of sources."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..runtime import transforms
from ..runtime.compiling import not_compiled
from ..sparse.csr import CSR
from ..sparse.fixed import FixedStructure
from ..sparse.structure import Side
from . import Graph

_kept: WeakKeyDictionary[Graph, dict[bool, Graph]] = WeakKeyDictionary()


def edges_as_sources(graph: Graph, reverse: bool = False) -> Graph:
    """The graph that leads from each edge of ``graph`` to its destination (reverse: to its source), edge e
    from source e. Kept with ``graph``, whose structure it shares; its other direction, a row per edge, needs
    no sort.
    """
    if type(graph._structure) is not FixedStructure:
        found = _kept.get(graph)
        if found is not None and reverse in found:
            return found[reverse]
    return _edges_as_sources(graph, reverse)


@not_compiled
@torch.inference_mode(False)
@transforms.untransformed()
def _edges_as_sources(graph: Graph, reverse: bool) -> Graph:
    kept, structure = _kept.setdefault(graph, {}), graph._structure
    if isinstance(structure, FixedStructure):  # its edges change
        made = structure.edges_as_sources(reverse)
        if reverse not in kept or kept[reverse]._structure is not made:
            kept[reverse] = Graph._of(made)
    elif reverse not in kept:
        csr = graph.reverse_csr(need_eids=True) if reverse else graph.csr()
        ends = structure.endpoints(torch.int32)[0 if reverse else 1]
        num_rows = graph.num_src if reverse else graph.num_dst
        kept[reverse] = _made(csr, ends, num_rows, graph.is_one_shot)
    return kept[reverse]


def _made(csr: CSR, ends: Tensor, num_rows: int, once: bool) -> Graph:
    """csr: the edges by their rows; ends: the row of each edge, in the user's order."""
    num_edges = ends.numel()
    eids = csr.eids
    if eids is None:
        eids = torch.arange(num_edges, dtype=torch.int32, device=ends.device)
    one_each = torch.arange(num_edges + 1, dtype=torch.int64, device=ends.device)
    by_row, by_edge = CSR(csr.indptr, eids, csr.eids), CSR(one_each, ends, None)
    return Graph._make(Side(num_rows, (by_row, True)), Side(num_edges, (by_edge, True)), once)
