"""DGL's transforms of graphs that scripts with attention layers use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .changed import add_reverse_edges
from .create import heterograph
from .editing import add_self_loop, remove_self_loop
from .frames import Frame
from .graph import DGLGraph


class BaseTransform:
    """A function of a graph that returns a graph."""

    def __call__(self, g: DGLGraph) -> DGLGraph:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class AddSelfLoop(BaseTransform):
    """Adds a loop for every node to each relation between nodes of one type, after removing existing loops
    unless ``allow_duplicate``; new_etypes: and a relation ``self`` of loops to each type of nodes;
    edge_feat_names, fill_data: as for :func:`~dfgnn.compat.add_self_loop`."""

    def __init__(
        self, allow_duplicate: bool = False, new_etypes: bool = False, edge_feat_names: Any = None,
        fill_data: Any = 1.0,
    ):  # fmt: skip
        self.new_etypes = new_etypes
        self.allow_duplicate, self.edge_feat_names, self.fill_data = (
            allow_duplicate,
            edge_feat_names,
            fill_data,
        )

    def __call__(self, g: DGLGraph) -> DGLGraph:
        for relation in g.canonical_etypes:
            if relation[0] == relation[2]:
                g = g if self.allow_duplicate else remove_self_loop(g, relation)
                g = add_self_loop(g, self.edge_feat_names, self.fill_data, relation)
        if not self.new_etypes:
            return g
        edges = {relation: g.edges(etype=relation) for relation in g.canonical_etypes}
        loops = {(kind, "self", kind): (g.nodes(kind), g.nodes(kind)) for kind in g.ntypes}
        features = {relation: dict(frame) for relation, frame in zip(edges, g._edge_frames)}
        return _with_edges(g, {**loops, **edges}, features)


class RemoveSelfLoop(BaseTransform):
    """Removes the loops of each relation between nodes of one type."""

    def __call__(self, g: DGLGraph) -> DGLGraph:
        for relation in g.canonical_etypes:
            g = remove_self_loop(g, relation) if relation[0] == relation[2] else g
        return g


class AddReverse(BaseTransform):
    """Appends the reverse of every edge, of loops, too, in relations between nodes of one type; of others it
    adds a relation ``rev_NAME``. The new edges' features are 0, or those of their edges with copy_edata; in a
    new relation there are none without it."""

    def __init__(self, copy_edata: bool = False, sym_new_etype: bool = False):
        self.copy_edata, self.sym_new_etype = copy_edata, sym_new_etype

    def __call__(self, g: DGLGraph) -> DGLGraph:
        edges: dict[Any, Any] = {}
        frames: dict[Any, dict[str, Tensor]] = {}
        for (begin, name, end), frame in zip(g.canonical_etypes, g._edge_frames):
            relation, back = (begin, name, end), (end, f"rev_{name}", begin)
            if begin == end and not self.sym_new_etype:
                both = add_reverse_edges(g[relation], exclude_self=False)
                edges[relation] = both.edges()
                more = dict(frame) if self.copy_edata else None
                frames[relation] = dict(frame.grown(frame.rows, more))
            else:
                edges[relation] = g.edges(etype=relation)
                edges[back] = edges[relation][::-1]
                frames[relation], frames[back] = dict(frame), dict(frame) if self.copy_edata else {}
        return _with_edges(g, edges, frames)


def _with_edges(
    g: DGLGraph, edges: Mapping[Any, Any], features: Mapping[Any, Mapping[str, Tensor]]
) -> DGLGraph:
    """A graph of the nodes of g, with their features, and these edges by relation."""
    made = heterograph(edges, dict(zip(g._ntypes, g._sizes)), g.idtype, g.device)
    for kind, nodes in zip(g._ntypes, g._node_frames):
        made.nodes[kind].data.update(nodes)
    for relation, found in features.items():
        made.edges[relation].data.update(found)
    return made


class RowFeatNormalizer(BaseTransform):
    """Divides rows of the features with these names by their sum, if it is more than 1; subtract_min: after
    subtracting the feature's smallest number."""

    def __init__(
        self, subtract_min: bool = False, node_feat_names: Sequence[str] | None = None,
        edge_feat_names: Sequence[str] | None = None,
    ):  # fmt: skip
        self.subtract_min = subtract_min
        self.node_feat_names, self.edge_feat_names = node_feat_names or (), edge_feat_names or ()

    def __call__(self, g: DGLGraph) -> DGLGraph:
        for frames, names in ((g._node_frames, self.node_feat_names), (g._edge_frames, self.edge_feat_names)):
            for name in names:
                self._normalise([frame for frame in frames if name in frame], name)
        return g

    def _normalise(self, frames: Sequence[Frame], name: str) -> None:
        if not frames:
            raise KeyError(name)
        for frame in frames:
            x = frame[name] - frame[name].min() if self.subtract_min else frame[name]
            frame[name] = x / x.sum(-1, keepdim=True).clamp(min=1.0)


class Compose(BaseTransform):
    """Applies transforms in turn."""

    def __init__(self, transforms: Sequence[Callable[[DGLGraph], DGLGraph]]):
        self.transforms = transforms

    def __call__(self, g: DGLGraph) -> DGLGraph:
        for transform in self.transforms:
            g = transform(g)
        return g

    def __repr__(self) -> str:
        return "Compose([\n" + ",\n".join(f"  {transform}" for transform in self.transforms) + "\n])"
