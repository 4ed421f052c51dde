"""benchmarks/compiled.py where the device fails."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch_geometric", reason="the benchmark compares with it")
pytest.importorskip("numpy", reason="the benchmarks need numpy")


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import compiled

    yield compiled
    for name in ("compiled", "host"):
        sys.modules.pop(name)


def fail(*_):
    raise RuntimeError("misaligned address")


def test_a_lost_device_ends_the_run_with_a_name(compiled, monkeypatch):
    """And an error after which it answers does not."""
    spec, args = compiled.host.MODELS[0], Namespace(contestants=["PyG", "dfgnn"], device="cpu")
    edge_index = torch.randint(100, (2, 200))
    monkeypatch.setattr(compiled.host.Training, "step", fail)
    steps, notes = compiled.contestants(spec, edge_index, args)
    assert not steps and "misaligned" in notes["PyG"]["said"][0]
    monkeypatch.setattr(compiled.host, "synchronize", fail)
    with pytest.raises(SystemExit, match="cora, GATConv: PyG: the device is lost, after RuntimeError: misal"):
        compiled.contestants(spec, edge_index, args)


def test_an_error_while_measuring_has_a_name(compiled):
    with pytest.raises(RuntimeError, match="dfgnn: misaligned address"):
        compiled.host.alternate({"PyG": int, "dfgnn": fail}, 0.01, "cpu")
