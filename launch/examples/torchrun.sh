#!/usr/bin/env bash
# Trains on one machine under torchrun, one rank a GPU: launch/examples/torchrun.sh MODEL_FOLDER DATA_PREFIX [FLAGS]
# --no-python, because the ranks are megashard itself. On several machines, add to each of them
#   --nnodes N --node-rank I --master-addr FIRST_HOST --master-port 29500
# Without torchrun, `build/launch/megashard launch -n 8 -- pretrain ...` does the same and starts faster.
set -euo pipefail

model=${1:?the first argument is a Hugging Face folder}
data=${2:?the second argument is the prefix of tokenised data, without .bin and .idx}
shift 2
ranks=${RANKS:-$(nvidia-smi -L 2>/dev/null | wc -l)}
[ "$ranks" -ge 1 ] || ranks=2 # no GPU: two ranks on the CPU

torchrun --no-python --nproc-per-node "$ranks" build/launch/megashard pretrain \
  --use-torch-fsdp2 --fsdp2-config-path fsdp2_config.yaml --ckpt-format torch_dcp \
  --hf-model "$model" --data-path "$data" --split 99,1,0 \
  --seq-length 1024 --micro-batch-size 1 --global-batch-size $((ranks * 4)) \
  --train-iters 1000 --lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 20 "$@"
