"""The byte bound: the least time in which a layer's kernels can move their data, from measured bandwidths.

    kernel     max((E per_edge + streams) / graph_gb_s, streams / copy_gb_s)
    step       the sum over its kernels, and 1.5 us for each launch on a GPU

For each of the E edges a kernel reads per_edge bytes: rows of the neighbour, an index of 4 bytes, and whole
sectors of the neighbour's statistics. streams are the bytes of arrays that it reads or writes once.
graph_gb_s is the bandwidth of the baseline kernel (``yardsticks``) on the same graph, all of its bytes by its
time, and so includes the effect of the graph's order and degrees on caches. Indices count once in both, even
if the baseline works on blocks of columns and reads them once for each. copy_gb_s is the bandwidth of copying
memory.

The other bound, passes x floor (``yardsticks``), counts neither streams nor statistics; this one does, so
that it holds for short rows, too.
"""

from dataclasses import dataclass

SECTOR = 32  # the least number of bytes that a memory access transfers
LAUNCH_MS = 1.5e-3


@dataclass(frozen=True)
class Kernel:
    """The arrays that one kernel reads and writes.

    rows: neighbour rows gathered per edge; stats: float32 numbers gathered per edge and head; dst, src: how
    many arrays [N, H, D] in the features' dtype are read or written once, with rows for destinations or for
    sources; dst_terms, src_terms: how many arrays [N, H] of float32.
    """

    rows: int = 0
    stats: int = 0
    dst: int = 0
    src: int = 0
    dst_terms: int = 0
    src_terms: int = 0

    def milliseconds(self, size: "Size", graph_gb_s: float, copy_gb_s: float) -> float:
        row = size.heads * size.head_dim * size.itemsize
        term = size.heads * 4
        streams = (size.num_dst * self.dst + size.num_src * self.src) * row
        streams += (size.num_dst * self.dst_terms + size.num_src * self.src_terms) * term
        per_edge = self.rows * row + 4 + -(-self.stats * term // SECTOR) * SECTOR if self.rows else 0
        return max((size.num_edges * per_edge + streams) / graph_gb_s, streams / copy_gb_s) / 1e6


@dataclass(frozen=True)
class Size:
    num_src: int
    num_dst: int
    num_edges: int
    heads: int
    head_dim: int
    itemsize: int

    def floor_bytes(self) -> int:
        """The bytes that a plain neighbour sum moves: gathered rows, indices, the result."""
        row = self.heads * self.head_dim * self.itemsize
        return self.num_edges * (row + 4) + self.num_dst * (row + 4)


# The kernels of each layer and mode in csrc/cuda. In the pass over sources an edge gathers four numbers of
# its destination and head: the score's term, max, log_sum and delta. Comments name the arrays that are
# counted: g is the gradient of out; q, k and v are query, key and value.
_GATHERED_STATS = 4
_DOT_FORWARD = Kernel(rows=2, dst=2)
_V2_FORWARD = Kernel(rows=1, dst=2)
KERNELS = {
    ("gat", "forward"): (Kernel(rows=1, stats=1, dst=1, dst_terms=1),),
    ("gat", "train"): (
        # Forward writes out and the part of it that comes from scores above 0.
        Kernel(rows=1, stats=1, dst=2, dst_terms=4),
        # Rows of g, of out and of that part give delta and the gradient of score_dst.
        Kernel(dst=3, dst_terms=2 + 1 + _GATHERED_STATS + 1),
        Kernel(rows=1, stats=_GATHERED_STATS, src=2, src_terms=2),
    ),
    ("dot", "forward"): (_DOT_FORWARD,),
    ("dot", "train"): (
        Kernel(rows=2, dst=2, dst_terms=2),
        Kernel(rows=2, dst=4, dst_terms=2 + _GATHERED_STATS),  # q, g, out; grad_q
        Kernel(rows=2, stats=_GATHERED_STATS, src=4),  # k, v and their gradients
    ),
    ("gatv2", "forward"): (_V2_FORWARD,),
    ("gatv2", "train"): (
        Kernel(rows=1, dst=2, dst_terms=2),
        Kernel(rows=1, dst=4, dst_terms=2 + _GATHERED_STATS),  # query, g, out; grad_query
        Kernel(rows=2, stats=_GATHERED_STATS, src=2),
    ),
}


def byte_bound(layer: str, mode: str, size: Size, floor_ms: float, copy_gb_s: float, launches: bool) -> float:
    """The byte bound in milliseconds. floor_ms: time of the baseline kernel on this graph, with the same
    width and dtype; launches: whether to count a GPU's launches."""
    graph_gb_s = size.floor_bytes() / floor_ms / 1e6
    kernels = KERNELS[layer, mode]
    total = sum(kernel.milliseconds(size, graph_gb_s, copy_gb_s) for kernel in kernels)
    return total + (LAUNCH_MS * len(kernels) if launches else 0)
