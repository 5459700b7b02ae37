#!/usr/bin/env bash
#SBATCH --job-name=mnist
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH -o logs/%x-%j.log
set -euo pipefail
export TFDIST_STRATEGY=multiworker TFDIST_SPLIT_BYTES=4000000
srun python -m tfdist.train --config.global_batch_size=256 \
    --config.run_dir="$HOME/run"
