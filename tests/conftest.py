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
