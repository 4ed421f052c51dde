"""Loads graphs of public data sets through OGB, PyG and DGL.

``ogb:ogbn-arxiv``        Open Graph Benchmark: its name of the data set (ogbn-, ogbl-, ogbg-)
``pyg:Planetoid/Cora``    PyG: a class of torch_geometric.datasets and, where it takes one, a name
``dgl:CoraGraphDataset``  DGL: a class of dgl.data and, where it takes one, a name (``dgl:TUDataset/COLLAB``)

Of a data set of many graphs, the first ``BATCH`` make one batch; a suffix ``@256`` sets another number. The
libraries download what is missing in their folder.
"""

import importlib
import inspect
import os
from pathlib import Path

import numpy as np

from ..runtime.programs import downloading
from .measure import reason

BATCH = 1024
_LIBRARIES = {"ogb": "ogb", "pyg": "torch_geometric", "dgl": "dgl"}


def is_spec(name: str) -> bool:
    """Whether the name stands for a data set of a library."""
    return name.partition(":")[0] in _LIBRARIES and ":" in name


def load(spec: str, root: Path):
    """(src, dst, number of nodes) and the number of graphs: endpoints as the library has them.

    root: the folder in which the library keeps its data sets.

    Raises ImportError if the library is not installed, ValueError for a data set that it does not have or of
    several kinds of nodes, OSError with the reason for whatever fails while it loads.
    """
    library, _, name = spec.partition(":")
    name, _, count = name.partition("@")
    if count and not (count.isdecimal() and int(count)):
        raise ValueError(f"graph: expected a number of graphs behind @, got {spec!r}")
    module = _LIBRARIES[library]
    os.environ.setdefault("DGLBACKEND", "pytorch")  # else DGL writes a file to the home directory
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{spec} needs {module}: pip install {module} ({reason(error)})") from error
    of_library = {"ogb": _ogb, "pyg": _pyg, "dgl": _dgl}[library]
    of_library(spec, name, root)  # raises ValueError before anything is written
    with downloading(root) as folder:
        make, edges = of_library(spec, name, folder)
        try:
            dataset = make()
        except Exception as error:  # libraries fail in many ways: downloads, formats, prompts
            raise OSError(f"{spec}: {reason(error)}") from error
        try:
            graphs = [edges(dataset[i]) for i in range(min(len(dataset), int(count or BATCH)))]
        except Exception as error:
            raise ValueError(
                f"{spec}: expected graphs of one kind of nodes and edges ({reason(error)})"
            ) from error
    offsets = np.cumsum([0, *(n for _, _, n in graphs)])
    src, dst = (
        np.concatenate([np.asarray(graph[k]) + start for graph, start in zip(graphs, offsets)])
        for k in range(2)
    )
    return (src, dst, int(offsets[-1])), len(graphs)


# Each of these returns two functions: one makes the data set, one converts an item to (src, dst, num_nodes).


def _ogb(spec: str, name: str, root: Path):
    kinds = {"ogbn": "NodePropPred", "ogbl": "LinkPropPred", "ogbg": "GraphPropPred"}
    kind = kinds.get(name.partition("-")[0])
    if kind is None:
        raise ValueError(f"{spec}: expected a name that starts with {', '.join(f'{k}-' for k in kinds)}")

    def make():
        return getattr(importlib.import_module(f"ogb.{kind.lower()}"), f"{kind}Dataset")(name, str(root))

    def ends(item):
        graph = item if isinstance(item, dict) else item[0]
        return *graph["edge_index"], graph["num_nodes"]

    return make, ends


def _pyg(spec: str, name: str, root: Path):
    cls, argument = _class(spec, "torch_geometric.datasets", name)
    # A data set class with an argument `name` makes a folder of that name in root. A class without one writes
    # to root itself: it gets root/<class name> as its root, so that two classes do not share a folder.
    folder = _folder(cls, "root", root if argument else root / cls.__name__)
    return lambda: cls(**folder, **argument), lambda data: (*data.edge_index, data.num_nodes)


def _dgl(spec: str, name: str, root: Path):
    cls, argument = _class(spec, "dgl.data", name)

    def ends(item):
        graph = item[0] if isinstance(item, tuple) else item
        if not graph.is_homogeneous:
            raise ValueError(f"got {graph.ntypes} and {graph.etypes}")
        return *graph.edges(), graph.num_nodes()

    return lambda: cls(**_folder(cls, "raw_dir", root), **argument), ends


def _class(spec: str, module: str, name: str):
    """The class and its arguments, from a text Class or Class/name."""
    cls_name, _, argument = name.partition("/")
    cls = getattr(importlib.import_module(module), cls_name, None)
    if not isinstance(cls, type):
        raise ValueError(f"{spec}: expected a class of {module}, got {cls_name!r}")
    return cls, {"name": argument} if argument else {}


def _folder(cls, parameter: str, folder: Path) -> dict[str, str]:
    """The folder as an argument for the class; no argument if the class makes its graph itself."""
    return {parameter: str(folder)} if parameter in inspect.signature(cls).parameters else {}
