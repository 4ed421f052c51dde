#!/usr/bin/env bash
# torch 2.13.0: `F.batch_norm(training=True)` writes its running statistics without counting a version of these tensors, so that
# autograd does not see that values which it saved are overwritten: the gradient of `(w * running_mean).sum()`, computed before, is
# that of the new mean, without an error. `F.instance_norm` counts one, and the same gradient raises.
# Seen: gradient [1, 2] (the new mean) where the mean was [0, 0] in forward; versions 0 and 0, after instance_norm 1. Source: the schema
# of native_batch_norm does not say that it writes to its arguments.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
import torch.nn.functional as F


def gradient(normalize):
    mean, weight = torch.zeros(2), torch.ones(2, requires_grad=True)
    product = (weight * mean).sum()
    normalize(mean)
    try:
        product.backward()
        found = weight.grad.tolist()
    except RuntimeError as error:
        found = "modified by an inplace operation" in str(error)
    return mean._version, mean.tolist(), found


rows = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
of_batch = gradient(lambda mean: F.batch_norm(rows, mean, torch.ones(2), training=True, momentum=1.0))
of_instance = gradient(
    lambda mean: F.instance_norm(rows.t()[None], mean, torch.ones(2), use_input_stats=True, momentum=1.0)
)
print(torch.__version__, of_batch, of_instance)
assert of_batch == (0, [1.0, 2.0], [1.0, 2.0]), of_batch
assert of_instance == (1, [1.0, 2.0], True), of_instance
PYTHON
