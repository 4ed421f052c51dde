"""dfgnn.profile: its numbers from a trace that is known, on the CPU, and (marker gpu) on a device."""

import pytest
import torch

import dfgnn
from dfgnn.switch import Profile, trace

STEP = {"cat": "user_annotation", "name": trace.STEP}


def event(cat, name, ts, dur, correlation=None):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def a_trace():
    """Two steps of 100 us. The first launches two kernels, of which the second waits for the first, and waits
    for both; the second step launches one graph of two kernels."""
    return [
        event("user_annotation", trace.STEP, 1000, 100),
        event("cpu_op", "aten::mm", 1005, 30),
        event("cpu_op", "aten::randperm", 1005, 30) | {"tid": 2},
        event("cuda_runtime", "cudaLaunchKernel", 1010, 5, 1),
        event("cuda_runtime", "cudaLaunchKernel", 1020, 5, 2),
        event("cuda_runtime", "cudaStreamSynchronize", 1040, 40, 3),
        event("kernel", "slow", 1018, 30, 1),
        event("kernel", "fast", 1050, 10, 2),
        event("gpu_memcpy", "Memcpy DtoH", 1055, 15, 2),
        event("user_annotation", trace.STEP, 2000, 100),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 2005, 30) | {"tid": 3},
        event("cuda_runtime", "cudaGraphLaunch", 2010, 5, 4),
        event("kernel", "slow", 2020, 30, 4),
        event("kernel", "slow", 2060, 30, 4),
        event("kernel", "between steps", 1500, 30, 9),
        event("cuda_runtime", "cudaLaunchKernel", 1490, 5, 9),
        {"ph": "i", "name": "an instant", "ts": 1001},
    ]


def test_numbers_of_a_trace():
    first, second = trace.steps_of(a_trace())
    assert (first.kernels, first.launches, first.copies, first.waits) == (2, 2, 1, 1)
    assert first.tklqt_ms == pytest.approx((8 + 30) / 1e3)
    assert first.device_ms == pytest.approx((30 + 20) / 1e3)  # the copy ends after the kernel
    assert first.waits_ms == pytest.approx(0.040)
    assert (second.kernels, second.launches, second.waits) == (2, 1, 0)
    assert second.tklqt_ms == pytest.approx((10 + 50) / 1e3)
    # An operator in a data loader's thread does not count as backward in another thread.
    assert (first.backward_elsewhere, second.backward_elsewhere) == (False, True)


def made(**changes):
    numbers = dict(
        device="a GPU", on_gpu=True, step_ms=2.0, host_ms=1.9, device_ms=0.4, tklqt_ms=0.5,
        kernels=150, launches=150, copies=0, waits=0, waits_ms=0.0, peak_bytes=2**20,
    )  # fmt: skip
    return Profile(**(numbers | changes))


def test_verdict_and_advice():
    slow = made()
    assert slow.verdict == "launch-bound"
    assert "idle for 80%" in slow.advice[0] and "dfgnn.capture" in slow.advice[1]
    assert "dfgnn.capture" not in " ".join(made(launches=2).advice)  # few launches: it is captured already
    busy = made(host_ms=0.2, device_ms=1.9)
    assert busy.verdict == "bandwidth-bound" and "dfgnn.capture" not in " ".join(busy.advice)
    assert "waits 3 times" in made(waits=3).advice[-1]
    in_a_thread = made(calling_thread_ms=1.25)
    for words in ("set_multithreading_enabled(False)", "1.250 ms"):
        assert words in in_a_thread.advice[2]
    assert "backward in the calling thread    1.250 ms" in str(in_a_thread)
    for found in (slow, made(calling_thread_ms=1.95), made(calling_thread_ms=0.1, host_ms=0.2)):
        assert "set_multithreading_enabled" not in " ".join(found.advice)
    text = str(slow)
    assert "launch-bound" in text and "TKLQT" in text and "0.500 ms" in text
    assert 'table(sort_by="self_cuda_time_total")' in busy.advice[0]
    assert max(map(len, text.splitlines())) < 160


def layer_and_step(device):
    torch_geometric = pytest.importorskip("torch_geometric")
    layer = torch_geometric.nn.GATConv(16, 8, heads=4).to(device)
    x = torch.randn(50, 16, device=device)
    edge_index = torch.randint(0, 50, (2, 300), device=device)

    def step():
        layer.zero_grad()
        layer(x, edge_index).sum().backward()

    return layer, step


def test_on_the_cpu():
    layer, step = layer_and_step("cpu")
    before = dfgnn.profile(step, steps=2, warmup=1, device="cpu")
    dfgnn.accelerate(layer)
    after = dfgnn.profile(step, steps=2, warmup=1, device="cpu")
    names = [{o.key: o.count for o in p.profiler.key_averages()} for p in (before, after)]
    fused = {name: count for name, count in names[1].items() if name.startswith("dfgnn::")}
    assert fused == {"dfgnn::layer": 2, "dfgnn::layer_backward": 2} and not fused.keys() & names[0].keys()
    assert before.verdict == "host" and before.kernels == 0 and before.peak_bytes > 0
    assert after.host_ms > 0 and after.calling_thread_ms is None
    assert 'table(sort_by="self_cpu_time_total")' in str(before) and "TKLQT" not in str(before)


def test_bad_input():
    with pytest.raises(TypeError, match="dfgnn.profile: step: expected a function, got int"):
        dfgnn.profile(3)
    with pytest.raises(ValueError, match="steps, warmup: expected at least 1 and 0, got 0 and 5"):
        dfgnn.profile(lambda: None, steps=0)


@pytest.mark.gpu
def test_on_a_gpu():
    layer, step = layer_and_step("cuda")
    before = dfgnn.profile(step, steps=3)
    dfgnn.accelerate(layer)
    after = dfgnn.profile(step, steps=3)
    for found in (before, after):
        assert found.verdict == "launch-bound"
        assert 10 < found.kernels < 300 and found.launches == found.kernels
        # No kernel starts before its launch returns to the driver, some microseconds each.
        assert found.tklqt_ms > found.kernels * 1e-3
        assert 0 < found.device_ms < found.step_ms
        assert 0 < found.calling_thread_ms < 2 * found.step_ms
    with torch.autograd.set_multithreading_enabled(False):
        assert dfgnn.profile(step, steps=3).calling_thread_ms is None
    assert torch._C._is_multithreading_enabled()
    assert before.waits >= 1 and after.waits == 0  # PyG drops loops by a mask
    assert after.kernels < before.kernels
    x = torch.randn(4096, 4096, device="cuda")
    heavy = dfgnn.profile(lambda: (x @ x @ x).sum(), steps=3)
    assert heavy.verdict == "bandwidth-bound"
    assert dfgnn.profile(lambda: x[0, 0].item(), steps=3).waits >= 1
