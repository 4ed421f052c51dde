#!/usr/bin/env bash
# torch 2.13.0: after `Tensor.__getitem__` was replaced once by a function that calls the original one (as code that counts or
# logs indexing does), `torch.tensor([torch.tensor(1.0)])` is a TypeError. Putting the original back, or deleting the
# attribute, does not help: only a new process does.
# Seen: a tensor of one element before, "len() of a 0-d tensor" after. Source: the constructor asks Python's C interface
# whether an element is a sequence, and Python fills that slot of a class when `__getitem__` is set on it, not before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch import Tensor

indexed = Tensor.__getitem__


def made():
    try:
        return tuple(torch.tensor([torch.tensor(1.0)]).shape)
    except TypeError as error:
        return str(error)


found = [made()]
Tensor.__getitem__ = lambda tensor, index: indexed(tensor, index)
found.append(made())
Tensor.__getitem__ = indexed
found.append(made())
del Tensor.__getitem__
found.append(made())
print(torch.__version__, found)
assert found == [(1,), *["len() of a 0-d tensor"] * 3], found
PYTHON
