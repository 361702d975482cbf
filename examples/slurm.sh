#!/bin/bash
# Train on several nodes of a SLURM cluster, one torchrun a node and one rank a GPU:
#
#     sbatch examples/slurm.sh sd35m-ocr run.dir=runs/mine
#     sbatch examples/slurm.sh runs/mine --resume      # go on, also on another number of nodes
#
# The folder with this package, its environment and runs/ must be the same on all nodes.

#SBATCH --job-name=leangrpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1      # torchrun starts the ranks of its node itself
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --signal=TERM@600        # 10 minutes before the end: finish the update and save

set -euo pipefail

source "${VENV:-.venv}/bin/activate"

# The ranks find one another through the first node of the job.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))  # two jobs on one node must not share it
gpus=${SLURM_GPUS_ON_NODE:-8}

# Threads of a rank. Equal numbers of threads are what makes a resumed run bitwise the same.
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / gpus))
# Seconds that torchrun leaves the ranks to finish an update when it is told to end.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=540

# No restarts: what was started again would find a run in its folder. Submit again with --resume.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "$gpus" \
    --max-restarts 0 \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:$port" \
    -m leangrpo train "$@"
