#!/usr/bin/env bash
# dgl 1.1.3, CPU: a boolean feature, or a boolean label, that `save_graphs` has written comes back as uint8. The mask's
# inverse, `~mask`, is then 254 and 255, which selects every row, and `rows[mask.long()]` takes the rows 0 and 1.
# Seen: torch.bool torch.uint8 torch.uint8, and [254, 255, 254, 254, 255] for the inverse of [1, 0, 1, 1, 0]. The graph
# itself keeps a boolean feature. Source: a file holds arrays of DGL's own type, which has no booleans.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check dgl==1.1.3 torch==2.13.0 numpy==2.4.6 packaging==26.3
cd "$folder"
DGLBACKEND=pytorch "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import dgl
import torch

graph = dgl.graph(([0, 1, 2, 3], [1, 2, 3, 4]))
mask = torch.tensor([True, False, True, True, False])
graph.ndata["train_mask"] = mask
dgl.save_graphs("graphs.bin", [graph], {"mask": mask})
(loaded,), labels = dgl.load_graphs("graphs.bin")
found = loaded.ndata["train_mask"]
rows = torch.arange(5) * 10
print(dgl.__version__, mask.dtype, found.dtype, labels["mask"].dtype)
print(rows[mask].tolist(), rows[found.long()].tolist(), (~mask).tolist(), (~found).tolist())
assert graph.ndata["train_mask"].dtype == torch.bool  # the graph itself keeps it
assert found.dtype == labels["mask"].dtype == torch.uint8 and torch.equal(found.bool(), mask)
assert (~found).tolist() == [254, 255, 254, 254, 255]  # the inverted mask selects all rows, where it is taken as one
assert (~found).bool().all()
PYTHON
