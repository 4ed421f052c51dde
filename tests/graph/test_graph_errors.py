"""What Graph refuses, and in which words."""

import pytest
import torch
from graph_checks import check_graph, small

from dfgnn.graph import Graph

_PTR, _IDX = torch.tensor([0, 1, 3]), torch.tensor([0, 1, 0])
_BIG = torch.zeros(1, dtype=torch.int64).expand(2**31)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: Graph.from_csr(_PTR, _IDX.to("meta")),
            ValueError,
            "Graph.from_csr: indices: expected values, got a tensor on meta, which has none",
        ),
        (
            lambda: Graph.from_csr(_PTR, torch.tensor([0, 1, 7]), num_src=5),
            ValueError,
            r"Graph.from_csr: indices: expected values in \[0, num_src=5\), got 7 at position 2",
        ),
        (
            lambda: Graph.from_csr(_PTR.int(), torch.tensor([0, -1, 1]).int()),
            ValueError,
            r"indices: expected values in \[0, num_src=2\), got -1 at position 1",
        ),
        (
            lambda: Graph.from_csr(_PTR, torch.tensor([0, 2**40, 0]), 2**31 - 1),
            ValueError,
            r"num_src=2147483647\), got 1099511627776 at position 1",
        ),
        (lambda: Graph.from_csr(_PTR, _IDX, 2.0), TypeError, "num_src: expected an integer, got float"),
        (
            lambda: Graph.from_csr(_PTR, _IDX, -1),
            ValueError,
            r"num_src: expected a number in \[0, 2\*\*31\), got -1",
        ),
        (
            lambda: Graph.from_csr(_PTR, _IDX, 2**31),
            ValueError,
            r"num_src: expected a number in \[0, 2\*\*31\), got 2147483648",
        ),
        (
            lambda: Graph.from_csr(_PTR[:1].expand(2**31 + 1), _IDX, validate=False),
            ValueError,
            r"num_dst: expected a number in \[0, 2\*\*31\), got 2147483648",
        ),
        (
            lambda: Graph.from_csr(torch.tensor([0, 2**31]), _BIG, validate=False),
            ValueError,
            r"destination 0: expected fewer than 2\*\*31 edges into it",
        ),
        (
            lambda: Graph.from_csr(_PTR, _IDX, eids=torch.tensor([0, 1, 3])),
            ValueError,
            r"eids: expected values in \[0, num_edges=3\), got 3 at position 2",
        ),
        (
            lambda: Graph.from_csr(_PTR, _IDX, eids=_IDX.to("meta")),
            ValueError,
            "Graph.from_csr: eids: expected values, got a tensor on meta, which has none",
        ),
        (
            lambda: Graph.from_edge_index(torch.eye(2).to_sparse()),
            TypeError,
            "edge_index: expected a dense tensor, got layout torch.sparse_coo",
        ),
        (
            lambda: Graph.from_edge_index(torch.tensor([[-3, 1], [1, 4]])),
            ValueError,
            r"edge_index\[0\]: expected values in \[0, num_src=5\), got -3 at position 0",
        ),
        (
            lambda: Graph.from_edge_index(torch.tensor([[0, 2**31], [1, 4]])),
            ValueError,
            r"max\(edge_index\[0\]\) \+ 1: expected a number in \[0, 2\*\*31\), got 2147483649",
        ),
        (
            lambda: Graph.from_edge_index(torch.stack([_IDX, _IDX]), 4, num_src=4),
            TypeError,
            "expected either num_nodes or num_src and num_dst, got both",
        ),
        (
            lambda: Graph.from_coo(_IDX, _IDX, num_dst=1),
            ValueError,
            r"dst: expected values in \[0, num_dst=1\), got 1 at position 1",
        ),
        (
            lambda: Graph.from_coo(_IDX, _IDX, 2**31),
            ValueError,
            r"num_src: expected a number in \[0, 2\*\*31\), got 2147483648",
        ),
        (
            lambda: Graph.batch([small(), 3]),
            TypeError,
            r"Graph.batch: graphs\[1\]: expected a dfgnn.Graph, got int",
        ),
        (
            lambda: Graph.batch([Graph.from_coo(_IDX, _IDX, num_src=2**30, num_dst=2)] * 2),
            ValueError,
            r"Graph.batch: num_src: expected a number in \[0, 2\*\*31\), got 2147483648",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


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
