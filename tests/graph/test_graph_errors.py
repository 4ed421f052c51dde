"""What Graph refuses, and in which words."""

import pytest
import torch
from graph_checks import check_graph, small

from dfgnn.graph import Graph

_PTR, _IDX = torch.tensor([0, 1, 3]), torch.tensor([0, 1, 0])


def test_errors_on_the_device(device):
    """The same words on every device, and never a device-side assertion."""
    indptr, indices = _PTR.to(device), torch.tensor([0, 7, 0], device=device)
    with pytest.raises(
        ValueError, match=r"indices: expected values in \[0, num_src=2\), got 7 at position 1"
    ):
        Graph.from_csr(indptr, indices)
    with pytest.raises(ValueError, match=r"src: expected values in \[0, num_src=3\), got 7 at position 1"):
        Graph.from_coo(indices, indices, 3)
    with pytest.raises(ValueError, match=r"eids: expected values in \[0, num_edges=3\), got 7"):
        Graph.from_csr(indptr, _IDX.to(device), eids=indices)
    check_graph(small(device), *small().edge_index, 4, 4, device)


@pytest.mark.gpu
def test_devices_that_differ():
    with pytest.raises(ValueError, match="indices: expected device cpu like indptr, got cuda:0"):
        Graph.from_csr(_PTR, _IDX.cuda())
    with pytest.raises(ValueError, match=r"graphs\[1\]: expected device cpu like graphs\[0\], got cuda:0"):
        Graph.batch([small(), small("cuda")])
