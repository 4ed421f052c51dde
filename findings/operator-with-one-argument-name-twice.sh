#!/usr/bin/env bash
# torch 2.13.0: torch.library defines an operator with two arguments of one name and registers a fake kernel for it. Eager calls and
# the backend aot_eager give each value its place; only Inductor refuses it, while it lowers the graph, with an error that names the
# argument and not the schema. One learns of it on the first compiled call, not where the operator is defined.
# Seen: eager and aot_eager [5.0, 5.0]; Inductor "duplicate parameter name: 'factor'". Source: Inductor matches the arguments of an
# operator that it does not know by an inspect.Signature, which takes no name twice; the parser of schemas does not look.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cd "$folder"
TORCHINDUCTOR_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch

library = torch.library.Library("seen", "FRAGMENT")
library.define("scaled(Tensor x, float factor, float factor) -> Tensor")
library.impl("scaled", lambda x, factor, offset: x * factor + offset, "CompositeExplicitAutograd")
torch.library.register_fake("seen::scaled", lambda x, factor, offset: torch.empty_like(x), lib=library)


def function(x):
    return torch.ops.seen.scaled.default(x, 2.0, 3.0).relu()


x = torch.ones(2)
eager, recorded = function(x), torch.compile(function, backend="aot_eager")(x)
print("eager", eager.tolist(), "aot_eager", recorded.tolist())
assert eager.tolist() == recorded.tolist() == [5.0, 5.0]
torch.compiler.reset()
try:
    torch.compile(function)(x)
except Exception as error:
    text = next(line for line in str(error).splitlines() if line)
    print("inductor", text)
    assert "duplicate parameter name: 'factor'" in text
else:
    raise AssertionError("Inductor takes the operator")
PYTHON
