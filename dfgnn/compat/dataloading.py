"""``dgl.dataloading``: batches of graphs, and sampled neighbourhoods as blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import data

from ..nn.dgl import DGLError
from .batch import batch
from .block import DGLBlock, ids_by_type, renumbered
from .graph import DGLGraph
from .ids import by_type, ids
from .sparse.structure import pairs


class GraphCollator:
    """Collates samples: graphs into a batch of graphs, tensors and numbers into a tensor, also within tuples,
    lists and dictionaries."""

    def collate(self, items: Sequence[Any]) -> Any:
        first = items[0]
        if isinstance(first, DGLGraph):
            return batch(items)
        if isinstance(first, Mapping):
            return {name: self.collate([item[name] for item in items]) for name in first}
        if isinstance(first, tuple) and hasattr(first, "_fields"):
            return type(first)(*(self.collate(part) for part in zip(*items)))
        if isinstance(first, Sequence) and not isinstance(first, (str, bytes)):
            if any(len(item) != len(first) for item in items):
                raise DGLError("GraphDataLoader: expected samples of one length")
            return [self.collate(part) for part in zip(*items)]
        return data.default_collate(list(items))


class _Shared(data.DataLoader):
    """A loader whose samples the processes of torch.distributed may share."""

    _share: data.DistributedSampler | None = None

    def _share_out(self, samples: Any, seed: int, drop_last: bool, options: dict[str, Any]) -> None:
        shuffle = options.pop("shuffle", False)
        self._share = data.DistributedSampler(samples, shuffle=shuffle, seed=seed, drop_last=drop_last)
        options["sampler"] = self._share

    def set_epoch(self, epoch: int) -> None:
        if self._share is None:
            name = type(self).__name__
            raise DGLError(f"{name}.set_epoch: expected a loader with use_ddp=True")
        self._share.set_epoch(epoch)


class GraphDataLoader(_Shared):
    """A ``torch.utils.data.DataLoader`` whose samples contain graphs; it has the same arguments.

    use_ddp: every process of torch.distributed loads its own part of the samples, drawn by ``ddp_seed`` and
    the number that :meth:`set_epoch` is given.
    """

    def __init__(
        self, dataset: Any, collate_fn: Any = None, use_ddp: bool = False, ddp_seed: int = 0, **options: Any
    ):
        if use_ddp:
            self._share_out(dataset, ddp_seed, options.pop("drop_last", False), options)
        super().__init__(dataset, collate_fn=collate_fn or GraphCollator().collate, **options)


class Sampler:
    """What makes a mini-batch of a graph and seeds."""

    def sample(self, g: DGLGraph, indices: Any) -> Any:
        raise NotImplementedError


class BlockSampler(Sampler):
    """A sampler of blocks; subclasses define ``sample_blocks``. Blocks have all features of the graph, which
    are gathered when they are read; so ``prefetch_...`` have no effect."""

    def __init__(
        self, prefetch_node_feats: Any = None, prefetch_labels: Any = None, prefetch_edge_feats: Any = None,
        output_device: Any = None,
    ):  # fmt: skip
        self.output_device = output_device

    def sample_blocks(self, g: DGLGraph, seed_nodes: Any, exclude_eids: Any = None) -> Any:
        raise NotImplementedError

    def sample(self, g: DGLGraph, seed_nodes: Any, exclude_eids: Any = None) -> Any:
        return self.sample_blocks(g, seed_nodes, exclude_eids)


class NeighborSampler(BlockSampler):
    """Samples neighbourhoods hop by hop: for each of ``fanouts``, from the last to the first, edges into the
    nodes that were reached.

    fanouts: numbers, or dictionaries of such by relation; -1 takes all edges, another at most this number of
    edges per node and relation.  replace: draw edges with replacement, exactly that number of each node with
    edges.  prob: the name of an edge feature to which an edge's probability is proportional; edges with 0
    are not taken.  mask: the name of a boolean edge feature; others are not taken.
    """

    def __init__(
        self, fanouts: Sequence[Any], edge_dir: str = "in", prob: str | None = None, mask: str | None = None,
        replace: bool = False, prefetch_node_feats: Any = None, prefetch_labels: Any = None,
        prefetch_edge_feats: Any = None, output_device: Any = None, fused: bool = True,
    ):  # fmt: skip
        super().__init__(prefetch_node_feats, prefetch_labels, prefetch_edge_feats, output_device)
        if edge_dir != "in":
            raise NotImplementedError(f"NeighborSampler: edge_dir: expected 'in' in dfgnn, got {edge_dir!r}")
        if prob is not None and mask is not None:
            raise ValueError("NeighborSampler: prob, mask: expected at most one of them")
        self.fanouts, self.replace, self.prob = list(fanouts), replace, prob or mask

    def sample_blocks(self, g: DGLGraph, seed_nodes: Any, exclude_eids: Any = None) -> Any:
        """(input nodes, seeds, blocks); seeds that are given more than once are destinations as often, each
        with edges of its own."""
        excluded = {}
        if exclude_eids is not None:
            given = by_type("NeighborSampler", "exclude_eids", g.canonical_etypes, exclude_eids)
            excluded = {g.to_canonical_etype(etype): x for etype, x in given.items()}
        nodes = ids_by_type("NeighborSampler", "seed_nodes", g, seed_nodes)
        blocks: list[DGLBlock] = []
        for fanout in reversed(self.fanouts):
            blocks.insert(0, self._hop(g, nodes, fanout, excluded))
            nodes = [frame["_ID"].long() for frame in blocks[0]._node_frames[: len(nodes)]]
        inputs = {kind: x.to(g.idtype) for kind, x in zip(g.ntypes, nodes)}
        if self.output_device is not None:
            blocks = [block.to(self.output_device) for block in blocks]
            inputs = {kind: x.to(self.output_device) for kind, x in inputs.items()}
        return (inputs if len(inputs) > 1 else inputs[g.ntypes[0]]), seed_nodes, blocks

    def _hop(self, g: DGLGraph, nodes: list[Tensor], fanout: Any, excluded: Mapping[Any, Any]) -> DGLBlock:
        targets, eids = [], []
        for place, (relation, (_, end)) in enumerate(zip(g.canonical_etypes, g._ends)):
            graph = g._graphs[place]
            target, edges = pairs(nodes[end], graph)
            if relation in excluded:
                out = ids(
                    "NeighborSampler",
                    "exclude_eids",
                    excluded[relation],
                    graph.num_edges,
                    torch.int64,
                    g.device,
                )
                keep = ~torch.isin(edges, out)
                target, edges = target[keep], edges[keep]
            weight = None
            if self.prob is not None and self.prob in g._edge_frames[place]:
                weight = g._edge_frames[place][self.prob][edges].double()
                target, edges, weight = (x[weight > 0] for x in (target, edges, weight))
            count = fanout[relation] if isinstance(fanout, Mapping) and relation in fanout else fanout
            count = count[relation[1]] if isinstance(count, Mapping) else count
            if count >= 0:
                keep = _drawn(target, int(count), weight, self.replace)
                target, edges = target[keep], edges[keep]
            targets.append(target)
            eids.append(edges)
        return renumbered(g, nodes, targets, eids)


MultiLayerNeighborSampler = NeighborSampler


class MultiLayerFullNeighborSampler(NeighborSampler):
    """A sampler that takes all neighbours in num_layers hops."""

    def __init__(self, num_layers: int, **options: Any):
        super().__init__([-1] * num_layers, **options)


def _drawn(target: Tensor, count: int, weight: Tensor | None, replace: bool) -> Tensor:
    """Positions of at most ``count`` edges per destination, whose edges are consecutive; or, with
    replacement, of ``count``."""
    _, sizes = target.unique_consecutive(return_counts=True)
    first = sizes.cumsum(0) - sizes
    if replace:
        if weight is None:
            places = (torch.rand(len(sizes), count, device=target.device) * sizes.unsqueeze(1)).long()
            return (first.unsqueeze(1) + places.clamp(max=(sizes - 1).unsqueeze(1))).flatten()
        ends = weight.cumsum(0)
        before, last = ends[first] - weight[first], ends[first + sizes - 1]
        drawn = torch.rand(len(sizes), count, device=target.device, dtype=ends.dtype)
        drawn = before.unsqueeze(1) + drawn * (last - before).unsqueeze(1)
        places = torch.searchsorted(ends, drawn.flatten(), right=True).view_as(drawn)
        return torch.minimum(
            torch.maximum(places, first.unsqueeze(1)), (first + sizes - 1).unsqueeze(1)
        ).flatten()
    # The smallest of exponential variables with these rates: Efraimidis and Spirakis, "Weighted random
    # sampling with a reservoir" (Information Processing Letters 97, 2006).
    key = torch.rand(len(target), device=target.device, dtype=torch.float64)
    key = key if weight is None else -torch.log1p(-key) / weight
    order = key.argsort()
    order = order[target[order].argsort(stable=True)]
    return (
        order[torch.arange(len(target), device=target.device) - first.repeat_interleave(sizes) < count]
        .sort()
        .values
    )


class DataLoader(_Shared):
    """Loads what a sampler makes, (input nodes, seeds, blocks), for batches of seeds: a tensor of nodes, or a
    dictionary of such by type. device: where batches are moved. Others are torch's DataLoader's."""

    def __init__(
        self, graph: DGLGraph, indices: Any, graph_sampler: Sampler, device: Any = None,
        use_ddp: bool = False, ddp_seed: int = 0, use_uva: bool = False, use_prefetch_thread: Any = None,
        use_alternate_streams: Any = None, pin_prefetcher: Any = None, **options: Any,
    ):  # fmt: skip
        if use_uva:
            raise NotImplementedError("DataLoader: use_uva: expected False in dfgnn")
        if not isinstance(indices, (Tensor, Mapping)):
            raise DGLError(
                "DataLoader: indices: expected a tensor of nodes, or a dictionary by type, got "
                f"{type(indices).__name__}"
            )
        self.graph, self.graph_sampler, self._to = graph, graph_sampler, device
        seeds: Any = []
        for kind, x in indices.items() if isinstance(indices, Mapping) else [(None, indices)]:
            seeds += [(kind, node) for node in x.tolist()]
        typed = isinstance(indices, Mapping)

        def sample(chosen: list[Any]) -> Any:
            kinds: dict[Any, list[int]] = {}
            for kind, node in chosen:
                kinds.setdefault(kind, []).append(node)
            found = {
                kind: torch.tensor(x, dtype=graph.idtype, device=graph.device) for kind, x in kinds.items()
            }
            return graph_sampler.sample(graph, found if typed else found[None])

        if use_ddp:
            self._share_out(seeds, ddp_seed, options.get("drop_last", False), options)
        super().__init__(seeds, collate_fn=sample, **options)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for found in super().__iter__():
            yield found if self._to is None else _moved(found, self._to)


def _moved(x: Any, device: Any) -> Any:
    if isinstance(x, Mapping):
        return {name: _moved(part, device) for name, part in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(_moved(part, device) for part in x)
    return x.to(device) if isinstance(x, (Tensor, DGLGraph)) else x
