"""Converts state dicts: between DGL's and torch_geometric's layers, and from published graph transformers to
dfgnn's layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.wrong_call import says_calls


class _Kind(NamedTuple):
    """A layer of one library, recognised by the names in its state dict."""

    name: str
    # Names that occur together in no other layer. The first may be a prefix, which ends with a dot: all names
    # that begin with "gate_nn.".
    signs: tuple[str, ...]
    convert: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None  # None: no counterpart


@says_calls
def convert_state_dict(state_dict: Mapping[str, Any], to: str) -> OrderedDict[str, Any]:
    """A state_dict of a model with DGL's layers for the same model with torch_geometric's, or the other way;
    or of a published graph transformer for dfgnn's layers.

    A layer is found by the names of its parameters, at any depth, and they are renamed; everything else is
    passed on as it is, tensors included, which are not copied. dfgnn's layers have the names of those that
    they replace.

    ========================================================  =================================
    DGL                                                       torch_geometric
    ========================================================  =================================
    GATConv: ``fc``; ``fc_src``, ``fc_dst``                   ``lin``; ``lin_src``, ``lin_dst``
    ``attn_l``, ``attn_r``                                    ``att_src``, ``att_dst``
    ``bias``, or ``res_fc.bias`` where there is a ``res_fc``  ``bias``
    ``res_fc.weight``                                         ``res.weight``
    GATv2Conv: ``fc_src``, ``fc_dst``, ``attn``               ``lin_l``, ``lin_r``, ``att``
    ``res_fc``                                                ``res``, ``bias``
    AGNNConv: ``beta``                                        ``beta``
    GlobalAttentionPooling: ``gate_nn``, ``feat_nn``          AttentionalAggregation: ``gate_nn``, ``nn``
    ========================================================  =================================

    DGL's GATv2Conv has no bias of its output. torch_geometric gets zeros; the other way it goes where it has
    the same effect on every node with an edge, added to ``fc_src.bias`` and taken from ``fc_dst.bias``.

    With ``to="dfgnn"``, layers of published code, found by their names, too:

    =========================================================  =======================================
    Dwivedi and Bresson's graph transformer, with edges        nn.EdgeGraphTransformerLayer
    ``attention.Q``, ``.K``, ``.V``, ``.proj_e``               ``conv.fc_query``, ``fc_key``, ...
    ``O_h``, ``FFN_h_layer1``, ``FFN_h_layer2``; ``O_e``, ...  ``node.fc_out``, ...; ``edge.fc_out``, ...
    ``batch_norm1_h`` or ``layer_norm1_h``, ...                ``node.norm1``, ...
    the same without edges: ``attention.Q``, ``O``, ...        nn.GraphTransformerLayer
    Exphormer's attention: ``Q``, ``K``, ``V``, ``E``          nn.ExphormerAttention: ``project``, ``edge``
    GATConv of torch_geometric before 2.5, and its copies:     nn.pyg.GATConv:
    ``lin_l``, ``lin_r``, ``att_l``, ``att_r``; or             ``lin``, ``att_src``, ``att_dst``; of two
    ``lin_src``, ``lin_dst``, the same                         weights ``lin_src``, ``lin_dst``
    =========================================================  =======================================

    The graph transformers clamp scores to [-5, 5]; nn.GraphTransformerLayer does not. SAN's attention has a
    second set of queries and keys for pairs without an edge, pyHGT's HGTConv biases and norms by types of
    nodes and weights of relations between any of them: these have no counterpart, and raise.

    Settings that a state_dict does not contain must be the same on both sides: torch_geometric's layers add
    self loops, DGL's graphs must contain them; ``negative_slope`` and ``concat=True`` are arguments. DGL's
    residual between equal sizes has no weight, torch_geometric's has one: it is dropped if it is the
    identity, and missing in the other direction.

    Args:
        state_dict: that of a whole model or of a layer.
        to: "pyg" (torch_geometric), "dgl" or "dfgnn": the library whose names the result has.

    Returns:
        A new state_dict.

    Raises:
        TypeError: ``state_dict`` is no mapping.
        ValueError: another ``to``; no layer of the other library in it; or what the library does not have,
            such as attention over edge features, ``concat=False`` or a learned residual of equal sizes.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"convert_state_dict: state_dict: expected a mapping, got {type(state_dict).__name__}"
        )
    if to not in _KINDS:
        raise ValueError(f"convert_state_dict: to: expected 'pyg', 'dgl' or 'dfgnn', got {to!r}")
    kinds = _find(state_dict, _KINDS[to])
    if not kinds:
        signs = "; ".join(f"{k.name}: {', '.join(k.signs)}" for k in _KINDS[to] if k.convert)
        raise ValueError(
            f"convert_state_dict: state_dict: expected a layer to convert to {to!r} in it ({signs}), got none"
        )
    layers: dict[str, dict[str, Any]] = {prefix: {} for prefix in kinds}
    owners = {key: _owner(key, kinds) for key in state_dict}
    for key, value in state_dict.items():
        prefix = owners[key]
        if prefix is not None:
            layers[prefix][key.removeprefix(prefix)] = value
    converted: OrderedDict[str, Any] = OrderedDict()
    for key, value in state_dict.items():
        prefix = owners[key]
        if prefix is None:
            converted[key] = value
        elif prefix in layers:  # the first of the layer's keys: all are converted now
            convert = kinds[prefix].convert
            assert convert is not None  # else _find would have raised
            state = convert(prefix, layers.pop(prefix))
            converted.update({prefix + name: x for name, x in state.items()})
    if hasattr(state_dict, "_metadata"):
        converted._metadata = state_dict._metadata  # type: ignore[attr-defined]
    return converted


def _find(state_dict: Mapping[str, Any], kinds: list[_Kind]) -> dict[str, _Kind]:
    """Prefix of names -> the kind of the layer to which they belong."""
    layers: dict[str, _Kind] = {}
    for key in state_dict:
        for kind in kinds:
            prefix = _before(key, kind.signs[0])
            if prefix is not None and all(prefix + sign in state_dict for sign in kind.signs[1:]):
                if kind.convert is None:
                    raise _error(prefix, f"a {kind.name}", "which has no counterpart")
                layers.setdefault(prefix, kind)
    return layers


def _before(key: str, sign: str) -> str | None:
    """The part of a name before the sign; None if the name does not have it. It must be at the name's end, or
    anywhere if it ends with a dot."""
    at = f".{key}".find(f".{sign}") if sign.endswith(".") else len(key) - len(sign)
    if at < 0 or not key.startswith(sign, at) or (at > 0 and key[at - 1] != "."):
        return None
    return key[:at]


def _owner(key: str, prefixes) -> str | None:
    """The prefix of the innermost layer that a name belongs to, or None."""
    return max((p for p in prefixes if key.startswith(p)), key=len, default=None)


def _error(prefix: str, what: str, problem: str) -> ValueError:
    return ValueError(
        f"convert_state_dict: state_dict: {prefix.rstrip('.') or 'the model'}: {what}, {problem}"
    )


def _rename(prefix: str, kind: str, layer: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    for name in layer:
        if name not in names:
            raise _error(prefix, f"{kind} with {name}", "which has no counterpart")
    return {names[name]: value for name, value in layer.items()}


# DGL's names -> torch_geometric's
_GAT = {
    "fc.weight": "lin.weight",
    "fc_src.weight": "lin_src.weight",
    "fc_dst.weight": "lin_dst.weight",
    "attn_l": "att_src",
    "attn_r": "att_dst",
    "res_fc.weight": "res.weight",
    "bias": "bias",
}
_GATV2 = {
    "fc_src.weight": "lin_l.weight",
    "fc_src.bias": "lin_l.bias",
    "fc_dst.weight": "lin_r.weight",
    "fc_dst.bias": "lin_r.bias",
    "attn": "att",
    "res_fc.weight": "res.weight",
}


def _gat_to_pyg(prefix: str, layer: dict[str, Any]) -> dict[str, Any]:
    return _rename(prefix, "GATConv", layer, {**_GAT, "res_fc.bias": "bias"})


def _gat_to_dgl(prefix: str, layer: dict[str, Any]) -> dict[str, Any]:
    _check_width(prefix, "GATConv", layer, layer["att_src"])
    layer = _without_identity(prefix, "GATConv", layer)
    names = {pyg: dgl for dgl, pyg in _GAT.items()}
    if "res.weight" in layer:
        names["bias"] = "res_fc.bias"
    return _rename(prefix, "GATConv", layer, names)


def _gatv2_to_pyg(prefix: str, layer: dict[str, Any]) -> dict[str, Any]:
    out = _rename(prefix, "GATv2Conv", layer, {**_GATV2, "res_fc.bias": "bias"})
    if "lin_l.bias" in out and "bias" not in out:
        out["bias"] = torch.zeros_like(out["lin_l.bias"])
    return out


def _gatv2_to_dgl(prefix: str, layer: dict[str, Any]) -> dict[str, Any]:
    _check_width(prefix, "GATv2Conv", layer, layer["att"])
    layer = _without_identity(prefix, "GATv2Conv", layer)
    names = {pyg: dgl for dgl, pyg in _GATV2.items()}
    if "res.weight" in layer:
        names["bias"] = "res_fc.bias"
    elif (bias := layer.pop("bias", None)) is not None and bias.any():
        same = all(torch.equal(layer[f"lin_l.{x}"], layer[f"lin_r.{x}"]) for x in ("weight", "bias"))
        if same:
            raise _error(prefix, "GATv2Conv with share_weights and a bias", "which has no counterpart")
        # The score uses lin_l + lin_r, the message lin_l alone: so every node with an edge gets the bias.
        layer |= {"lin_l.bias": layer["lin_l.bias"] + bias, "lin_r.bias": layer["lin_r.bias"] - bias}
    return _rename(prefix, "GATv2Conv", layer, names)


def _pooling(old: str, new: str) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    def rename(prefix: str, layer: dict[str, Any]) -> dict[str, Any]:
        return {
            new + name.removeprefix(old) if name.startswith(old) else name: x for name, x in layer.items()
        }

    return rename


def _check_width(prefix: str, kind: str, layer: dict[str, Any], att: Tensor) -> None:
    for name in ("bias", "res.weight"):
        if name in layer and len(layer[name]) != att.shape[1] * att.shape[2]:
            raise _error(prefix, f"{kind} with concat=False", "which has no counterpart")


def _without_identity(prefix: str, kind: str, layer: dict[str, Any]) -> dict[str, Any]:
    """The layer without its residual's weight, which must be the identity: DGL has none for equal sizes."""
    weight = layer.get("res.weight")
    if weight is None or weight.shape[0] != weight.shape[1]:
        return dict(layer)
    if not torch.equal(weight, torch.eye(len(weight), dtype=weight.dtype, device=weight.device)):
        raise _error(prefix, f"{kind} with a learned residual of equal sizes", "which has no counterpart")
    return {name: value for name, value in layer.items() if name != "res.weight"}


# ---- published graph transformers ------------------------------------------------------------------------


def _stream(ours: str, end: str) -> dict[str, str]:
    """Their name -> our name of the modules around a layer's attention, for nodes or for edges."""
    names = {f"O{end}": "fc_out", f"FFN{end}_layer1": "ffn1", f"FFN{end}_layer2": "ffn2"}
    names |= {f"{kind}_norm{k}{end}": f"norm{k}" for kind in ("batch", "layer") for k in (1, 2)}
    return {theirs: ours + name for theirs, name in names.items()}


_ATTENTION = {"attention.Q": "conv.fc_query", "attention.K": "conv.fc_key", "attention.V": "conv.fc_value"}
_WITHOUT_EDGES = {**_ATTENTION, **_stream("", "")}
_WITH_EDGES = {
    **_ATTENTION, "attention.proj_e": "conv.fc_edge", **_stream("node.", "_h"), **_stream("edge.", "_e")
}  # fmt: skip


def _modules(kind: str, modules: dict[str, str]) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """A function that renames modules and keeps the names of their parameters."""

    def rename(prefix: str, layer: dict[str, Any]) -> dict[str, Any]:
        names = {}
        for name in layer:
            module, _, parameter = name.rpartition(".")
            if module in modules:
                names[name] = f"{modules[module]}.{parameter}"
        if len(set(names.values())) < len(names):
            raise _error(prefix, f"{kind} with both norms", "which has no counterpart")
        return _rename(prefix, kind, layer, names)

    return rename


def _exphormer(prefix: str, layer: dict[str, Any]) -> dict[str, Any]:
    names = {f"{name}.weight": name for name in "QKVE"}
    found = _rename(prefix, "Exphormer's attention", layer, names)
    project = torch.cat([found[name] for name in "QKV"])
    return {"project.weight": project, "edge.weight": found["E"]}


def _gat_of_before(prefix: str, layer: dict[str, Any]) -> dict[str, Any]:
    """Converts the state of an older GATConv of torch_geometric, which held the weight shared by both ends
    twice."""
    names = {f"{kind}_{end}{rest}": f"{kind}_{end}{rest}" for kind, rest in (("lin", ".weight"), ("att", ""))
             for end in ("src", "dst")}  # fmt: skip
    names |= {"att_l": "att_src", "att_r": "att_dst", "lin_l.weight": "lin_src.weight", "bias": "bias"}
    names |= {"lin_r.weight": "lin_dst.weight", "lin_edge.weight": "lin_edge.weight", "att_edge": "att_edge"}
    found = _rename(prefix, "GATConv", layer, names)
    src, dst = found.get("lin_src.weight"), found.get("lin_dst.weight")
    if src is not None and (dst is None or (src.shape == dst.shape and torch.equal(src, dst))):
        del found["lin_src.weight"]
        found.pop("lin_dst.weight", None)
        found = {"lin.weight": src, **found}
    return found


#: Library to convert to -> the layers that are recognised in a state dict, in this order.
_KINDS = {
    "pyg": [
        _Kind("EdgeGATConv", ("attn_edge", "fc_edge.weight")),
        _Kind("EGATConv", ("attn", "fc_fij.weight")),
        _Kind("HGTConv", ("relation_pri.0", "linear_k.W")),
        _Kind("GATConv", ("attn_l", "attn_r"), _gat_to_pyg),
        _Kind("GATv2Conv", ("attn", "fc_src.weight", "fc_dst.weight"), _gatv2_to_pyg),
        _Kind("AGNNConv", ("beta",), lambda prefix, layer: layer),
        _Kind("GlobalAttentionPooling", ("gate_nn.",), _pooling("feat_nn.", "nn.")),
    ],
    "dgl": [
        _Kind("GATEConv", ("att_l", "att_r", "lin1.weight", "lin2.weight")),
        _Kind("FAConv", ("att_l.weight", "att_r.weight")),
        _Kind("GeneralConv", ("att_msg", "lin_msg.weight")),
        _Kind("HANConv", ("q", "k_lin.weight")),
        _Kind("HEATConv", ("edge_type_emb.weight", "att.weight")),
        _Kind("SuperGATConv", ("att_l", "att_r")),
        _Kind("TransformerConv", ("lin_key.weight", "lin_query.weight")),
        _Kind("RGATConv", ("q", "k", "l1", "b1")),
        _Kind("HGTConv", ("k_rel.weight", "v_rel.weight")),
        _Kind("GATConv", ("att_src", "att_dst"), _gat_to_dgl),
        _Kind("GATv2Conv", ("att", "lin_l.weight", "lin_r.weight"), _gatv2_to_dgl),
        _Kind("AGNNConv", ("beta",), lambda prefix, layer: layer),
        _Kind("AttentionalAggregation with an MLP", ("gate_mlp.",)),
        _Kind("AttentionalAggregation", ("gate_nn.",), _pooling("nn.", "feat_nn.")),
    ],
    "dfgnn": [
        _Kind("SAN's attention", ("Q_2.weight", "K_2.weight")),
        _Kind(
            "graph transformer with edges", ("attention.proj_e.weight", "attention.Q.weight", "O_h.weight"),
            _modules("graph transformer with edges", _WITH_EDGES),
        ),
        _Kind(
            "graph transformer", ("attention.Q.weight", "attention.K.weight", "O.weight"),
            _modules("graph transformer", _WITHOUT_EDGES),
        ),
        _Kind("Exphormer's attention", ("E.weight", "Q.weight", "K.weight", "V.weight"), _exphormer),
        _Kind("pyHGT's HGTConv", ("relation_pri", "relation_att", "relation_msg")),
        _Kind("GATConv", ("att_l", "att_r", "lin_l.weight"), _gat_of_before),
        _Kind("GATConv", ("att_src", "att_dst", "lin_src.weight"), _gat_of_before),
    ],
}  # fmt: skip
