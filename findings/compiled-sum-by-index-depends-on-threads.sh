#!/usr/bin/env bash
# torch 2.13.0, CPU: a compiled scatter_add of 5,000 bfloat16 ones gives 256 on one thread and 4,992 on two; in float16
# 2,048 and 5,000. Eager it gives 4,992 and 5,000 on any number of threads.
# Seen: bfloat16 256 4992, float16 2048 5000. Source: with more than one thread Inductor leaves the operation to the eager
# kernel, which sorts and adds in float32; with one it writes a loop that adds into the 16-bit result. Needs a C++
# compiler.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch


def total(x):
    return x.new_zeros(1).scatter_add(0, torch.zeros(len(x), dtype=torch.long), x)


found = {}
for dtype in (torch.bfloat16, torch.float16):
    ones = torch.ones(5000, dtype=dtype)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch._dynamo.reset()
        found[dtype, threads] = total(ones).item(), torch.compile(total)(ones).item()
print(torch.__version__, found)
assert found[torch.bfloat16, 1] == (4992, 256) and found[torch.bfloat16, 2] == (4992, 4992)
assert found[torch.float16, 1] == (5000, 2048) and found[torch.float16, 2] == (5000, 5000)
PYTHON
