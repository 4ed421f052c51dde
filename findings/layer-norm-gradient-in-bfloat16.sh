#!/usr/bin/env bash
# torch 2.13.0, CPU: the gradient of LayerNorm's weight over 5,000 rows of 64 bfloat16 numbers is about 1,024 on one
# thread and 1,665 on two, where 4,003 is right. GroupNorm with one group, the same function of a row, gives 4,003.
# Seen: 1024.5 1664.9 4003.0. Source: the CPU kernel of the backward adds rows into a buffer of its own per thread,
# of the type of the input, and adds the buffers up; a sum of numbers below 1 stops growing where half a unit of the
# last of its eight bits is larger than they are.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch

x = torch.randn(5000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def gradient(norm, x, threads):
    torch.set_num_threads(threads)
    (norm(x) * x.sign()).sum().backward()
    return norm.weight.grad.double().mean().item()


exact = gradient(torch.nn.LayerNorm(64).double(), x.double(), 1)
one, two = (gradient(torch.nn.LayerNorm(64).bfloat16(), x, threads) for threads in (1, 2))
group = gradient(torch.nn.GroupNorm(1, 64).bfloat16(), x, 1)
print(torch.__version__, exact, one, two, group)
assert abs(exact / 4003 - 1) < 0.01 and abs(group / exact - 1) < 0.01
assert one < 0.3 * exact and one < two < 0.6 * exact
PYTHON
