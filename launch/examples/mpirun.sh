#!/usr/bin/env bash
# Trains on one machine under Open MPI, one rank a GPU: launch/examples/mpirun.sh MODEL_FOLDER DATA_PREFIX [FLAGS]
# On several machines that see the same folders, HOSTS=gpu1:8,gpu2:8 RANKS=16 before it. Rank 0 is on the first.
set -euo pipefail

model=${1:?the first argument is a Hugging Face folder}
data=${2:?the second argument is the prefix of tokenised data, without .bin and .idx}
shift 2
ranks=${RANKS:-$(nvidia-smi -L 2>/dev/null | wc -l)}
[ "$ranks" -ge 1 ] || ranks=2 # no GPU: two ranks on the CPU

hosts=()
if [ -n "${HOSTS:-}" ]; then
  first=${HOSTS%%,*}
  hosts=(-H "$HOSTS" -x MASTER_ADDR="${first%:*}")
fi

# Without --bind-to none, two ranks have one core each, and their threads share it.
mpirun -n "$ranks" --bind-to none "${hosts[@]}" -x OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
  build/launch/megashard pretrain \
  --use-torch-fsdp2 --fsdp2-config-path fsdp2_config.yaml --ckpt-format torch_dcp \
  --hf-model "$model" --data-path "$data" --split 99,1,0 \
  --seq-length 1024 --micro-batch-size 1 --global-batch-size $((ranks * 4)) \
  --train-iters 1000 --lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 20 "$@"
