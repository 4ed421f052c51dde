#!/usr/bin/env bash
# onnxruntime 1.32.0, CPU: ReduceMean of 2**25 float32 ones is 1 along a row and 0.5 along a column [n, 1].
# ReduceLogSumExp of them loses half of the sum in either form, Softmax in neither.
# Seen: 1.0 0.5, log-sum-exp 17.636 and 17.636 where 18.329 is right, softmax 1.0 1.0. Source: a column is reduced row by row
# into one float32, which stops at 2**24; a row by vectorised partial sums, but not where exponentials are added.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import math

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

N = 2**25


def run(operator, shape, **attributes):
    node = helper.make_node(operator, ["x"], ["y"], **attributes)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    ends[0] = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))
    graph = helper.make_graph([node], "one", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.ones(shape, np.float32)})[0]


forms = {"row": ((1, N), 1), "column": ((N, 1), 0)}
mean = {form: run("ReduceMean", shape, axes=[axis]).item() for form, (shape, axis) in forms.items()}
logs = {form: run("ReduceLogSumExp", shape, axes=[axis]).item() for form, (shape, axis) in forms.items()}
soft = {form: run("Softmax", shape, axis=axis).sum(dtype=np.float64) for form, (shape, axis) in forms.items()}
print(onnxruntime.__version__, mean, logs, 1 + math.log(N), soft)
assert mean == {"row": 1.0, "column": 0.5}
assert all(abs(x - (1 + math.log(N / 2))) < 1e-3 for x in logs.values())
assert all(abs(x - 1) < 1e-3 for x in soft.values())
PYTHON
