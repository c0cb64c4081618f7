"""Launch scripts of Megatron-LM and MindSpeed-MM, in small sizes: one run tells everything that must change, and what
is changed so then trains. Flags and values are those of the scripts; sizes, steps, batches and paths are smaller."""
from typing import NamedTuple

import pytest

from megashard import USAGE
from wrong_use import FROM_MODEL, run, write_tokens


class Change(NamedTuple):
    told: str  # the notice
    leave: str = ""  # the flag that goes, with its values
    take: str = ""  # the words that come


NO_TENSOR = Change("world size 1 is not divisible by --tensor-model-parallel-size 8", "--tensor-model-parallel-size")
NO_PIPELINE = Change("--pipeline-model-parallel-size is refused", "--pipeline-model-parallel-size")
NO_OPTIMIZER = Change("--use-distributed-optimizer is refused: FSDP2 shards the optimizer's state already",
                      "--use-distributed-optimizer")
TOKENS = Change("--vocab-size is missing", take="--vocab-size 60 --tokenizer-type NullTokenizer")
NO_GPU = Change("--distributed-backend nccl needs GPUs, but this run is on CPUs", "--distributed-backend")

SCRIPTS = {
    "Megatron-LM's gpt3/train_gpt3_175b_distributed.sh": (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--attention-backend auto --micro-batch-size 1 --global-batch-size 4 --rampup-batch-size 2 2 5859375 "
        "--train-iters 2 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 "
        "--clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 "
        "--lr-decay-iters 430000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path "
        "{text} --vocab-file vocab.json --merge-file merges.txt --split 949,50,1 --log-interval 100 "
        "--save-interval 10000 --eval-interval 1000 --save {save} --load {save} --eval-iters 1 --tensorboard-dir "
        "{save}",
        [Change("--rampup-batch-size does not go with --train-iters", "--rampup-batch-size"),
         Change("--vocab-file vocab.json cannot be read: there is no such file", "--vocab-file", TOKENS.take),
         NO_TENSOR,
         NO_PIPELINE]),
    "Megatron-LM's llama/train_llama3_8b_h100_fp8.sh": (
        "--use-mcore-models --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
        "--group-query-attention --num-query-groups 2 --kv-channels 8 --seq-length 32 --max-position-embeddings "
        "32 --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 "
        "--hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p "
        "--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 4 "
        "--train-samples 8 --lr-decay-samples 7 --lr-warmup-samples 1 --lr 0.00015 --min-lr 0.00001 "
        "--decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay "
        "0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion "
        "--calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --fp8-format hybrid "
        "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather --tensor-model-parallel-size "
        "1 --context-parallel-size 1 --sequence-parallel --mock-data --tokenizer-type NullTokenizer --vocab-size "
        "127 --data-cache-path {save}/cache --tiktoken-pattern v2 --split 99,1,0 "
        "--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 "
        "--eval-iters 1 --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start "
        "4 --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save {save} --load "
        "{save} --tensorboard-dir {save}",
        [Change("--decoupled-lr is refused: give parameters settings of their own", "--decoupled-lr"),
         Change("--decoupled-min-lr is refused: give parameters", "--decoupled-min-lr"),
         Change("--grad-reduce-in-bf16 is refused", "--grad-reduce-in-bf16"),
         Change("--fp8-format needs --fp8-recipe tensorwise or mxfp8", "--fp8-format"),
         Change("--fp8-param-gather is refused: weights stay as they are stored", "--fp8-param-gather"), NO_OPTIMIZER]),
    "Megatron-LM's mixtral/train_mixtral_8x7b_distributed.sh": (
        "--use-mcore-models --disable-bias-linear --seq-length 32 --max-position-embeddings 64 --num-layers 2 "
        "--hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --init-method-std 0.01 --attention-dropout "
        "0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu "
        "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
        "--no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000 --num-experts 8 "
        "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
        "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce "
        "--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path {text} --split 99990,8,2 "
        "--micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --train-iters 2 --lr-decay-iters 320000 "
        "--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 "
        "--use-distributed-optimizer --sequence-parallel --log-interval 1 --save-interval 10000 --eval-interval "
        "1000 --eval-iters 0 --save {save} --load {save} --tensorboard-dir {save}/tensorboard --no-load-optim "
        "--no-load-rng --wandb-project Mixtral --wandb-exp-name Mixtral_8x7B",
        [Change("--tokenizer-type Llama2Tokenizer is refused", "--tokenizer-type"),
         Change("world size 1 is not divisible by --expert-model-parallel-size 8", "--expert-model-parallel-size"),
         TOKENS, NO_PIPELINE, NO_OPTIMIZER]),
    "MindSpeed-MM's qwen2.5vl/finetune_qwen2_5_vl_72b_fsdp.sh": (
        "--use-mcore-models --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
        "--context-parallel-size 1 --context-parallel-algo ulysses_cp_algo --micro-batch-size 1 "
        "--global-batch-size 2 --tokenizer-type NullTokenizer --vocab-size 60 --seq-length 16 "
        "--make-vocab-size-divisible-by 1 --normalization RMSNorm --use-fused-rmsnorm --swiglu --use-fused-swiglu "
        "--lr 1.0e-5 --lr-decay-style cosine --weight-decay 0 --train-iters 2 --lr-warmup-fraction 0.1 "
        "--clip-grad 0.0 --adam-beta1 0.9 --adam-beta2 0.999 --no-gradient-accumulation-fusion --seed 42 --bf16 "
        "--load {save} --variable-seq-lengths --no-load-optim --no-load-rng --no-save-optim --no-save-rng "
        "--num-workers 8 --use-flash-attn --untie-embeddings-and-output-weights --use-torch-fsdp2 "
        "--fsdp2-config-path {sees_fsdp2} --use-cpu-initialization --init-model-with-meta-device "
        "--no-initialization --distributed-timeout-minutes 60 --mm-data data_72b.json --mm-model model_72b.json "
        "--mm-tool tools.json --log-interval 1 --save-interval 10000 --eval-interval 10000 --eval-iters 0 --save "
        "{save} --ckpt-format torch_dist --log-tps --distributed-backend nccl",
        [Change("--mm-data data_72b.json cannot be read: there is no such file", "--mm-data"),
         Change("--mm-model model_72b.json cannot be read: there is no such file", "--mm-model"),
         Change("--num-layers is missing; give it, or --hf-model DIR", take="--hf-model {sees}"),
         Change("--hidden-size is missing"), Change("--num-attention-heads is missing"),
         Change("--max-position-embeddings is missing"),
         Change("there is no data; give --data-path", take="--data-path {chats} --split 100,0,0"), NO_GPU]),
    "MindSpeed-MM's magistral-2509/finetune_magistral_2509_lora.sh": (
        "--use-mcore-models --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
        "--context-parallel-size 1 --context-parallel-algo ulysses_cp_algo --micro-batch-size 1 "
        "--global-batch-size 2 --tokenizer-type NullTokenizer --vocab-size 64 --seq-length 16 "
        "--make-vocab-size-divisible-by 1 --normalization RMSNorm --use-fused-rmsnorm --swiglu --use-fused-swiglu "
        "--no-masked-softmax-fusion --lr 1.0e-5 --lr-decay-style cosine --weight-decay 0 --train-iters 2 "
        "--lr-warmup-fraction 0.1 --clip-grad 0.0 --adam-beta1 0.9 --adam-beta2 0.999 "
        "--no-gradient-accumulation-fusion --seed 42 --load {save} --use-flash-attn --no-load-optim --no-load-rng "
        "--no-save-optim --no-save-rng --num-workers 8 --use-torch-fsdp2 --untie-embeddings-and-output-weights "
        "--ckpt-format torch_dcp --fsdp2-config-path {model_fsdp2} --optimizer-selection fused_torch_adamw "
        "--use-cpu-initialization --log-tps --init-model-with-meta-device --lora-r 8 --lora-alpha 16 "
        "--lora-dropout 0 --lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj --mm-data "
        "data.json --mm-model model.json --mm-tool tools.json --log-interval 1 --save-interval 10000 "
        "--eval-interval 10000 --eval-iters 1 --save {save} --ckpt-format torch_dcp --distributed-backend nccl",
        [Change("--mm-data data.json cannot be read: there is no such file", "--mm-data"),
         Change("--mm-model model.json cannot be read: there is no such file", "--mm-model"),
         Change("--num-layers is missing; give it, or --hf-model DIR"), Change("--hidden-size is missing"),
         Change("--num-attention-heads is missing"), Change("--max-position-embeddings is missing"),
         Change("--lora-r needs --hf-model", take="--hf-model {model}"),
         Change("there is no data; give --data-path", take="--data-path {text}"), NO_GPU]),
}
# The paths of their files, which are of their models, are those of ours.
FSDP2_FILE = """\
sharding_size: auto
sub_modules_to_wrap:
  - {0}.embed_tokens
  - {0}.layers.{{*}}
  - lm_head
recompute_modules:
  - {0}.layers.{{*}}
param_dtype: bf16
reduce_dtype: fp32
cast_forward_inputs: True
num_to_forward_prefetch: 1
num_to_backward_prefetch: 1
offload_to_cpu: False
"""


@pytest.fixture(scope="session")
def places(folder):
    """Text, conversations, and models with weights and FSDP2 files."""
    write_tokens(folder / "text", 1, documents=3000)
    made = {"text": folder / "text", "chats": folder / "chats"}
    for name, data, stack in (("model", "text", "model"), ("sees", "chats", "model.language_model")):
        made[f"{name}_fsdp2"] = folder / f"{name}.yaml"
        made[f"{name}_fsdp2"].write_text(FSDP2_FILE.format(stack))
        made[name] = folder / f"{name}_weights"
        loop = "--micro-batch-size 1 --train-iters 1 --lr 0 --seq-length 16 --eval-iters 0 --split 100,0,0".split()
        done = run("pretrain", "--hf-model", folder / name, "--from-scratch", "--data-path", made[data], *loop,
                   "--save-hf", made[name])
        assert done.returncode == 0, done.stderr
    return made


def without(words, flag):
    at = words.index(flag)
    end = at + 1
    while end < len(words) and not words[end].startswith("--"):
        end += 1
    return words[:at] + words[end:]


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_run_tells_all_that_must_change(places, tmp_path, name):
    flags, changes = SCRIPTS[name]
    places = places | {"save": tmp_path / "save"}
    places["save"].mkdir()
    words = flags.format(**places).split()
    told = run("pretrain", *words, CUDA_VISIBLE_DEVICES="")
    assert told.returncode == USAGE
    head, *lines = told.stderr.splitlines()
    assert head == f"megashard: error: {len(changes)} things must change:", told.stderr
    for change in changes:
        assert len([line for line in lines if change.told in line]) == 1, (change.told, told.stderr)

    for change in changes:
        if change.leave:
            words = without(words, change.leave)
        words += change.take.format(**places).split()
    done = run("pretrain", *words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "successfully saved checkpoint from iteration       2" in done.stdout, done.stdout


def test_one_run_tells_all_paths_that_a_model_lacks(places, tmp_path):
    (tmp_path / "theirs.yaml").write_text(FSDP2_FILE.format("language_model"))
    done = run(*FROM_MODEL, places["model"], "--tokenizer-type", "NullTokenizer", "--vocab-size", "63",
               "--fsdp2-config-path", tmp_path / "theirs.yaml")
    assert done.returncode == USAGE
    head, *lines = done.stderr.splitlines()
    assert head == "megashard: error: 2 things must change:", done.stderr
    for key, line in zip(("recompute_modules", "sub_modules_to_wrap"), lines):
        assert line.startswith(f'  {key}: {{*}} in "language_model.layers.{{*}}" needs a list of modules')
