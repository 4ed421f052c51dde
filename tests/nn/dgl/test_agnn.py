"""AGNNConv beside dgl.nn.AGNNConv."""

import pytest
import torch
from dgl_compare import Contract, compare, dgl_bipartite, dgl_graph

from dfgnn.nn.dgl import AGNNConv


class TestAGNNConv(Contract):
    layer = AGNNConv
    options = [{}, {"init_beta": 3.0}, {"init_beta": -0.5, "learn_beta": False}]
    attention = False
    test_reset_parameters = None

    def arguments(self, in_feats):
        return ()

    def test_bipartite(self):
        """Both ends' features have the same size here."""
        g = dgl_bipartite()
        for dtype in (torch.float32, torch.float64):
            self.compare(self.pair(dtype=dtype), g, (9, 9))
        with pytest.raises(ValueError, match="feat"):
            AGNNConv()(g, torch.randn(30, 9))


def test_zero_rows():
    """The norm of a row of zeros is taken as 1e-12, as in DGL: its cosines are 0."""
    g = dgl_graph()
    feat = torch.randn(g.num_nodes(), 9, dtype=torch.float64)
    feat[::4] = 0
    compare(*TestAGNNConv().pair(dtype=torch.float64), g, feat, attention=False)
