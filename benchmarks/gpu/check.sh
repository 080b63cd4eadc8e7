#!/usr/bin/env bash
# Builds waterflow against the torch that is here, runs the tests that need a GPU, then the benchmarks.
# Needs a GPU, a compiler and no network; installs nothing.
#
#   bash benchmarks/gpu/check.sh                        everything, in less than nine minutes
#   bash benchmarks/gpu/check.sh build throughput       some parts
#   LIMIT_launch=200 bash benchmarks/gpu/check.sh build launch
#                                                       a part with another time limit, in seconds
#   bash benchmarks/gpu/check.sh build priority         a guaranteed job beside another on the cores
#                                                       of this machine, which nobody else uses
#
# OUT: the folder for the result (GPU-DATE.json) and the logs; PYTHON: the Python with torch;
# TOTAL: seconds for all parts together; WATERFLOW_COMMIT: where there is no git; GPU_ARGS: more
# options for every benchmark.
# A part that fails or takes too long does not stop the others. The exit code tells of build, tests
# and equality; a goal that is missed is in the table, and no failure.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results/local}
GPU_ARGS=${GPU_ARGS:-}
# A checkout that is found first needs no installation: see waterflow/__init__.py.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export MAX_JOBS=${MAX_JOBS:-16}

# Seconds for each part; those without share what is left of the total when their turn comes.
TOTAL=${TOTAL:-525}
declare -A limits=([build]=90 [tests]=80 [equality]=75 [overhead]=60 [launch]=60 [elastic]=110
  [priority]=200)
order=(build tests equality elastic overhead launch throughput max_batch)
asked_for=(priority)
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=("${order[@]}")

scratch=$(mktemp -d)
mkdir -p "$OUT"
finish() {
  # A benchmark that was killed may have left its MPS daemon.
  for pipe in "${TMPDIR:-/tmp}"/waterflow-mps-*/pipe; do
    [ -d "$pipe" ] && echo quit | CUDA_MPS_PIPE_DIRECTORY="$pipe" timeout 20 nvidia-cuda-mps-control
  done
  rm -rf "$scratch"
}
trap finish EXIT

build() {
  "$PYTHON" setup.py build_ext --inplace &&
    "$PYTHON" -c 'import waterflow, waterflow.models.bert, waterflow.allocator_ext._C as c; print(c)'
}

part() {
  case $1 in
    build) build ;;
    tests)
      # Only the files that have some: others need packages that may be missing here.
      mapfile -t files < <(grep -rl --include='*.py' 'mark.cuda' tests)
      "$PYTHON" -m pytest -m cuda --timeout 60 "${files[@]}"
      ;;
    priority) "$PYTHON" -m benchmarks.priority --pairs 1 --repeats 1 --json >"$scratch/$1.json" ;;
    *)
      # It stops by itself, somewhat before it would be stopped, and keeps what it has found.
      # shellcheck disable=SC2086
      "$PYTHON" -m "benchmarks.gpu.$1" --seconds $(($2 * 4 / 5)) --out "$scratch/$1.json" $GPU_ARGS
      ;;
  esac
}
export -f part build
export PYTHON GPU_ARGS scratch

sharing=0
for name in "${parts[@]}"; do
  if [[ " ${order[*]} ${asked_for[*]} " != *" $name "* ]]; then
    echo "there is no part '$name'; the parts are: ${order[*]} ${asked_for[*]}" >&2
    exit 2
  fi
  [ -n "${limits[$name]:-}" ] || sharing=$((sharing + 1))
done
for name in "${parts[@]}"; do
  left=$((TOTAL - SECONDS))
  limit=${limits[$name]:-}
  if [ -z "$limit" ]; then
    limit=$((left / sharing))
    sharing=$((sharing - 1))
  fi
  limit=$((limit < left ? limit : left))
  override="LIMIT_$name"
  limit=${!override:-$((limit > 10 ? limit : 10))}
  began=$SECONDS
  echo "== $name, at most $limit s"
  timeout -k 15 "$limit" bash -c "part $name $limit" >"$OUT/$name.log" 2>&1
  code=$?
  [ $code -eq 0 ] || tail -n 25 "$OUT/$name.log"
  echo "$name $code $((SECONDS - began))" >>"$scratch/status"
done
"$PYTHON" -m benchmarks.gpu.summary "$scratch" "$OUT"
