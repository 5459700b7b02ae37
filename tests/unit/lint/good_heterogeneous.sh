#!/bin/sh
#SBATCH -N4 -n4 --gres=gpu:1
#SBATCH hetjob
#SBATCH -N1 -n2
TFDIST_HET_GROUPS=worker,ps srun --het-group=0,1 python -m tfdist.train
