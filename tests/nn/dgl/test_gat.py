"""GATConv beside dgl.nn.GATConv with the same parameters: outputs, attention, every gradient, every quirk."""

import torch
from covering import covering
from dgl_compare import DropoutContract

from dfgnn.nn.dgl import GATConv


class TestGATConv(DropoutContract):
    layer = GATConv
    options = covering(
        residual=(False, True),
        bias=(False, True),
        activation=(None, torch.nn.functional.elu),
        negative_slope=(0.2, 0.05),
    )

    def more_inputs(self, g, dtype, prefix=()):
        return (torch.rand(g.num_edges(), dtype=dtype),)
