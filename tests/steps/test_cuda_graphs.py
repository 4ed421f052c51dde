"""What ends a capture from outside: `dfgnn.runtime.cuda_graphs`."""

import gc

import pytest
import torch

from dfgnn.runtime import cuda_graphs


class Graph:
    """Stands for torch.cuda.graph where there is no GPU."""

    collects: list[bool] = []

    def __init__(self, graph, **options):
        self.graph, self.options = graph, options

    def __enter__(self):
        self.collects.append(gc.isenabled())

    def __exit__(self, *error):
        return False


@pytest.fixture
def stands_for_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", list)
    monkeypatch.setattr(Graph, "collects", [])
    return Graph.collects


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_garbage_collector_rests(stands_for_cuda, enabled, fails):
    (gc.enable if enabled else gc.disable)()
    try:
        with cuda_graphs.capturing("a graph", pool=3):
            assert not gc.isenabled()
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    finally:
        assert gc.isenabled() == enabled
        gc.enable()
    assert stands_for_cuda == [False] * (1 + fails)  # after a failure another capture ends what it began


@pytest.mark.gpu
def test_random_numbers_after_a_capture_that_failed():
    x = torch.randn(8, device="cuda")
    with pytest.raises(RuntimeError), cuda_graphs.capturing(torch.cuda.CUDAGraph()):
        torch.nn.functional.dropout(x, 0.5)
        x.sum().item()
    assert torch.nn.functional.dropout(x, 0.5).shape == x.shape
