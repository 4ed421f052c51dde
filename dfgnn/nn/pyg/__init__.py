"""Layers of torch_geometric on fused attention: import them from here instead of from ``torch_geometric.nn``.

Each is a drop-in: a subclass of the layer of the same name with the same arguments, parameters,
initialisation, state_dict and results, so that ``isinstance``, explainers, ``to_hetero`` and checkpoints keep
working. All are differentiable any number of times, as those of :mod:`dfgnn.nn`. Where
a layer is set up in a way that the fused path does not know (another aggregation, message passing hooks, an
active explanation, an overridden ``message``, TorchScript), it runs torch_geometric's own forward and says
so with a :class:`dfgnn.nn.FallbackWarning`.

The graph made from an ``edge_index`` is cached as long as that tensor lives, so that layers and iterations
which share the tensor share the graph.
"""

import importlib
import re

#: The supported versions of torch_geometric: the first one, and the first one that is not supported any more.
SUPPORTED = (2, 6), (3, 0)

try:
    _library = importlib.import_module("torch_geometric")
except ModuleNotFoundError as error:
    if error.name != "torch_geometric":
        raise
    raise ImportError(
        "dfgnn.nn.pyg: expected the package torch_geometric, which is not installed "
        "(pip install torch_geometric)"
    ) from error


def _check_version(found: str) -> tuple[int, int]:
    """(major, minor); raises ImportError where that is not supported."""
    major, minor = map(int, re.findall(r"\d+", found)[:2])
    if not SUPPORTED[0] <= (major, minor) < SUPPORTED[1]:
        low, high = (".".join(map(str, end)) for end in SUPPORTED)
        raise ImportError(f"dfgnn.nn.pyg: expected torch_geometric >= {low}, < {high}, got {found}")
    return major, minor


VERSION = _check_version(_library.__version__)

_HOME = {
    "AGNNConv": "agnn",
    "AttentionalAggregation": "aggregation",
    "FAConv": "fa",
    "GATConv": "gat",
    "GATEConv": "gate",
    "GATv2Conv": "gatv2",
    "GENConv": "gen",
    "GPSConv": "gps",
    "GeneralConv": "general",
    "HANConv": "han",
    "HEATConv": "heat",
    "HGTConv": "hgt",
    "RGATConv": "rgat",
    "ResGatedGraphConv": "res_gated",
    "SoftmaxAggregation": "aggregation",
    "SuperGATConv": "supergat",
    "TransformerConv": "transformer",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
