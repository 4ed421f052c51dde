#!/usr/bin/env bash
# GPU tests and compute-sanitizer on this machine's GPU; records the result in benchmarks/results/gpu-check.json.
# Nothing is built: dfgnn/lib must hold both libraries (make build, make cuda). Arguments: --help.
#   PYTHON   an interpreter with a CUDA build of torch and pytest; default .venv's, else python3
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  [[ -x "$root/.venv/bin/python" ]] && PYTHON="$root/.venv/bin/python"
fi
exec "$PYTHON" "$root/scripts/gpu_check.py" "$@"
