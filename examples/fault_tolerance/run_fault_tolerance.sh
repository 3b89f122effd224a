#!/usr/bin/env bash
# Train a small GPT under `outlast run` with section timeouts; with --simulate-fault, survive a fault on the way.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
usage="usage: $(basename "$0") [--simulate-fault] [--iterations N] [--nproc-per-node N] [--dir FOLDER]"
simulate=false iterations=60 nproc=2 folder=""

while [ $# -gt 0 ]; do
  case "$1" in
    --simulate-fault) simulate=true; shift ;;
    --iterations | --nproc-per-node | --dir)
      [ $# -ge 2 ] || { echo "$1 needs a value; $usage" >&2; exit 2; }
      case "$1" in
        --iterations) iterations="$2" ;;
        --nproc-per-node) nproc="$2" ;;
        --dir) folder="$2" ;;
      esac
      shift 2 ;;
    -h | --help) echo "$usage"; exit 0 ;;
    *) echo "unknown option $1; $usage" >&2; exit 2 ;;
  esac
done

outlast="$here/../../.venv/bin/outlast"
[ -x "$outlast" ] || outlast="$(command -v outlast)" || {
  echo "outlast is not installed; run 'make setup' in the project's folder, or 'pip install outlast'" >&2
  exit 2
}
[ -n "$folder" ] || folder="$(mktemp -d "${TMPDIR:-/tmp}/fault_tolerance.XXXXXX")"

options=(
  --nproc-per-node "$nproc"
  --max-restarts 3
  --run-dir "$folder/run"
  --ft-rank-section-timeouts=setup:60,step:5,checkpointing:30
  --ft-rank-out-of-section-timeout=30
)
if $simulate; then
  options+=(--ft-simulate-fault=true --ft-simulated-fault-type=random)
fi

echo "checkpoints, journal and stacks are in $folder"
exec "$outlast" run "${options[@]}" "$here/../train_gpt.py" \
  --iterations "$iterations" --save-interval 10 --checkpoint-dir "$folder/checkpoints" --out "$folder/result.json"
