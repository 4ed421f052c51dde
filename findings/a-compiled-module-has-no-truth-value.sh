#!/usr/bin/env bash
# torch 2.13.0: bool() of a module is True, of the same module after torch.compile a TypeError, so that `compiled or model` and
# `if self.encoder:` fail. Eager modules without __len__ have no such error.
# Seen: "Linear does not support len()". Source: the class of compiled modules defines __len__ for those that wrap a
# container, and Python asks __len__ for the truth of an object that has no __bool__.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch

layer = torch.nn.Linear(2, 2)
assert layer
try:
    bool(torch.compile(layer))
except TypeError as error:
    print(torch.__version__, error)
    assert "len()" in str(error)
else:
    raise AssertionError("a compiled module has a truth value")
PYTHON
