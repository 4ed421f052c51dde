"""``dgl.dataloading``: batches of graphs, and sampled neighbourhoods as blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import data

from ..graph import Graph
from ..nn import DGLError
from .block import DGLBlock, to_block
from .create import _homogeneous, batch
from .graph import DGLGraph


class GraphCollator:
    """Collates samples: graphs into a batch of graphs, tensors and numbers into a tensor, also within tuples,
    lists and dictionaries."""

    def collate(self, items: Sequence[Any]) -> Any:
        first = items[0]
        if isinstance(first, DGLGraph):
            return batch(items)
        if isinstance(first, dict):
            return {name: self.collate([item[name] for item in items]) for name in first}
        if isinstance(first, tuple) and hasattr(first, "_fields"):
            return type(first)(*(self.collate(part) for part in zip(*items)))
        if isinstance(first, (tuple, list)):
            return [self.collate(part) for part in zip(*items)]
        return data.default_collate(list(items))


class GraphDataLoader(data.DataLoader):
    """A ``torch.utils.data.DataLoader`` whose samples contain graphs; it has the same arguments."""

    def __init__(self, dataset: Any, collate_fn: Any = None, use_ddp: bool = False, **options: Any):
        if use_ddp:
            raise NotImplementedError("GraphDataLoader: use_ddp: expected False; give a DistributedSampler")
        super().__init__(dataset, collate_fn=collate_fn or GraphCollator().collate, **options)


class BlockSampler:
    """Samples neighbourhoods hop by hop: for each of ``fanouts``, from the last to the first, edges into the
    nodes that were reached. -1 takes all edges; another fanout at most this number of edges per node,
    without replacement."""

    def __init__(self, fanouts: Sequence[int], **options: Any):
        given = {name: value for name, value in options.items() if value not in (None, False, "in")}
        if given:
            raise NotImplementedError(f"{type(self).__name__}: dfgnn has no {', '.join(given)}")
        self.fanouts = list(fanouts)

    def sample_blocks(self, g: DGLGraph, seed_nodes: Any, exclude_eids: Any = None) -> tuple:
        """(input nodes, seeds, blocks); features ``_ID`` of the blocks hold numbers of nodes and edges in
        g."""
        if exclude_eids is not None:
            raise NotImplementedError(f"{type(self).__name__}: exclude_eids: expected None in dfgnn")
        nodes = g._ids(seed_nodes)
        blocks: list[DGLBlock] = []
        seeds = nodes
        for fanout in reversed(self.fanouts):
            block = _hop(g, nodes, fanout)
            blocks.insert(0, block)
            nodes = block.srcdata["_ID"]
        return nodes, seeds, blocks

    sample = sample_blocks


class NeighborSampler(BlockSampler):
    pass


class MultiLayerNeighborSampler(BlockSampler):
    pass


class MultiLayerFullNeighborSampler(BlockSampler):
    """A sampler that takes all neighbours in num_layers hops."""

    def __init__(self, num_layers: int, **options: Any):
        super().__init__([-1] * num_layers, **options)


def _hop(g: DGLGraph, nodes: Tensor, fanout: int) -> DGLBlock:
    if not g.is_homogeneous or g.is_block:
        raise NotImplementedError("dgl.dataloading: expected one type of nodes and edges in dfgnn")
    src, dst, eids = g.in_edges(nodes, form="all")
    if fanout >= 0:
        keep = _drawn(dst, fanout)
        src, dst, eids = src[keep], dst[keep], eids[keep]
    hop = _homogeneous(Graph.from_coo(src, dst, num_nodes=g.num_nodes()), None, {"_ID": eids})
    block = to_block(hop, nodes)
    for name, x in g.ndata.items():
        block.srcdata[name], block.dstdata[name] = x[block.srcdata["_ID"]], x[nodes]
    for name, x in g.edata.items():
        block.edata[name] = x[eids]
    block.srcdata["_ID"], block.dstdata["_ID"], block.edata["_ID"] = block.srcdata["_ID"], nodes, eids
    return block


def _drawn(dst: Tensor, fanout: int) -> Tensor:
    """Positions of at most ``fanout`` edges per destination; all such sets are equally likely."""
    order = torch.rand(len(dst), device=dst.device).argsort()
    order = order[dst[order].argsort(stable=True)]
    ends = dst[order]
    _, counts = ends.unique_consecutive(return_counts=True)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return order[torch.arange(len(dst), device=dst.device) - first < fanout].sort().values


# Arguments of DGL's loader that do not change results, and are ignored.
_OF_THREADS = "ddp_seed", "use_prefetch_thread", "use_alternate_streams", "pin_prefetcher"


class DataLoader(data.DataLoader):
    """Loads (input nodes, seeds, blocks) for batches of seeds; further arguments are torch's DataLoader's."""

    def __init__(
        self, graph: DGLGraph, indices: Any, graph_sampler: BlockSampler, device: Any = None, **options: Any
    ):
        for name in ("use_ddp", "use_uva"):
            if options.pop(name, False):
                raise NotImplementedError(f"DataLoader: {name}: expected False in dfgnn")
        for name in _OF_THREADS:
            options.pop(name, None)
        if not isinstance(indices, (Tensor, list)):
            raise DGLError(f"DataLoader: indices: expected a tensor of nodes, got {type(indices).__name__}")
        self.graph, self._to = graph, device
        seeds = torch.as_tensor(indices)

        def sample(nodes: list[Tensor]) -> Any:
            return graph_sampler.sample(graph, torch.stack(nodes))

        super().__init__(list(seeds), collate_fn=sample, **options)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for nodes, seeds, blocks in super().__iter__():
            if self._to is not None:
                nodes, seeds = nodes.to(self._to), seeds.to(self._to)
                blocks = [block.to(self._to) for block in blocks]
            yield nodes, seeds, blocks


NodeDataLoader = DataLoader
