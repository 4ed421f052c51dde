#!/usr/bin/env bash
# torch_geometric 2.8.0: a process that constructs layers leaves source files in the folder for temporary files, for good: one for
# each class of layer and kind of message, in every process, as each writes its own though they are equal. A hundred runs of a script with
# GATConv leave two hundred files; a folder for temporary files that counts entries fills.
# Seen: two processes with a GATConv and a GCNConv leave 6 files, in 3 pairs of equal content; a second layer of a class in the same
# process adds none. Source: template.py asks tempfile to keep the file, and nothing removes it at exit.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 torch_geometric==2.8.0 numpy==2.4.6
mkdir "$folder/temporary"
cd "$folder"
for _ in 1 2; do
    TMPDIR="$folder/temporary" "$folder/venv/bin/python" -W ignore -c "
import torch_geometric
from torch_geometric.nn import GATConv, GCNConv
layers = [GATConv(4, 4), GCNConv(4, 4), GATConv(4, 8)]
"
done
"$folder/venv/bin/python" - <<'PYTHON'
import hashlib
from collections import Counter
from pathlib import Path

files = sorted(Path("temporary").glob("*.py"))
same = Counter(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
print(len(files), sorted(same.values()), [file.name.rsplit("_", 1)[0] for file in files])
assert sorted(same.values()) == [2, 2, 2], same
PYTHON
