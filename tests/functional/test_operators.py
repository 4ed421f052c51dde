"""The operators torch.ops.dfgnn with arguments that do not fit, and without memory."""

import contextlib
import gc
import os
from pathlib import Path

import operator_fuzz
import pytest
import torch
from attention import SCORES, function, make_inputs, run
from graphs import make_graph
from torch import library

from dfgnn import Graph
from dfgnn.runtime.arguments import ops


def test_inconsistent_arguments_are_refused(device, plain_python):
    """Every one raises RuntimeError before a kernel starts; in a process of its own, which must survive."""
    script = Path(__file__).with_name("operator_fuzz.py")
    result = plain_python(script.read_text(), device, path=[script.parent])
    assert int(result.stdout) > 1000


@pytest.mark.parametrize("name, at", [("edge_gate", 6), ("edge_mask", 7), ("edge_weight", 8)])
def test_options_on_edges_of_other_heads_are_refused(device, name, at):
    op, args = next(operator_fuzz.right_calls(device))
    wrong = torch.cat([args[at], args[at], args[at][:, :1]], 1)
    with pytest.raises(RuntimeError, match=f"{name}: expected 1 or num_heads columns"):
        op(*args[:at], wrong, *args[at + 1 :])


@pytest.mark.parametrize(
    "seed, dropout_p, message",
    [
        (False, 0.5, "seed: needed when dropout_p > 0"),
        (True, 2.0, "dropout_p: expected a probability"),
        (True, -0.5, "dropout_p: expected a probability"),
    ],
)
def test_dropout_that_is_refused(device, seed, dropout_p, message):
    calls = operator_fuzz.right_calls(device)
    number, *tensors, given, bias, slope, _, train = next(args for op, args in calls if op is ops.gat)
    with pytest.raises(RuntimeError, match=message):
        ops.gat(number, *tensors, given if seed else None, bias, slope, dropout_p, train)


# Operators of eager calls, which compilers do not see.
EAGER = "attend", "attend_backward", "attend_second_order", "gat", "gat_backward"
EAGER += "score_terms", "score_terms_backward"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_kernels(dtype):
    """Fake kernels return the shapes and dtypes that the operators return, which compilers rely on."""
    for op, args in operator_fuzz.right_calls("cpu", dtype):
        if op.__name__ not in EAGER:
            library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


_CPU = """
import gc
import resource, torch
from dfgnn import Graph, functional

graph = Graph.from_coo(torch.arange(3), torch.arange(3), num_src=3, num_dst=2**20)
value, alpha = torch.ones(3, 1, 2**10, requires_grad=True), torch.zeros(3, 1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, resource.getrlimit(resource.RLIMIT_AS)[1]))
try:
    functional.gat_attention(graph, value, alpha, None)  # 4 GiB
except RuntimeError as error:
    print(error)
graph = Graph.from_coo(torch.arange(3), torch.arange(3), num_src=3, num_dst=3)
functional.gat_attention(graph, value, alpha, None).sum().backward()
print(value.grad.eq(1).all().item())
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer needs the addresses")
def test_out_of_memory_on_the_cpu(plain_python):
    """A message with the size, and a process that goes on."""
    *message, works = plain_python(_CPU).stdout.splitlines()
    assert "CPU out of memory: no 4 GiB for a tensor of shape [1048576, 1, 1024]" in message[0]
    assert works == "True"


def until_it_is_full(size):
    """Yields tensors of ``size`` bytes until the allocator finds no room for another one."""
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            yield torch.empty(size, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("score", SCORES)
def test_out_of_memory_on_a_gpu(score):
    """torch's own error, forward and backward, and a process that goes on."""
    graph = make_graph("random", "cuda")
    inputs = make_inputs(score, graph, 4, 32)
    before = run(function(score), graph, inputs)
    many = 2**18  # 128 MB of features
    wide = Graph.from_coo(*graph.edge_index, num_src=graph.num_src, num_dst=many)
    large = make_inputs(score, wide, 4, 32)
    leaves = {name: x.clone().requires_grad_() for name, x in large.items()}
    out = function(score)(wide, **leaves)
    gradient = torch.ones_like(out)
    gc.collect()  # tensors that other tests have left could otherwise be freed later and make room
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**22) / total)
        filled = [x for size in (2**27, 2**24, 2**21) for x in until_it_is_full(size)]
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            function(score)(wide, **large)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            out.backward(gradient)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del filled
    torch.cuda.synchronize()
    after = run(function(score), graph, inputs)
    assert all(torch.equal(x, after[name]) for name, x in before.items())
