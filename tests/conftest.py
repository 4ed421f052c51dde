import gc

import pytest
import torch

torch.set_num_threads(2)


def pytest_collection_finish():
    """What was imported and collected stays: the garbage collector need not walk through it in every test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU, or a torch without CUDA")
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def late_capture(monkeypatch):
    """Captures whose own writes, as to the state of dropout's generator, come late; what is captured has to
    sleep over them, by the function that this is, before dropout reads."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU, or a torch without CUDA")
    begin = torch.cuda.CUDAGraph.capture_begin

    def late(graph, *args, **kwargs):
        torch.cuda._sleep(200_000_000)
        begin(graph, *args, **kwargs)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    return lambda: torch.cuda._sleep(600_000_000)
