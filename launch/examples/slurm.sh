#!/usr/bin/env bash
# Trains on 2 nodes of 8 GPUs under Slurm, from the top of the tree: sbatch launch/examples/slurm.sh [FLAGS]
# One task a GPU: srun tells every task its rank.
#SBATCH --job-name=megashard
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
set -euo pipefail

# Folders that every node sees.
model=${MODEL:?set MODEL to a Hugging Face folder}
data=${DATA:?set DATA to the prefix of tokenised data, without .bin and .idx}
save=${SAVE:-$PWD/checkpoints}

export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# Rank 0 listens on the first node. megashard finds it by itself; other programs of the job need the variable.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]}

# Slurm sends SIGTERM five minutes before the end: the ranks finish their step, save and exit. A job that is queued
# again goes on from there, because --load and --save are one folder.
srun --kill-on-bad-exit=1 --cpus-per-task="$OMP_NUM_THREADS" build/launch/megashard pretrain \
  --use-torch-fsdp2 --fsdp2-config-path fsdp2_config.yaml --ckpt-format torch_dcp \
  --hf-model "$model" --data-path "$data" --split 99,1,0 \
  --seq-length 4096 --micro-batch-size 1 --global-batch-size 256 \
  --train-iters 10000 --lr 3e-5 --min-lr 3e-6 --lr-decay-style cosine --lr-warmup-iters 100 \
  --exit-signal-handler --load "$save" --save "$save" --save-interval 500 \
  --metrics-file "$save/run.jsonl" "$@"
