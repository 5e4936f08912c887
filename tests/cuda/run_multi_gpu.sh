#!/usr/bin/env bash
# Tests and benchmarks the exchanges between the GPUs of one host, in one call.
#   tests/cuda/run_multi_gpu.sh OUT_DIR [STAGE...]
# Stages: topology, tests, bench, decode; default: all. Needs 2, 4 or 8 GPUs, nvcc, torch with
# CUDA, pytest, pytest-timeout and hypothesis. Logs and JSON are in OUT_DIR.
#
# Nothing here uses NVLink multicast: on shared hosts a program that fails while it does can take
# GPUs out of service.
set -u
if [ $# -eq 0 ]; then
  grep '^#  ' "$0" >&2
  exit 2
fi
cd "$(dirname "$0")/../.." || exit 2
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
stages=${*:-topology tests bench decode}
python=${PYTHON:-python3}
if ! gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())' 2>&1); then
  echo "expected a Python with torch, pytest and the rest as PYTHON, got $python: ${gpus##*$'\n'}"
  exit 2
fi
ranks=1
while [ $((2 * ranks)) -le "$gpus" ] && [ $ranks -lt 8 ]; do ranks=$((2 * ranks)); done
if [ $ranks -lt 2 ]; then
  echo "expected at least 2 GPUs, got $gpus"
  exit 2
fi
status=0
# Runs one stage with a limit of its own, so that a hang costs no more than that.
stage() {
  local name=$1 limit=$2 began=$SECONDS rc=0
  shift 2
  timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1 || rc=$?
  [ $rc -eq 0 ] || status=1
  echo "== $name: rc=$rc, $((SECONDS - began)) s"
  tail -n "${TAIL:-40}" "$out/$name.log"
}
wanted() { [[ " $stages " == *" $1 "* ]]; }

if wanted topology; then
  stage topology 60 bash -c 'nvidia-smi topo -m; nvidia-smi nvlink --status | head -24; "$0" - <<PY
import torch
count = torch.cuda.device_count()
for i in range(count):
    p = torch.cuda.get_device_properties(i)
    reach = [j for j in range(count) if j != i and torch.cuda.can_device_access_peer(i, j)]
    print(f"GPU {i}: {p.name}, {p.uuid}, reaches {reach}")
PY' "$python"
fi
if wanted tests; then
  # Worlds of more ranks than GPUs are for one GPU; run_one_gpu.sh has them.
  fitting="not [16]"
  for size in 4 8; do [ $size -le $ranks ] || fitting="$fitting and not [$size]"; done
  for size in 3 5 6; do [ $size -le "$gpus" ] || fitting="$fitting and not [N$size]"; done
  stage tests "${TEST_LIMIT:-400}" "$python" -m pytest -p no:cacheprovider -q --timeout 300 \
    --durations 6 -k "$fitting" tests/cuda/test_multi_gpu.py tests/cuda/test_exchange.py \
    tests/cuda/test_world_sizes.py tests/cuda/test_collective_combine.py tests/cuda/test_faults.py
fi
if wanted bench; then
  stage bench 420 "$python" -m dcp_inductor bench --device cuda --ranks $ranks \
    --json "$out/multi_gpu.json"
fi
if wanted decode; then
  stage decode 240 env PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" "$python" \
    benchmarks/decode_step.py --ranks $ranks --json "$out/decode_step.json"
fi
exit $status
