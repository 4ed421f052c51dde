#!/usr/bin/env bash
# pyarrow 26.0.1 and torch 2.13.0: torch.from_dlpack of a column (edge ids of a table, say) shares its memory and may be
# written to, although Arrow's arrays are immutable: an operation in place changes the table, and every other column that is
# a slice of the same buffer. NumPy gets the same column read-only, by to_numpy and by DLPack.
# Seen: a column 0, 1, 2 that reads 10, 11, 12 afterwards. Source: DLPack before its version 1 cannot say that memory is
# read-only, and torch does not keep such a mark.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1 torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import numpy as np
import pyarrow as pa
import torch

ids = pa.array([0, 1, 2], pa.int64())
table = pa.table({"source": ids, "target": ids})
assert not ids.to_numpy().flags.writeable and not np.from_dlpack(ids).flags.writeable
torch.from_dlpack(table["source"].chunk(0)).add_(10)
print(pa.__version__, torch.__version__, table.to_pydict())
assert table.to_pydict() == {"source": [10, 11, 12], "target": [10, 11, 12]}
table.validate(full=True)
PYTHON
