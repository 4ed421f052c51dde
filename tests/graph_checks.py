"""What every Graph must satisfy, whatever it was made from."""

import itertools
import threading

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


def check_items(items, splits, num_slots, indptr, max_edges, part_of=None):
    """Checks that the work items of a plan hold each edge once, at most ``max_edges`` of a row each; that
    every row has an item; and that a row of several has slots, in the order of its edges. part_of: the part
    that an edge belongs to; an item holds edges of one part, and items come part by part.
    """
    found, edges, parts = {}, [], []
    for row, begin, end, slot in items.tolist():
        assert indptr[row] <= begin <= end <= indptr[row + 1] and end - begin <= max_edges
        found.setdefault(row, []).append((begin, slot))
        edges += range(begin, end)
        if part_of is not None and begin < end:
            inside = part_of[begin:end].unique().tolist()
            assert len(inside) == 1
            parts += inside
    assert sorted(edges) == list(range(int(indptr[-1]))) and sorted(found) == list(range(len(indptr) - 1))
    assert parts == sorted(parts)
    slots = {row: [slot for _, slot in sorted(pieces)] for row, pieces in found.items()}
    if part_of is not None:  # a later part may add to the row that an earlier one has written
        slots = {row: sorted(slot for slot in mine if slot >= 0) or [-1] for row, mine in slots.items()}
    split = {row: list(range(first, last, stride)) for row, first, last, stride in splits.tolist()}
    assert {row: mine for row, mine in slots.items() if mine != [-1]} == split
    assert sorted(itertools.chain(*split.values())) == list(range(num_slots))


class SparseTensor:
    """A stand-in for torch_sparse.SparseTensor by its documentation, with what is used: csr() and sizes."""

    def __init__(self, row, col, sizes):
        order = torch.argsort(row, stable=True)
        indptr = torch.bincount(row, minlength=sizes[0]).cumsum(0)
        self.row, self.col, self.sizes = row[order], col[order], sizes
        self.indptr = torch.cat([indptr.new_zeros(1), indptr])

    def csr(self):
        return self.indptr, self.col, None

    def sparse_sizes(self):
        return self.sizes

    def sparse_size(self, dim):
        return self.sizes[dim]

    size = sparse_size


def in_threads(work, count=8):
    """Runs ``work``, a function of the thread's number, in threads at the same time; raises their error."""
    errors, start = [], threading.Barrier(count)

    def run(number):
        try:
            start.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
