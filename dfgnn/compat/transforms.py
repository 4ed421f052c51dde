"""DGL's transforms of graphs that scripts with attention layers use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .create import add_reverse_edges, add_self_loop, remove_self_loop
from .graph import DGLGraph


class AddSelfLoop:
    """Adds a loop for every node, after removing existing loops unless ``allow_duplicate``."""

    def __init__(self, allow_duplicate: bool = False):
        self.allow_duplicate = allow_duplicate

    def __call__(self, g: DGLGraph) -> DGLGraph:
        return add_self_loop(g if self.allow_duplicate else remove_self_loop(g))


class RemoveSelfLoop:
    def __call__(self, g: DGLGraph) -> DGLGraph:
        return remove_self_loop(g)


class AddReverse:
    def __call__(self, g: DGLGraph) -> DGLGraph:
        return add_reverse_edges(g)


class RowFeatNormalizer:
    """Normalises the features with these names, so that rows add up to 1."""

    def __init__(self, subtract_min: bool = False, node_feat_names: Sequence[str] = ("feat",)):
        self.subtract_min, self.names = subtract_min, node_feat_names

    def __call__(self, g: DGLGraph) -> DGLGraph:
        for name in self.names:
            x = g.ndata[name]
            x = x - x.min() if self.subtract_min else x
            g.ndata[name] = x / x.sum(-1, keepdim=True).clamp(min=1.0)
        return g


class Compose:
    def __init__(self, transforms: Sequence[Callable[[DGLGraph], DGLGraph]]):
        self.transforms = transforms

    def __call__(self, g: DGLGraph) -> DGLGraph:
        for transform in self.transforms:
            g = transform(g)
        return g
