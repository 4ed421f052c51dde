#!/usr/bin/env bash
# torch 2.13.0: a compiled module goes on calling the method that its class had when it was compiled. After the method
# is replaced in the class the module gives 2, the compiled one 1; 0.0 replaced by -0.0 in an attribute is not seen
# either. Another attribute of the object is: 5 in both.
# Seen: the numbers above. Source: guards compare an object's type and its own attributes, and numbers by equality;
# the functions that a class holds are taken to stay.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cd "$folder"
cat > model.py <<'PYTHON'
import math

import torch


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.zero = 1.0, 0.0

    def scale(self):
        return self.factor

    def forward(self, x):
        return x * self.scale() * math.copysign(1.0, self.zero)


def pair(change):
    layer, x = Layer(), torch.ones(1)
    compiled = torch.compile(layer, backend="eager")
    assert compiled(x).item() == 1
    change(layer)
    return layer(x).item(), compiled(x).item()


found = [
    pair(lambda layer: setattr(layer, "factor", 5.0)),
    pair(lambda layer: setattr(layer, "zero", -0.0)),
    pair(lambda layer: setattr(Layer, "scale", lambda self: 2.0)),
]
print("as it is, compiled:", found)
assert found == [(5, 5), (-1, 1), (2, 1)]
PYTHON
"$folder/venv/bin/python" -W ignore model.py
