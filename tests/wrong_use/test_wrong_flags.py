"""Wrong flags, YAML files and sizes end in one message each, all of them in one run, and in exit code 2."""
import re

import pytest

from megashard import USAGE
from wrong_use import FROM_MODEL, MOCK, ON_TWO_RANKS, PRETRAIN, RATE, check, run

EXPERT_RANKS = ["--expert-model-parallel-size"]
ROLL = ["pretrain", "--config", "{folder}/roll.yaml", *MOCK, "--role"]
GOOD = [*PRETRAIN, *MOCK, *RATE]
# {folder} stands for the fixture's.
CASES = {
    "a misspelt flag": ([*GOOD, "--weigth-decay", "0"], USAGE, "did you mean --weight-decay?"),
    "a flag that is refused": ([*GOOD, "--use-distributed-optimizer"], USAGE,
                               "FSDP2 shards the optimizer's state already"),
    "ranks that cannot be divided": ([*ON_TWO_RANKS, *MOCK, *RATE, "--fsdp2-config-path", "{folder}/thirds.yaml"],
                                     USAGE, "World size 2 must be divisible by sharding_size 3; change sharding_size"),
    "experts and ranks that do not fit": (
        ["launch", "-n", "4", "--", *FROM_MODEL, "{folder}/experts", "--from-scratch", *EXPERT_RANKS, "3",
         "--global-batch-size", "4"],
        USAGE,
        "world size 4 is not divisible by --expert-model-parallel-size 3; change one of them"),
    "a misspelt key of ROLL's": ([*ROLL, "actor"], USAGE,
                                 'unknown key "actor.strategy_args.strategy_config.fsdp_siz"; did you mean fsdp_size?'),
    "experts of ROLL that do not fit": (["launch", "-n", "2", "--", *ROLL, "student"], USAGE,
                                        "leaves 1 with the same experts; efsdp_size, which is 2, must divide that"),
    "devices that are not there": (["launch", "-n", "2", "--", *ROLL, "large"], USAGE,
                                   "large.device_mapping is for 16 devices, but the run has 2 ranks; start as many"),
    "a role misspelt": ([*ROLL, "studnet"], USAGE, "it has actor, student, large; did you mean student?"),
    "a role that is not there": ([*ROLL, "critic"], USAGE, "has no such worker; it has actor, student, large."),
    "a role without a file": ([*GOOD, "--role", "actor"], USAGE, "--role actor needs --config"),
    "ROLL's file without a role": (["pretrain", "{folder}/roll.yaml"], USAGE,
                                   "is a configuration of ROLL; name the worker"),
    "two YAML files": (["pretrain", "{folder}/good.yaml", *GOOD[1:], "--config", "{folder}/good.yaml"], USAGE,
                       "are both YAML files; give one"),
    "a size of the model against config.json": (
        [*FROM_MODEL, "{folder}/model", "--from-scratch", "--hidden-size", "32"], USAGE,
        "--hidden-size 32 contradicts the model's config.json, which says 16"),
}

# Wrong flags, appended to correct ones.
FLAGS = {
    # types
    "a fraction of a layer": ("--num-layers 1.5", '--num-layers takes a whole number, got "1.5"'),
    "an exponent of steps": ("--train-iters 1e3", '--train-iters takes a whole number, got "1e3"'),
    "digits in groups": ("--train-iters 1_000", 'takes a whole number, got "1_000"'),
    "a comma in a number": ("--lr 0,001", '--lr takes a number, got "0,001"'),
    "a number in words": ("--lr fast", '--lr takes a number, got "fast"'),
    "a rate that is none": ("--lr nan", '--lr takes a number, got "nan"'),
    "a number too large": ("--seed 99999999999999999999", "--seed takes a whole number within range"),
    "a number with a unit": ("--seq-length 4k", '--seq-length takes a whole number, got "4k"'),
    "an unset variable": (["--save", "", "--save-interval", "1"],
                          "--save has an empty value; is a variable of the script unset?"),
    "an unset variable behind =": ("--load=", "--load has an empty value"),
    "a value that is missing at the end": ("--clip-grad", "--clip-grad has no value; write --clip-grad FLOAT."),
    "a value that is missing": ("--load --seed 1", "--load has no value; write --load DIR."),
    "a list without words": ("--lora-target-modules --seed 1", "--lora-target-modules has no value; write"),
    "two of three values": ("--rampup-batch-size 2 2", "--rampup-batch-size takes 3 values, got 2."),
    "a value too many": ("--seed 1 2", 'unexpected word "2" after --seed'),
    "a switch with a word": ("--qk-layernorm yes", 'unexpected word "yes" after --qk-layernorm'),
    "a switch with False": ("--qk-layernorm False", "a switch takes none: write --qk-layernorm=false."),
    "a switch with a number": ("--swiglu=1", 'takes no value (or true / false), got "1"'),
    # spelling
    "one hyphen": ("-seed 1", "unknown flag -seed; did you mean --seed?"),
    "a long dash": ("\u2014seed 1", "flags begin with two plain hyphens, and this one with a long dash"),
    "no hyphen": ("seed 1", 'unexpected words "seed" "1" after --lr'),
    "an abbreviation": ("--max-position-embed 16", "did you mean --max-position-embeddings?"),
    "swapped letters": ("--trian-iters 3", "did you mean --train-iters?"),
    "a forgotten letter": ("--globalbatch-size 2", "did you mean --global-batch-size?"),
    "another program's flag": ("--num-train-epochs 3",
                               "unknown flag --num-train-epochs; here it is --train-iters, or --train-samples"),
    "the opposite of a flag": ("--save-rng", "unknown flag --save-rng; leave it out: only --no-save-rng changes that."),
    "the negation of a switch": ("--no-swiglu", "leave it out: it is off unless --swiglu is given."),
    "infer's flag": ("--log-probs x.npy", "unknown flag --log-probs"),
    "a flag in capitals": ("--SEED 1", "unknown flag --SEED; did you mean --seed?"),
    "a broken line": (["--seed", "1", " "], "a backslash that continues a line must be its last character"),
    # choices
    "an optimizer that is refused": ("--optimizer dist_muon", "--optimizer dist_muon is refused: muon shards"),
    "an optimizer that nobody knows": ("--optimizer adamw", "--optimizer takes one of adam, sgd, muon"),
    "a misspelt choice": ("--lr-decay-style cosin", "did you mean cosine?"),
    "a choice in capitals": ("--normalization rmsnorm", "did you mean RMSNorm?"),
    "zarr": ("--ckpt-format zarr", "--ckpt-format zarr is refused: it is not part"),
    "whole tensors": ("--ckpt-format torch", "it keeps whole tensors"),
    "an external loader": ("--dataloader-type external", "it takes a loader written in Python"),
    "positions of T5": ("--position-embedding-type relative", "it belongs to T5"),
    "positions of pictures": ("--position-embedding-type mrope", "belongs to vision-language models"),
    "a tokenizer that is not loaded": ("--tokenizer-type Llama2Tokenizer",
                                       "training reads tokens and loads no tokenizer"),
    "a ring that adapts": ("--context-parallel-algo adaptive_cp_algo",
                           "the way of the keys does not follow the mask here; use megatron_cp_algo"),
    "a ring of another name": ("--cp-comm-type ring", "--cp-comm-type takes one of p2p, a2a, a2a+p2p"),
    "layernorm alone": ("--recompute-activations --recompute-modules layernorm",
                        "the next projection keeps its output anyway"),
    "a part of an expert": ("--fine-grained-activation-offloading --offload-modules moe_act",
                            "experts are recomputed whole"),
    "a part that is none": ("--recompute-activations --recompute-modules attn",
                            "takes one of core_attn, mlp, moe, got"),
    "an unknown device": ("--device gpu", "--device takes one of auto, cpu, cuda, sim, got \"gpu\"; did you "
                          "mean cuda?"),
    "a GPU that is not there": ("--device cuda", "--device cuda needs a GPU, and this machine has none"),
    "a backend for GPUs": ("--distributed-backend nccl", "needs GPUs, but this run is on CPUs"),
    "a backend of NPUs": ("--distributed-backend hccl", "is for NPUs, which this program does not drive"),
    "a backend misspelt": ("--distributed-backend glo", "cpu:gloo,cuda:nccl; did you mean gloo?"),
    "a backend that is none": ("--distributed-backend mpi", "--distributed-backend mpi is unknown; use nccl, gloo"),
    # refused flags
    "more pieces than ranks": ("--tensor-model-parallel-size 2",
                               "world size 1 is not divisible by --tensor-model-parallel-size 2"),
    "no piece": ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size is 0; it must be positive"),
    "a pipeline": ("--pipeline-model-parallel-size 2", "pipeline parallelism is not part of this program"),
    "fp16 and bf16": ("--fp16 --bf16", "--fp16 and --bf16 exclude each other"),
    "a loss scale below zero": ("--loss-scale -1", "--loss-scale is -1.0; it must be not negative"),
    "a least loss scale above the first": ("--min-loss-scale 8 --initial-loss-scale 4",
                                           "--min-loss-scale 8.0 is above --initial-loss-scale 4.0"),
    "no steps before a loss scale grows": ("--loss-scale-window 0", "--loss-scale-window is 0; it must be at least 1"),
    "a loss in fp16": ("--fp16-lm-cross-entropy", "--fp16-lm-cross-entropy is refused: the loss is computed in fp32"),
    "a flag of old": ("--batch-size 4", "Megatron removed it long ago; use --micro-batch-size"),
    "uniform Xavier": ("--init-method-xavier-uniform",
                       "is refused: fresh weights are drawn from a normal distribution"),
    # ranges
    "no layers": ("--num-layers 0", "--num-layers is 0; it must be positive"),
    "a negative width": ("--hidden-size -16", "--hidden-size is -16; it must be positive"),
    "heads that do not divide": ("--num-attention-heads 3",
                                 "--hidden-size 16 is not divisible by --num-attention-heads 3"),
    "groups that do not divide": ("--group-query-attention --num-query-groups 3",
                                  "is not divisible by --num-query-groups 3"),
    "an odd head": ("--position-embedding-type rope --kv-channels 3", "an even number of channels a head, got 3 of 3"),
    "an MLP of nothing": ("--swiglu", "with --swiglu it would be 8/3 of --hidden-size 16 in steps of 64, which is 0"),
    "two activations": ("--openai-gelu --squared-relu", "exclude each other; give one"),
    "no vocabulary": ("--vocab-size 0", "--vocab-size is 0; it must be positive"),
    "a padding to nothing": ("--make-vocab-size-divisible-by 0",
                             "--make-vocab-size-divisible-by is 0; it must be positive"),
    "a dropout of everything": ("--hidden-dropout 1", "--hidden-dropout is 1.0; it must be from 0 to below 1"),
    "an epsilon of nothing": ("--norm-epsilon 0", "--norm-epsilon is 0.0; it must be positive"),
    "a sequence beyond the positions": ("--seq-length 17", "--max-position-embeddings 16 is less than --seq-length 17"),
    "no steps": ("--train-iters 0", "--train-iters is 0; it must be positive"),
    "negative steps": ("--train-iters -5", "--train-iters is -5; it must be positive"),
    "no micro batch": ("--micro-batch-size 0", "--micro-batch-size is 0; it must be positive"),
    "a batch that does not divide": ("--micro-batch-size 3", "global batch size 2 is not divisible by 3"),
    "a negative rate": ("--lr -1e-3", "--lr is -0.001; it must be not negative"),
    "a least rate above the largest": ("--min-lr 1", "--min-lr 1.0 is above --lr 0.001"),
    "a warm-up of everything": ("--lr-warmup-fraction 1", "--lr-warmup-fraction is 1.0; it must be from 0 to below 1"),
    "a beta of one": ("--adam-beta2 1", "--adam-beta2 is 1.0; it must be from 0 to below 1"),
    "a negative clipping": ("--clip-grad -1", "--clip-grad is -1.0; it must be not negative"),
    "a negative evaluation": ("--eval-iters -1", "--eval-iters is -1; it must be not negative"),
    "no deadline": ("--distributed-timeout-minutes 0", "--distributed-timeout-minutes is 0; it must be positive"),
    "fewer than no workers": ("--num-workers -1", "--num-workers is -1; it must be not negative"),
    "half a rank": ("--context-parallel-size 0", "--context-parallel-size is 0; it must be positive"),
    "sequences on ranks that are not there": ("--context-parallel-size 2",
                                              "world size 1 is not divisible by --context-parallel-size 2"),
    # flags that need or exclude another one
    "saving never": ("--save {folder}/never", "--save {folder}/never needs --save-interval"),
    "saving nowhere": ("--save-interval 5", "--save-interval 5 needs --save, the folder for checkpoints"),
    "a step of nothing": ("--ckpt-step 5", "--ckpt-step 5 needs --load"),
    "adapters of nothing": ("--lora-r 8 --lora-target-modules q_proj", "--lora-r needs --hf-model"),
    "adapters nowhere": ("--lora-target-modules q_proj", "--lora-target-modules needs --lora-r"),
    "finetuning nothing": ("--finetune", "--finetune needs --load, --pretrained-checkpoint or --hf-model"),
    "arguments of no checkpoint": ("--use-checkpoint-args", "--use-checkpoint-args needs --load"),
    "steps and samples": ("--train-samples 4", "--train-iters and --train-samples exclude each other"),
    "two warm-ups": ("--lr-warmup-fraction 0.1 --lr-warmup-iters 1", "--lr-warmup-fraction excludes"),
    "WSD without its anneal": ("--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    "a conversion of nothing": ("--ckpt-convert-format torch_dcp", "--ckpt-convert-format needs --load"),
    "two names of a size": ("--encoder-num-layers 1", "--num-layers and --encoder-num-layers mean the same"),
    "two sources of data": ("--data-path {folder}/good", "exclude each other; give one source of data"),
    "a split beside split data": ("--mock-data=false --train-data-path {folder}/good --split 9,1,0",
                                  "--split 9,1,0 does not go with --train-/--valid-/--test-data-path"),
    "fresh weights of no model": ("--from-scratch", "--from-scratch needs --hf-model"),
    "a plugin without a model": ("--model-plugin {folder}/x.so",
                                 "needs --model, the name under which it registers the model"),
    "a callback that nobody registers": ("--callback plateau",
                                         "--callback plateau: there is no such callback; give the library that "
                                         "registers it by --callback-plugin FILE"),
    "a library of callbacks that is not there": ("--callback_plugin={folder}/x.so", "x.so is no file; give the path"),
    "recomputing by no method": ("--recompute-granularity full --recompute-num-layers 1",
                                 "needs --recompute-method uniform or block"),
    "recomputing more layers than there are":
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 2",
     "it must be from 1 to the 1 layers of the model"),
    "sharding by a file alone": ("--use-torch-fsdp2=false --fsdp2-config-path {folder}/thirds.yaml",
                                 "needs --use-torch-fsdp2; add it"),
    # files
    "words of data from a file that is not there": ("--mock-data=false --data-args-path {folder}/none",
                                                    "--data-args-path {folder}/none cannot be read: there is no such "
                                                    "file."),
    "words of data from a folder": ("--mock-data=false --data-args-path {folder}",
                                    "it is a folder; name the file in it"),
    "words of data from an empty file": ("--mock-data=false --data-args-path {folder}/empty.yaml",
                                         "empty.yaml is empty"),
    "no FSDP2 file": ("--fsdp2-config-path {folder}/none.yaml", "none.yaml cannot be read: there is no such file."),
    "an FSDP2 folder": ("--fsdp2-config-path {folder}", "it is a folder; name the file in it"),
    "an empty FSDP2 file": ("--fsdp2-config-path {folder}/empty.yaml", "empty.yaml is empty; is it the right file?"),
    "an FSDP2 file that is a device": ("--fsdp2-config-path /dev/null",
                                       "it is no regular file, and every rank reads it"),
    "bad YAML": ("--fsdp2-config-path {folder}/bad.yaml", "bad.yaml:2: this is not YAML"),
    "a misspelt key of the FSDP2 file": ("--fsdp2-config-path {folder}/misspelt.yaml --fsdp2-config-strict",
                                         'misspelt.yaml:2: unknown key "parm_dtype"; did you mean param_dtype?'),
}
CASES |= {name: ([*GOOD, *(words.split() if isinstance(words, str) else words)], USAGE, message)
          for name, (words, message) in FLAGS.items()}

YAML = {  # the text of an argument file, and a part of the message
    "a misspelt key": ("gpt_args:\n  num_layer: 2\n", ':2: unknown key "num_layer"; did you mean num_layers?'),
    "a key twice": ("seed: 1\nlr: 1\nseed: 1\n", ":3: seed is given twice; keep one."),
    "a key in two spellings": ("train_iters: 2\nlog_interval: 1\ntrain-iters: 3\n",
                               ":3: train-iters and train_iters in line 1 mean the same"),
    "a switch and its name": ("disable_bias_linear: true\nadd_bias_linear: true\n",
                              ":2: add_bias_linear and disable_bias_linear in line 1"),
    "an alias too": ("save_interval: 2\npersistent_save_interval: 2\n",
                     ":2: persistent_save_interval and save_interval in line 1"),
    "a number in words": ("lr: 1e-3x\n", ':1: --lr takes a number, got "1e-3x"'),
    "a switch of seven": ("swiglu: 7\n", ":1: swiglu takes true or false"),
    "a map for a number": ("seed: {a: 1}\n", "seed takes a value or a list of plain values, got a map"),
    "a list for a number": ("seed: [1, 2]\n", "--seed takes one value, got 2"),
    "a refused key": ("gpt_args: {grad_reduce_in_bf16: true}\n", ":1: --grad-reduce-in-bf16 is refused"),
    "a refused choice": ("optimizer: dist_muon\n", ":1: --optimizer dist_muon is refused"),
    "a key beside gpt_args": ("gpt_args: {seed: 1}\nlog_interval: 2\n", '"log_interval" stands beside gpt_args:'),
    "a misspelt key of adapters": ("gpt_args: {seed: 1}\nlora_args: {lora_rr: 4}\n",
                                   ':2: unknown key "lora_args.lora_rr"; did you mean lora_r?'),
    "a list of options": ("- seed\n- 1\n", "the file must hold `key: value` lines"),
    "tabs": ("gpt_args:\n\tseed: 1\n", ":2: this is not YAML"),
    "comments only": ("# nothing\n", "the file must hold `key: value` lines"),
    "no line": ("", "is empty; is it the right file?"),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_in_one_message(folder, name):
    words, code, message = CASES[name]
    check((words, code, message.format(folder=folder) if "{folder}" in message else message), folder=folder)


@pytest.mark.parametrize("name", YAML)
def test_an_argument_file(name, tmp_path):
    text, message = YAML[name]
    (tmp_path / "file.yaml").write_text(text)
    # The command line overrides the file.
    check((["pretrain", f"{tmp_path}/file.yaml", *GOOD[1:]], USAGE, message))


def lines_of(done, expected):
    """The lines below the one that counts them."""
    first, *lines = done.stderr.splitlines()
    assert first == f"megashard: error: {expected} things must change:", done.stderr
    assert len(lines) == expected, done.stderr
    assert lines == sorted(lines, key=lambda line: (not line.startswith("  unknown flag"), line)), done.stderr
    assert all(line.startswith("  ") for line in lines), done.stderr
    assert done.returncode == USAGE
    return [line[2:] for line in lines]


WRONG = ("--grad-reduce-in-bf16 --lr fast --trian-iters 3 --optimizer dist_muon --pipeline-model-parallel-size 3 "
         "--hidden-size 17 "
         "--save x").split()


@pytest.mark.parametrize("before", [["pretrain"], ["launch", "-n", "2", "--", "pretrain"]], ids=["alone", "two ranks"])
def test_all_mistakes_are_told_at_once(before):
    """Those of single flags, the refused ones, and the rules between them, once for all ranks."""
    lines = lines_of(run(*before, *PRETRAIN[1:], *MOCK, *WRONG), 7)
    starts = ["unknown flag --trian-iters; did you mean", "--grad-reduce-in-bf16 is refused",
              "--hidden-size 17 is not divisible", '--lr takes a number, got "fast"',
              "--optimizer dist_muon is refused", "--pipeline-model-parallel-size is refused",
              "--save x needs --save-interval"]
    assert all(line.startswith(start) for line, start in zip(lines, starts)), lines


def test_mistakes_of_files_and_flags_are_told_together(tmp_path):
    (tmp_path / "args.yaml").write_text("gpt_args:\n  num_layer: 2\n  seed: x\n")
    (tmp_path / "fsdp2.yaml").write_text("param_dtype: bf17\nsharding_size: many\n")
    lines = lines_of(run("pretrain", tmp_path / "args.yaml", *GOOD[1:], "--fsdp2-config-path", tmp_path / "fsdp2.yaml",
                         "--zzz"), 5)
    parts = ["unknown flag --zzz", 'args.yaml:2: unknown key "num_layer"', "args.yaml:3: --seed takes", "param_dtype",
             "sharding_size"]
    assert all(part in line for line, part in zip(lines, parts)), lines


# Megatron-LM's examples/llama/train_llama3_8b_h100_fp8.sh, scaled down.
LLAMA3 = """
--use-mcore-models --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --kv-channels 16 --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope
--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std
0.0134 --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear
--micro-batch-size 1 --global-batch-size 4 --train-samples 16 --lr-decay-samples 16 --lr-warmup-samples 4 --lr 0.00015
--min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay
0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion
--calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --fp8-format hybrid --fp8-amax-history-len 1024
--fp8-amax-compute-algo max --fp8-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1
--sequence-parallel --mock-data --tokenizer-type NullTokenizer --vocab-size 500 --data-cache-path {folder}/cache
--tiktoken-pattern v2 --split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1
--log-interval 1 --eval-iters 2 --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start
4 --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save {folder}/llama --load
{folder}/llama --tensorboard-dir {folder}/board
"""


def test_a_script_of_megatron_needs_one_run_to_see_what_must_change(folder):
    words = LLAMA3.format(folder=folder).split()
    wrong = ["--decoupled-lr", "--decoupled-min-lr", "--fp8-format", "--fp8-param-gather",
             "--grad-reduce-in-bf16", "--split", "--use-distributed-optimizer"]
    lines = lines_of(run("launch", "-n", "2", "--", "pretrain", *words), 8)
    assert [line.split()[0] for line in lines[:7]] == wrong and "which needs --use-torch-fsdp2" in lines[7], lines
    alone = {"--fp8-param-gather", "--grad-reduce-in-bf16", "--use-distributed-optimizer"}
    for flag in wrong:
        at = words.index(flag)
        del words[at:at + (1 if flag in alone else 2)]
    done = run("launch", "-n", "2", "--", "pretrain", *words, "--use-torch-fsdp2", "--split", "99,1,0")
    assert done.returncode == 0 and " iteration        4/       4" in done.stdout, done.stderr


def test_all_that_is_missing_is_told_at_once():
    lines = lines_of(run("pretrain"), 10)
    assert [line.split(" is missing")[0] for line in lines if " is missing" in line] == [
        "--hidden-size", "--lr", "--max-position-embeddings", "--micro-batch-size", "--num-attention-heads",
        "--num-layers", "--seq-length", "--vocab-size", "the length of the training"]


def test_the_last_of_a_flag_that_is_given_twice_counts():
    """As in scripts that end in "$@"."""
    done = run(*GOOD, "--train-iters", "3", "--lr", "1e-3", "--log-interval", "1")
    assert done.returncode == 0 and " iteration        3/       3" in done.stdout, done.stderr
    assert "--train-iters is given twice, as 2 and as 3; the last one counts." in done.stdout
    assert "--lr is given twice" not in done.stdout


def test_evaluating_needs_nothing_of_training():
    done = run("pretrain", *PRETRAIN[1:PRETRAIN.index("--micro-batch-size")], "--use-torch-fsdp2", *MOCK,
               "--skip-train", "--eval-iters", "1")
    assert done.returncode == 0 and "on validation set" in done.stdout, done.stderr


@pytest.mark.parametrize("program", ["pretrain", "infer"])
def test_the_help_is_whole(program):
    help_text = run(program, "--help").stdout
    assert max(map(len, help_text.splitlines())) <= 80
    for part in (f"megashard {program} [FILE.yaml]", "--config FILE", "--hf-model DIR", "--seq-length INT",
                 "--load DIR", "--data-path [WEIGHT] PREFIX ...", "\naccepted, without effect here:\n",
                 "\nknown, but refused:\n"):
        assert part in help_text, part
    assert "VALUE" not in help_text
    trains = "--lr FLOAT" in help_text and "--save DIR" in help_text
    assert trains == (program == "pretrain") and ("--log-probs FILE.npy" in help_text) == (program == "infer")


def kinds_of_flags(help_text):
    """By flag: its value's name in --help, "" for a switch. Only flags with an effect."""
    understood = help_text.partition("\naccepted, without effect here:\n")[0]
    return dict(re.findall(r"^  (--[a-z0-9-]+)(?: ([^ ,\n]+).*)?,?$", understood, re.MULTILINE))


def test_every_flag_says_what_it_takes():
    kinds = kinds_of_flags(run("pretrain", "--help").stdout)
    assert len(kinds) > 150
    del kinds["--world-size"]  # read where --dry-run is given
    texts = {flag for flag, kind in kinds.items() if kind.split("|")[-1].isupper() and kind not in ("INT", "FLOAT")}
    bad = {flag: "" if flag in texts else "seven" for flag in kinds}
    lines = lines_of(run("pretrain", *[f"{flag}={value}" for flag, value in bad.items()]), len(bad))
    told = {line.split()[0]: line for line in lines}
    for flag, value in bad.items():
        says = r"takes \S" if value else "has (no|an empty) value"
        assert re.match(f"{flag} {says}", told.get(flag, "")), (flag, told.get(flag))


def test_the_help_of_other_programs_is_alike():
    """Programs whose flags a library reads: help does not show the library's notation of rules."""
    for words in (["convert", "dcp_to_hf"], ["inspect"], ["launch"], ["report"]):
        text = run(*words, "--help").stdout
        assert not re.search(r"REQUIRED|[A-Z]:[A-Z]|kb\(|\.\.\. \.\.\.| x \d", text.split("\n", 3)[3]), text
        assert re.search(r"^  -h,--help\n      \S", text, re.M)
        assert not [line for line in text.split("Example")[0].splitlines() if len(line) > 80], text
