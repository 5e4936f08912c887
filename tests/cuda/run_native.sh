#!/usr/bin/env bash
# Builds the virtual-rank programs and runs checks, stress and benchmark in one call on one GPU.
#   tests/cuda/run_native.sh OUT_DIR [quick|sweep|full]
# Needs nvcc and a GPU, no torch. Ends with a short table; logs and JSON are in OUT_DIR.
set -u
if [ $# -eq 0 ]; then
  grep '^#  ' "$0" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
mode=${2:-full}
build=${BUILD:-/tmp/dcp_native_$(id -u)}
case $mode in
  quick) cases=60 gathers=60 replays=5000 sanitized=0 ;;
  sweep) cases=80 gathers=80 replays=20000 sanitized=0 ;;
  *) cases=200 gathers=200 replays=100000 sanitized=4 ;;
esac

if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo 'expected a GPU, found none'
  exit 2
fi
cd "$here/native" || exit 2
start=$SECONDS
if ! make -j"$(nproc)" BUILD="$build" >"$out/build.log" 2>&1; then
  grep -E "error|Error" "$out/build.log" | head -20
  exit 1
fi
echo "build: $((SECONDS - start)) s"

status=0
# Runs one program with a limit of its own, so that a hang costs no more than that.
stage() {
  local name=$1 limit=$2
  shift 2
  local began=$SECONDS
  timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
  local rc=$?
  [ $rc -eq 0 ] || status=1
  echo "$name: rc=$rc, $((SECONDS - began)) s: $(tail -n 1 "$out/$name.log")"
  [ $rc -eq 0 ] || grep -E "FAILED|fault|error" "$out/$name.log" | head -12
}
stage check_combine 120 "$build/check_combine" $cases
stage check_gather 60 "$build/check_gather" $gathers
stage bench 200 "$build/bench" "$out/bench.json" "$mode"
stage stress 120 "$build/stress" $replays
stage stress_gather 90 "$build/stress_gather" $replays
if [ $sanitized -gt 0 ] && command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck synccheck; do
    for program in check_combine check_gather; do
      stage "$tool.$program" 150 compute-sanitizer --tool $tool --error-exitcode 9 \
        "$build/$program" $sanitized
    done
  done
fi
cat "$out"/*.log >"$out/all.log"
cat "$out/stress.log" "$out/stress_gather.log"
grep -E "TB/s$|copy|empty|rows/rank" "$out/bench.log" |
  grep -E "copy|empty|T= *(1|8|16|64|256) |rows/rank" | cut -c1-230
exit $status
