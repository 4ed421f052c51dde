#!/usr/bin/env bash
# torch_geometric 2.8.0: StdAggregation of a group of equal values is 0 in float32 and bfloat16, and 0.00316 in float16.
# Seen: 0.0 0.0 0.0031642913818359375. Source: the variance is raised to at least 1e-5 before its root is taken, and roots
# up to that of 1e-5 are set to 0 afterwards; in float16 1e-5 is a subnormal number whose root is above the bound.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 torch_geometric==2.8.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch_geometric.nn.aggr import StdAggregation

index = torch.tensor([0, 0, 0, 1, 1])
found = [
    StdAggregation()(torch.full((5, 1), 3.0, dtype=dtype), index).flatten().tolist()
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
print(found)
assert found[0] == found[1] == [0, 0]
assert all(0.003 < value < 0.0033 for value in found[2])
PYTHON
