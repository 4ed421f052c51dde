"""DGL's layers with dfgnn's forward: what :func:`dfgnn.accelerate` and :func:`dfgnn.patch` use.

Each class is a subclass of DGL's of the same name and of dfgnn's. It is constructed as DGL's is and has DGL's
attributes, so that an instance of DGL's class becomes one of it, and one of DGL's again, by assigning
``__class__``; ``isinstance``, state_dict and pickles keep working. Importing this module imports dgl.

Where no DGL class has to be matched, the layers of :mod:`dfgnn.nn` do the same and need no DGL.
"""

import dgl.nn.pytorch

from ... import nn


def _as(name: str) -> property:
    """The attribute of dfgnn's layer that DGL's has under this name."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))


_zero_in_degree = {"allow_zero_in_degree": _as("_allow_zero_in_degree")}
_heads = {"num_heads": _as("_num_heads"), "out_feats": _as("_out_feats"), **_zero_in_degree}
_sloped = {**_heads, "negative_slope": property(lambda self: self.leaky_relu.negative_slope)}
_ATTRIBUTES = {
    "AGNNConv": _zero_in_degree,
    "DotGatConv": _heads,
    "EGATConv": {
        "num_heads": _as("_num_heads"),
        "out_node_feats": _as("_out_node_feats"),
        "out_edge_feats": _as("_out_edge_feats"),
        "allow_zero_in_degree": False,
    },
    "EdgeGATConv": _sloped,
    "GATConv": _sloped,
    "GATv2Conv": _sloped,
    "HGTConv": {"num_etypes": property(lambda self: len(self.relation_pri[0]))},
}


def _adapt(ours: type, theirs: type, attributes: dict) -> type:
    kept = {name: vars(theirs)[name] for name in ("__init__", "reset_parameters") if name in vars(theirs)}
    doc = f"``{theirs.__module__}.{theirs.__name__}`` with the forward of ``dfgnn.nn.{ours.__name__}``."
    return type(ours.__name__, (ours, theirs), {"__module__": __name__, "__doc__": doc, **attributes, **kept})


__all__ = [name for name in _ATTRIBUTES if hasattr(dgl.nn.pytorch, name) and hasattr(nn, name)]
for _name in __all__:  # an older DGL lacks some
    globals()[_name] = _adapt(getattr(nn, _name), getattr(dgl.nn.pytorch, _name), _ATTRIBUTES[_name])
