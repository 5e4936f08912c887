#!/usr/bin/env bash
# Builds, tests and benchmarks the CUDA part in one call, on one GPU or more.
#   tests/cuda/run_one_gpu.sh OUT_DIR [quick|sweep|full]
# Needs nvcc, torch with CUDA, pytest, pytest-timeout and hypothesis. Logs and JSON are in OUT_DIR.
set -u
if [ $# -eq 0 ]; then
  grep '^#  ' "$0" >&2
  exit 2
fi
cd "$(dirname "$0")/../.." || exit 2
out=$(mkdir -p "$1" && cd "$1" && pwd)
mode=${2:-full}
python=${PYTHON:-python3}
status=0
tests/cuda/run_native.sh "$out" "$mode" || status=1
timeout -k 10 "${TEST_LIMIT:-560}" "$python" -m pytest tests/cuda -p no:cacheprovider -q \
  --timeout 300 --durations 8 >"$out/pytest.log" 2>&1 || status=1
tail -n "${TAIL:-25}" "$out/pytest.log"
exit $status
