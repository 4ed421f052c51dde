#!/usr/bin/env bash
# python-graphblas 2025.2.0 on SuiteSparse 9.4.5: the mean of 200 int8 ones (a row of an adjacency matrix in its smallest
# type) is -0.28, its sum -56. plus_pair of the same matrix counts 200 in int64.
# Seen: -0.28 -56 200. Source: the aggregator divides, in float64, a sum that was reduced in the type of the values, while
# plus_pair, which does not look at values, has int64 for integers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check python-graphblas==2025.2.0 suitesparse-graphblas==9.4.5.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import graphblas as gb
import numpy as np

rows, columns = [0] * 200, list(range(200))
matrix = gb.Matrix.from_coo(rows, columns, np.ones(200, np.int8), nrows=1, ncols=200)
row = matrix[0, :].new()
mean, total = row.reduce(gb.agg.mean).new().value, row.reduce(gb.monoid.plus).new().value
common = matrix.mxm(matrix.T, gb.semiring.plus_pair).new()
print(gb.__version__, mean, total, common.dtype, common[0, 0].new().value)
assert abs(mean + 0.28) < 1e-9 and total == -56 and common[0, 0].new().value == 200
PYTHON
