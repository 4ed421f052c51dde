"""AGNNConv beside dgl.nn.AGNNConv."""

import pytest
import torch
from dgl_compare import Contract, compare, dgl_bipartite, dgl_graph

from dfgnn.nn.dgl import AGNNConv


class TestAGNNConv(Contract):
    layer = AGNNConv
    options = [{}, {"init_beta": 3.0}, {"init_beta": -0.5, "learn_beta": False}]
    attention = False

    def arguments(self, in_feats):
        return ()

    def test_bipartite(self):
        """Both ends' features have the same size here."""
        g = dgl_bipartite()
        for dtype in (torch.float32, torch.float64):
            self.compare(self.pair(dtype=dtype), g, (9, 9))
        with pytest.raises(ValueError, match="feat"):
            AGNNConv()(g, torch.randn(30, 9))


@pytest.mark.parametrize("shape", [(3, 9), (2, 3, 9), (1, 4)], ids=str)
def test_more_dimensions(shape):
    g = dgl_graph()
    for dtype in (torch.float32, torch.float64):
        layers = TestAGNNConv().pair(init_beta=2.0, dtype=dtype)
        compare(*layers, g, torch.randn(g.num_nodes(), *shape, dtype=dtype), attention=False)


def test_zero_rows():
    """The norm of a row of zeros is taken as 1e-12, as in DGL: its cosines are 0."""
    g = dgl_graph()
    feat = torch.randn(g.num_nodes(), 9, dtype=torch.float64)
    feat[::4] = 0
    compare(*TestAGNNConv().pair(dtype=torch.float64), g, feat, attention=False)


def test_beta():
    assert isinstance(AGNNConv().beta, torch.nn.Parameter)
    fixed = AGNNConv(0.5, learn_beta=False)
    assert not list(fixed.parameters()) and fixed.state_dict()["beta"].tolist() == [0.5]
