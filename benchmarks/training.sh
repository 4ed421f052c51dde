#!/usr/bin/env bash
# The table of docs/training.md, on a GPU: benchmarks/training.sh OUT [SECONDS], with data below $DFGNN_DATA.
# First time, memory and kernels, one run at a time, for at most SECONDS; then as long the scores, in parallel.
set -u
cd "$(dirname "$0")/.."
out="$1" seconds="${2:-1800}"
compare() {
  PYTHONPATH="$PWD" PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 timeout "$((seconds + 20))" "${PYTHON:-python3}" \
    examples/compare.py --out "$out" --plan benchmarks/training.json "$@"
}
compare --no-scores --common "--root $DFGNN_DATA --device cuda"
compare --no-alone --processes 14 --limit "$seconds" \
  --common "--root $DFGNN_DATA --device cuda --max-seconds $((seconds - 10))"
