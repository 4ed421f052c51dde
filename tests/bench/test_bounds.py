"""The byte bound: counted by hand, and against the shape that it must have."""

import pytest

from dfgnn.bench import bounds
from dfgnn.bench.workloads import LAYERS, MODES

SIZE = bounds.Size(num_src=100, num_dst=50, num_edges=1000, heads=2, head_dim=8, itemsize=4)


def test_bytes_of_one_kernel():
    kernel = bounds.Kernel(rows=1, stats=4, dst=2, src=1, dst_terms=3)
    gathered = 1000 * (64 + 4 + 32)  # 4 statistics of two heads are one sector
    streams = (2 * 50 + 100) * 64 + 3 * 50 * 8
    assert kernel.milliseconds(SIZE, 1, 1e9) == pytest.approx((gathered + streams) / 1e6)
    # Where gathered rows are (almost) free, the streams alone bound the time.
    assert kernel.milliseconds(SIZE, 1e9, 1) == pytest.approx(streams / 1e6)


def test_streams_alone_gather_no_index():
    assert bounds.Kernel(dst=1).milliseconds(SIZE, 1, 1) == pytest.approx(50 * 64 / 1e6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", LAYERS)
def test_rows_are_the_passes_and_the_bound_tends_to_them(layer, mode):
    kernels = bounds.KERNELS[layer, mode]
    passes = LAYERS[layer].passes[mode]
    assert sum(kernel.rows for kernel in kernels) == passes
    # With many edges per node and wide rows, gathering rows takes nearly all of the time.
    size = bounds.Size(num_src=10, num_dst=10, num_edges=10**6, heads=1, head_dim=4096, itemsize=4)
    bound = bounds.byte_bound(layer, mode, size, 2.0, copy_gb_s=1e9, launches=False)
    assert bound == pytest.approx(passes * 2.0, rel=1e-2)
    on_gpu = bounds.byte_bound(layer, mode, size, 2.0, copy_gb_s=1e9, launches=True)
    assert on_gpu == pytest.approx(bound + len(kernels) * bounds.LAUNCH_MS)


def test_short_rows_are_bounded_by_more_than_passes():
    size = bounds.Size(num_src=1000, num_dst=1000, num_edges=2000, heads=4, head_dim=32, itemsize=4)
    assert bounds.byte_bound("gat", "train", size, 1.0, copy_gb_s=1e9, launches=False) > 1.5 * 2
