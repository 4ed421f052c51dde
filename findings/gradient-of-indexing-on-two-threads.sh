#!/usr/bin/env bash
# torch 2.13.0, CPU: the gradient of x[index], an index_put_ that accumulates, takes longer on two threads than on one,
# and there about ten times as long as index_add_ of the same rows, which gets faster (100,000 rows of 128 into 10,000).
# Seen: index_put_ 17 ms on one thread and 34 on two, index_add_ 6.4 and 3.7. Source: with more than one thread each
# number is added by an atomic compare-and-swap; with one it is a plain addition.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import os
import sys
import time

import torch

if (os.cpu_count() or 1) < 2:
    sys.exit("needs two processors")
torch.manual_seed(0)
index, rows = torch.randint(0, 10_000, (100_000,)), torch.randn(100_000, 128)


def put():
    return torch.zeros(10_000, 128).index_put_((index,), rows, accumulate=True)


def add():
    return torch.zeros(10_000, 128).index_add_(0, index, rows)


def milliseconds(run):
    found = []
    for _ in range(9):
        start = time.perf_counter()
        run()
        found.append(1e3 * (time.perf_counter() - start))
    return min(found)


torch.testing.assert_close(put(), add(), rtol=1e-4, atol=1e-4)
found = {}
for threads in (1, 2):
    torch.set_num_threads(threads)
    found[threads] = milliseconds(put), milliseconds(add)
print(torch.__version__, {n: [round(x, 1) for x in pair] for n, pair in found.items()})
assert found[2][0] > 1.2 * found[1][0] and found[2][0] > 4 * found[2][1]
PYTHON
