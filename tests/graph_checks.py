"""What every Graph must satisfy, whatever it was made from."""

import torch

from dfgnn.graph import Graph


def edge_order(csr):
    """The user's edge id at each position of a CSR."""
    if csr.eids is None:
        return torch.arange(csr.indices.numel())
    return csr.eids.long().cpu()


def check_csr(csr, rows, cols, num_rows, device):
    """Checks that `csr` holds exactly the edges cols[e] -> rows[e] with the ids e."""
    assert csr.indptr.dtype == torch.int64 and csr.indices.dtype == torch.int32
    assert csr.eids is None or csr.eids.dtype == torch.int32
    for tensor in csr:
        assert tensor is None or (tensor.is_contiguous() and tensor.device.type == torch.device(device).type)
    indptr, indices, ids = csr.indptr.cpu(), csr.indices.cpu().long(), edge_order(csr)
    assert indptr.shape == (num_rows + 1,)
    assert torch.equal(ids.sort().values, torch.arange(rows.numel()))
    # Python loops on purpose, so that the check shares no operation with the code under test.
    row_of_position = [r for r in range(num_rows) for _ in range(int(indptr[r]), int(indptr[r + 1]))]
    assert row_of_position == rows[ids].tolist()
    assert indices.tolist() == cols[ids].tolist()


def check_graph(graph, src, dst, num_src, num_dst, device="cpu"):
    """Checks that `graph` has these edges with ids in this order, in both of its CSRs."""
    src, dst = src.cpu().long(), dst.cpu().long()
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (num_src, num_dst, src.numel())
    assert graph.device.type == torch.device(device).type
    check_csr(graph.csr(), dst, src, num_dst, device)
    without = graph.reverse_csr()
    assert without.eids is None
    reverse = graph.reverse_csr(need_eids=True)
    check_csr(reverse, src, dst, num_src, device)
    assert torch.equal(without.indptr, reverse.indptr) and torch.equal(without.indices, reverse.indices)
    assert graph.edge_index.dtype == torch.int64
    assert graph.edge_index.tolist() == [src.tolist(), dst.tolist()]
    assert graph.in_degrees().tolist() == torch.bincount(dst, minlength=num_dst).tolist()
    assert graph.out_degrees().tolist() == torch.bincount(src, minlength=num_src).tolist()
    assert graph.has_zero_in_degree == (len(set(dst.tolist())) < num_dst)


def small(device="cpu"):
    """0 -> 1, 2 -> 0, 2 -> 1, 1 -> 1 with an isolated node 3."""
    return Graph.from_edge_index(torch.tensor([[0, 2, 2, 1], [1, 0, 1, 1]], device=device), 4)


def canonical(items, splits):
    """Items and splits of a plan in a form that depends neither on their order nor on where the slots of a
    split row begin. Rows of `splits` that are not in use (first slot = last slot) are left out.
    """
    splits = [split for split in splits.tolist() if split[1] < split[2]]
    first = {row: begin for row, begin, _, _ in splits}
    return (
        sorted((row, a, b, -1 if slot < 0 else slot - first[row]) for row, a, b, slot in items.tolist()),
        sorted((row, end - begin, stride) for row, begin, end, stride in splits),
    )
