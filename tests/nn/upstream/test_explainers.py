"""torch_geometric's explainers with every layer, compared with its own layers; afterwards layers run fused
again."""

import pytest
import torch
from every_layer import ATTR, BATCH, EDGES, LAYERS, METADATA, X, assert_equal, both, floats, in_turns, names
from torch import nn
from torch_geometric import explain
from torch_geometric.nn import GCNConv

import dfgnn

HETERO = ("pyg HGTConv", "pyg HANConv")
POOLING = ("pyg SoftmaxAggregation", "pyg AttentionalAggregation")
# Layers whose `message` has no argument `alpha`, from which AttentionExplainer reads the attention.
NO_ALPHA = [
    "AGNNConv",
    "SuperGATConv",
    "GENConv",
    "GeneralConv",
    "ResGatedGraphConv",
    "HEATConv",
    "HGTConv",
    "HANConv",
]
WITHOUT_ALPHA = [name for name in names("pyg") if name.split()[1] in NO_ALPHA or name in POOLING]
EXPLAINERS = {
    "GNNExplainer": lambda: explain.GNNExplainer(epochs=3),
    "PGExplainer": lambda: explain.PGExplainer(epochs=2).double(),
    "AttentionExplainer": lambda: explain.AttentionExplainer(),
    "DummyExplainer": lambda: explain.DummyExplainer(),
    "Saliency": lambda: explain.CaptumExplainer("Saliency"),
}


class Model(nn.Module):
    """A layer; in front of one that pools, a convolution that edges can be explained by."""

    def __init__(self, name, layer):
        super().__init__()
        torch.manual_seed(2)
        self.name, self.layer = name, layer
        self.before = GCNConv(8, 8).double() if name in POOLING else None

    def forward(self, x, edge_index, edge_attr=None):
        if self.before is not None:
            return self.layer(self.before(x, edge_index), BATCH, None, 3)
        if self.name in HETERO:
            out = self.layer(x, edge_index)
            return out["a"][:5] + out["b"]
        return self.layer(*LAYERS[self.name].arguments(x, edge_index, edge_attr))


def inputs(name):
    edge_index = EDGES.clone()
    if name in HETERO:
        types = (edge_index % 5, edge_index % 5, edge_index)
        return {"x": {"a": X, "b": X[:5]}, "edge_index": dict(zip(METADATA[1], types))}
    edge_index[1, ::7] = edge_index[0, ::7]  # loops, which some layers remove and add again
    return {"x": X, "edge_index": edge_index, **({} if name in POOLING else {"edge_attr": ATTR})}


def masks(model, name, explainer):
    """The explainer's masks: how important features or edges are for the class of node (or graph) 2."""
    torch.manual_seed(1)
    given, algorithm = inputs(name), EXPLAINERS[explainer]()
    target = model(**given).argmax(-1)
    by_nodes = explainer not in ("PGExplainer", "AttentionExplainer")
    by_edges = not by_nodes or name not in HETERO  # in these layers edge masks get no gradient
    task = dict(
        explanation_type="phenomenon" if explainer == "PGExplainer" else "model",
        node_mask_type="attributes" if by_nodes else None,
        edge_mask_type="object" if by_edges else None,
    )
    level = "graph" if name in POOLING else "node"
    config = {"mode": "multiclass_classification", "task_level": level, "return_type": "raw"}
    found = explain.Explainer(model, algorithm, model_config=config, **task)
    if explainer == "PGExplainer":
        for epoch in range(2):
            algorithm.train(epoch, model, **given, target=target, index=2)
        given["target"] = target
    explanation = found(**given, index=2)
    stores = getattr(explanation, "stores", [explanation])
    return [s[key] for s in stores for key in ("node_mask", "edge_mask") if key in s]


@pytest.mark.filterwarnings("ignore::dfgnn.nn.FallbackWarning")
@in_turns("explainer", EXPLAINERS, names("pyg"))
def test_explainers(name, explainer):
    if explainer == "Saliency":
        pytest.importorskip("captum")
    layers = both(name)
    for layer in layers:
        if hasattr(layer, "dropout"):  # an explainer that trains draws masks of its own
            layer.dropout = 0.0
    theirs, ours = (Model(name, layer) for layer in layers)
    if explainer == "AttentionExplainer" and name in WITHOUT_ALPHA:
        for model in (theirs, ours):
            with pytest.raises(ValueError, match="Could not collect any attention"):
                masks(model, name, explainer)
    else:
        expected = masks(theirs, name, explainer)
        assert expected and any(mask.any() for mask in expected)
        assert_equal(masks(ours, name, explainer), expected, 1e-6)
    for module in (m for m in ours.modules() if hasattr(m, "why_not")):
        assert type(module).why_not(module) is None
    assert_equal(floats(ours(**inputs(name))), floats(theirs(**inputs(name))))
    assert "upstream" not in {call.path for call in dfgnn.explain(ours, **inputs(name)).calls}
