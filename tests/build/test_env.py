"""python -m dfgnn.env: the report for issues."""

import json
import os
import platform
from importlib import metadata

import pytest
import torch

from dfgnn import env
from dfgnn.runtime import library as _library


def test_the_command_prints_text_and_json(plain_python):
    command = "import runpy; runpy.run_module('dfgnn.env', run_name='__main__')"
    lines = plain_python(command).stdout.splitlines()
    assert lines[0].split() == ["dfgnn", metadata.version("dfgnn")]
    info = json.loads(plain_python(command, "--json").stdout)
    assert info["torch"] == torch.__version__
    assert info["libraries"]["cpu"]["loaded"] and info["libraries"]["cpu"]["path"].endswith("libdfgnn_cpu.so")
    assert env.text(info).splitlines() == lines


def test_the_instruction_set_is_what_the_library_runs(monkeypatch):
    monkeypatch.delenv("DFGNN_CPU_ISA", raising=False)
    best = env.report()["cpu"]["kernels"]
    assert "DFGNN_CPU_ISA" not in os.environ
    order = ["base", "avx2", "avx512"]
    for name in order:
        monkeypatch.setenv("DFGNN_CPU_ISA", name)
        info = env.report()
        why = _off(info).get("CPU kernels", {}).get("why", "")
        if "compiled for" in why:  # the library lacks `name`: make test compiles for this processor alone
            assert info["cpu"]["kernels"] is None and os.environ.get("DFGNN_CPU_ISAS") != "all"
        elif order.index(name) <= order.index(best):
            assert info["cpu"]["kernels"] == name
        else:
            assert info["cpu"]["kernels"] is None and "does not have it" in _off(info)["CPU kernels"]["why"]
    monkeypatch.setenv("DFGNN_CPU_ISA", "sse9")
    found = _off(env.report())["CPU kernels"]
    assert "got 'sse9'" in found["why"] and found["todo"] == "unset DFGNN_CPU_ISA"


def test_kernels_that_were_not_compiled_are_explained(monkeypatch):
    """A library for base alone, on a processor that has more."""

    def fails(device):
        name = os.environ.get("DFGNN_CPU_ISA")
        if name in (None, "base"):
            return None
        return (
            f"DFGNN_CPU_ISA={name}: the CPU library was compiled for base alone; with DFGNN_CPU_ISAS=all ..."
        )

    monkeypatch.delenv("DFGNN_CPU_ISA", raising=False)
    monkeypatch.setattr(env, "_fails", fails)
    monkeypatch.setattr(env, "_NEWEST", {platform.machine(): "avx512"})
    info = env.report()
    assert info["cpu"]["kernels"] == "base"
    assert _off(info)["avx512 kernels"]["why"] == "the CPU library was compiled for base alone"
    assert "DFGNN_CPU_ISAS=all" in _off(info)["avx512 kernels"]["todo"]


def test_a_library_for_another_processor_is_explained(monkeypatch):
    why = "the CPU library was compiled for avx512 alone, which this processor does not have"
    monkeypatch.delenv("DFGNN_CPU_ISA", raising=False)
    monkeypatch.setattr(env, "_fails", lambda device: why)
    info = env.report()
    assert info["cpu"]["kernels"] is None
    assert _off(info)["CPU kernels"]["why"] == why
    assert "compile the CPU library here again" in _off(info)["CPU kernels"]["todo"]


def test_cuda_that_is_off_is_explained(monkeypatch):
    monkeypatch.setattr(_library, "_cuda_problem", "this installation of dfgnn was built without CUDA")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = _off(env.report())["CUDA kernels"]
    assert found["why"] == "this installation of dfgnn was built without CUDA"
    assert found["todo"].startswith("without an NVIDIA GPU nothing; with one, ")
    assert "off        CUDA kernels" in env.text(env.report())
    monkeypatch.setattr(env, "_gpus", lambda off: [])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "without an NVIDIA GPU" not in _off(env.report())["CUDA kernels"]["todo"]


def test_a_gpu_without_code_is_named(monkeypatch):
    class Properties:
        name, major, minor, total_memory = "NVIDIA Example", 8, 6, 24 * 2**30

    def fails(device):
        return "no kernel image is available" if device.type == "cuda" else None

    monkeypatch.setattr(_library, "_cuda_problem", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda k: Properties)
    monkeypatch.setattr(env, "_fails", fails)
    info = env.report()
    assert info["gpus"] == [
        {"name": "NVIDIA Example", "capability": "8.6", "memory_gib": 24.0, "computes": False}
    ]
    assert _off(info)["GPU 0"]["why"] == "no kernel image is available"
    assert 'TORCH_CUDA_ARCH_LIST="8.6"' in _off(info)["GPU 0"]["todo"]
    assert "compute capability 8.6, 24.0 GiB: does not compute" in env.text(info)


@pytest.mark.gpu
def test_a_gpu_computes():
    info = env.report()
    assert info["driver"] and [gpu["computes"] for gpu in info["gpus"]] == [True] * torch.cuda.device_count()


def _off(info):
    return {item["what"]: item for item in info["off"]}
