#!/usr/bin/env bash
# Writes the batch scripts beside it, each by one command; give another folder to have them there.
set -euo pipefail
here="$(dirname "$(realpath "${BASH_SOURCE[0]}")")"
out="$(realpath "${1:-$here}")"
cd "$here/.." # where train_gpt.py is: a script that is not there is refused

# Four nodes of eight GPUs for four hours at a time. A minute or two before the limit the run saves and leaves, and the
# job goes back to the queue, until the run is finished.
outlast slurm script --run-id gpt --run-dir /shared/runs/gpt --nodes 4 --gpus-per-node 8 --nproc-per-node 8 \
  --cpus-per-task 96 --time 4:00:00 --preempt-time 120 -- \
  --ft-rank-section-timeouts=setup:600,step:180,checkpointing:420 --ft-rank-out-of-section-timeout=300 \
  train_gpt.py --checkpoint-dir /shared/runs/gpt/checkpoints > "$out/four_nodes.sbatch"

# The same with one node more, which waits for the slot of a lost one: the job outlives a node.
outlast slurm script --run-id gpt --run-dir /shared/runs/gpt --nodes 4 --spares 1 --gpus-per-node 8 --nproc-per-node 8 \
  --cpus-per-task 96 --time 4:00:00 --preempt-time 120 -- \
  --ft-rank-section-timeouts=setup:600,step:180,checkpointing:420 --ft-rank-out-of-section-timeout=300 \
  train_gpt.py --checkpoint-dir /shared/runs/gpt/checkpoints > "$out/four_nodes_and_a_spare.sbatch"

# One node without GPUs, in a virtual environment; a job that fails does so for good.
outlast slurm script --run-id small --run-dir /shared/runs/small --nproc-per-node 2 --cpus-per-task 4 --mem 8G \
  --num-job-retries-on-failure 0 --setup 'source /shared/venv/bin/activate' -- \
  train_gpt.py --iterations 300 --checkpoint-dir /shared/runs/small/checkpoints > "$out/one_node.sbatch"
