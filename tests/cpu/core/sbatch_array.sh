#!/bin/bash

# Parameters
#SBATCH --account=project
#SBATCH --array=0-2%3
#SBATCH --chdir=/repository
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=1
#SBATCH --job-name=turbopair-abc
#SBATCH --mem=65536MB
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/results/run/logs/%A_%a_0_log.out
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=30

# setup
module load cuda
export NCCL_DEBUG=WARN

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /results/run/logs/%A_%a_%t_log.out --cpus-per-task=8 /scratch/env/bin/python -u -m submitit.core._submit /results/run/logs
