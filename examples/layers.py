"""Attention layers of three libraries by the name and arguments of torch_geometric's."""

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

import dfgnn
from dfgnn.runtime.programs import refuse


def conv(impl: str, name: str, in_channels: int, out_channels: int, heads: int = 1, **options) -> nn.Module:
    """The layer ``name`` of torch_geometric, or DGL's of that name.

    ``--impl dfgnn`` begins with torch_geometric's layers, too: :func:`prepare` replaces them.
    """
    if impl != "dgl":
        import torch_geometric.nn

        return getattr(torch_geometric.nn, name)(in_channels, out_channels, heads, **options)
    return DGLLayer(name, in_channels, out_channels, heads, **options)


def prepare(model: nn.Module, args) -> nn.Module:
    """Put the model on its device, dfgnn's layers into it, and compile it, as the arguments say."""
    model = model.to(args.device)
    if args.impl == "dfgnn":
        report = dfgnn.accelerate(model)
        if report.kept or not report.replaced:
            refuse(f"--impl dfgnn: not every attention layer was replaced\n{report}")
    if args.compile:
        model.compile(dynamic=True)
    return model


class DGLLayer(nn.Module):
    """``dgl.nn.GATConv`` or ``GATv2Conv`` with the arguments of torch_geometric's layers."""

    graphs = WeakIdKeyDictionary()  # the DGLGraph of an edge_index, as long as that lives

    def __init__(
        self, name, in_channels, out_channels, heads, *, concat=True, dropout=0.0, add_self_loops=True,
        bias=True, edge_dim=None,
    ):  # fmt: skip
        super().__init__()
        import dgl.nn

        if name not in ("GATConv", "GATv2Conv") or edge_dim is not None:
            refuse(f"--impl dgl: DGL has no {name}" + " with edge features" * (edge_dim is not None))
        options = {"attn_drop": dropout, "allow_zero_in_degree": True, "bias": bias}
        self.layer = getattr(dgl.nn, name)(in_channels, out_channels, heads, **options)
        self.concat, self.add_self_loops = concat, add_self_loops

    def forward(self, x, edge_index):
        if isinstance(x, tuple):
            import dgl

            graph = dgl.create_block(tuple(edge_index), *map(len, x))
        else:
            graph = self._graph(edge_index, len(x))
        out = self.layer(graph, x)
        return out.flatten(1) if self.concat else out.mean(1)

    def _graph(self, edge_index: torch.Tensor, num_nodes: int):
        import dgl

        kept = self.graphs.setdefault(edge_index, {})
        if self.add_self_loops not in kept:
            graph = dgl.graph(tuple(edge_index), num_nodes=num_nodes)
            if self.add_self_loops:
                graph = dgl.add_self_loop(dgl.remove_self_loop(graph))
            kept[self.add_self_loops] = graph
        return kept[self.add_self_loops]
