"""Split rows on a GPU: the partial results of a row's chunks are merged by several warps, the more the fewer
rows are split."""

import pytest
import torch
from attention import SCORES, check, make_inputs

from dfgnn import Graph

FLOAT, DOUBLE, BF16 = torch.float32, torch.float64, torch.bfloat16
BOUND = 32


def graph_of(rows: int, pieces: int) -> Graph:
    generator = torch.Generator().manual_seed(rows)
    dst = torch.arange(rows).repeat_interleave(BOUND * pieces - 5)
    src = torch.randint(97, dst.shape, generator=generator)
    return Graph.from_coo(src, dst, num_src=97, num_dst=rows).to("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("rows", "pieces"), [(1, 300), (600, 9), (1200, 5), (2500, 3), (5000, 2), (9000, 2)])
def test_rows_in_pieces(score, rows, pieces):
    """Over destinations the cases take 16, 16, 8, 4, 2 and 1 warps per row on an H100 or H200; over sources,
    97 rows, 16."""
    graph = graph_of(rows, pieces)
    csr = graph.csr()
    place = torch.arange(graph.num_edges, device="cuda")
    row = torch.repeat_interleave(csr.indptr.diff())
    piece = (place - csr.indptr[row]) // BOUND
    # Chunks in which all edges are masked, several of them in sequence, and rows of such chunks alone.
    kept = ((piece + row) % 4 == 0) & (row % 7 != 3)
    mask = torch.empty_like(kept)
    mask[place if csr.eids is None else csr.eids.long()] = kept
    for dtype, heads, dim in ((FLOAT, 2, 6), (FLOAT, 4, 40), (BF16, 1, 33), (DOUBLE, 2, 6)):
        if graph.num_edges * heads * dim > 20_000_000:
            continue
        inputs = make_inputs(score, graph, heads, dim, dtype)
        note = f"{heads}x{dim} {dtype} "
        check(score, graph, inputs, note, schedule=f"natural<={BOUND}")
        check(score, graph, inputs, note + "masked ", schedule=f"natural<={BOUND}", mask=mask)
