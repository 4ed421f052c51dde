"""Makes the graph whose sources are the edges of another one, so that edge tensors can be sources' rows."""

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
    """The graph whose edge e leads from source e, which is edge e of ``graph``, to that edge's destination
    (reverse: to its source). It is cached with ``graph``, whose structure it shares; its other direction, a
    row per edge, needs no sort.
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
    cache, structure = _kept.setdefault(graph, {}), graph._structure
    if isinstance(structure, FixedStructure):  # its edges change
        made = structure.edges_as_sources(reverse)
        if reverse not in cache or cache[reverse]._structure is not made:
            cache[reverse] = Graph._of(made)
    elif reverse not in cache:
        csr = graph.reverse_csr(need_eids=True) if reverse else graph.csr()
        ends = structure.endpoints(torch.int32)[0 if reverse else 1]
        num_rows = graph.num_src if reverse else graph.num_dst
        cache[reverse] = _made(csr, ends, num_rows, graph.is_one_shot)
    return cache[reverse]


def _made(csr: CSR, ends: Tensor, num_rows: int, once: bool) -> Graph:
    """The graph of `edges_as_sources`. csr: the edges by rows; ends: each edge's row, in the user's order."""
    num_edges = ends.numel()
    eids = csr.eids
    if eids is None:
        eids = torch.arange(num_edges, dtype=torch.int32, device=ends.device)
    one_each = torch.arange(num_edges + 1, dtype=torch.int64, device=ends.device)
    by_row, by_edge = CSR(csr.indptr, eids, csr.eids), CSR(one_each, ends, None)
    return Graph._make(Side(num_rows, (by_row, True)), Side(num_edges, (by_edge, True)), once)
