"""Flags of Megatron-LM and MindSpeed-MM that would change training, memory or files are refused, each with its
reason."""
import pytest

from megashard import USAGE
from wrong_use import MOCK, PRETRAIN, RATE, check, run

SPARSE = "--disable-bias-linear --num-experts 4 "
CASES = {
    "fp8 with delayed scales": ("--fp8-format hybrid", "--fp8-format needs --fp8-recipe tensorwise or mxfp8"),
    "fp8 with blocks of 128": ("--fp8-format e4m3 --fp8-recipe blockwise", "there are tensorwise and mxfp8"),
    "fp8 of no format": ("--fp8-format e5m2 --fp8-recipe mxfp8", '--fp8-format takes one of e4m3, hybrid, got "e5m2"'),
    "layers left out of nothing": ("--first-last-layers-bf16", "needs --fp8-format or --fp4-format"),
    "all layers left out": ("--fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-end-in-bf16 99",
                            "--fp4-format: --first-last-layers-bf16 leaves out all"),
    "fp8 of small layers": ("--fp8-format e4m3 --fp8-recipe mxfp8",
                            "no linear layer of the model has sizes that are multiples of 32; leave it out"),
    "fp4 of another recipe": ("--fp4-format e2m1 --fp4-recipe custom", "there is nvfp4; leave it out"),
    "fp4 and fp8": ("--fp4-format e2m1 --fp8-format e4m3 --fp8-recipe mxfp8", "exclude each other; keep one"),
    "weights in fp4": ("--fp4-param-gather", "weights stay as they are stored"),
    "precision by layer": ("--te-precision-config-file precision.yaml", "use param_dtype and reduce_dtype there"),
    "experts with biases": ("--num-experts 8", "--num-experts needs --disable-bias-linear"),
    "more experts a token": (SPARSE + "--moe-router-topk 5", "--moe-router-topk 5 is more than --num-experts 4"),
    "one expert by softmax": (SPARSE + "--moe-router-topk 1", "the softmax over one expert is 1"),
    "a router without experts": ("--moe-router-topk 3", "--moe-router-topk needs a model with experts"),
    "groups alone": (SPARSE + "--moe-router-num-groups 2",
                     "--moe-router-num-groups and --moe-router-group-topk need each other"),
    "groups of a part": (SPARSE + "--moe-router-num-groups 3 --moe-router-group-topk 1",
                         "--num-experts 4 is not divisible by --moe-router-num-groups 3"),
    "experts of small groups": (SPARSE + "--moe-router-num-groups 4 --moe-router-group-topk 1",
                                "must be as many from each group, which has 1"),
    "a bias for softmax": (SPARSE + "--moe-router-enable-expert-bias",
                           "needs --moe-router-score-function sigmoid"),
    "layers that are no list": (SPARSE + "--moe-layer-freq [0]*1+[2]", "or 0 and 1 for each layer"),
    "layers of another model": (SPARSE + "--moe-layer-freq [0]*7", "describes 7 layers, and the model has"),
    "routers in fp64": (SPARSE + "--moe-router-dtype fp64", "routers compute in fp32 at most; use fp32"),
    "a balance without experts": ("--moe-aux-loss-coeff 1e-2", "--moe-aux-loss-coeff needs a model with experts"),
    "a balance that is no number": ("--moe-aux-loss-coeff none", '--moe-aux-loss-coeff takes a number, got "none"'),
    "two balances": ("--moe-aux-loss-coeff 0 1e-2", "--moe-aux-loss-coeff takes one value here, got 2"),
    "a balance of all ranks": ("--moe-router-load-balancing-type global_aux_loss",
                               "balance is over a microbatch or a sequence of a rank; use aux_loss or seq_aux_loss"),
    "another way of balance": ("--moe-router-load-balancing-type sinkhorn", "routers take the largest softmax values"),
    "a balance without a coefficient": ("--moe-router-load-balancing-type seq_aux_loss",
                                        "seq_aux_loss needs --moe-aux-loss-coeff, its coefficient"),
    "a rate of no bias": ("--moe-router-bias-update-rate 1e-3",
                          "--moe-router-bias-update-rate needs --moe-router-enable-expert-bias"),
    "a loss of routers without experts": ("--moe-z-loss-coeff 1e-3", "--moe-z-loss-coeff needs a model with experts"),
    "bare names in Megatron's format": ("--save s --save-interval 1 --ckpt-bare-names --ckpt-format torch_dist",
                                        "--ckpt-bare-names is for --ckpt-format torch_dcp"),
    "a dtype of files without them": ("--save-hf-dtype bf16", "--save-hf-dtype needs --save-hf"),
    "a capacity": ("--moe-expert-capacity-factor 1.0", "every token reaches all the experts that it chose"),
    "shared experts": ("--moe-shared-expert-intermediate-size 64", "needs a model with experts"),
    "latent attention": ("--multi-latent-attention", "--multi-latent-attention needs --position-embedding-type rope"),
    "latents of groups": ("--multi-latent-attention --position-embedding-type rope --group-query-attention",
                          "gives every head its own keys and values"),
    "a window behind": ("--window-size 127,5", "--window-size takes the keys before a query's own, and 0 behind it"),
    "layers without no window": ("--window-attn-skip-freq 2", "--window-attn-skip-freq needs --window-size"),
    "no positions of learned ones": ("--no-rope-freq 2", "--no-rope-freq needs --position-embedding-type rope"),
    "layers of another network": ("--no-rope-freq [1]*9 --position-embedding-type rope",
                                  "--no-rope-freq [1]*9 describes 9 layers"),
    "sinks of latents": ("--multi-latent-attention --position-embedding-type rope --softmax-type learnable",
                         "do not go with --multi-latent-attention"),
    "latents of no experts": ("--moe-latent-size 8", "needs a model with experts"),
    "attention without a mask": ("--attention-mask-type general", "attention is causal and over the whole sequence"),
    "another softmax": ("--softmax-type off-by-one",
                        "a sink is learnt or there is none; use learnable or vanilla"),
    "scaled positions": ("--rope-type yarn", "--rope-type yarn needs --multi-latent-attention"),
    "sections of positions": ("--mrope-section 2 1 1", "M-RoPE's sections come from the config.json of --hf-model"),
    "another MLP": ("--quick-geglu", "the MLP is GELU, --openai-gelu, --squared-relu or --swiglu"),
    "an embedding drawn otherwise": ("--embedding-init-method-std 0.01", "by --init-method-std"),
    "layers of Mamba": ("--hybrid-override-pattern M*M-", "all layers of a network are alike"),
    "an encoder beside": ("--decoder-num-layers 2",
                          "networks here have no encoder beside the decoder; use --num-layers"),
    "weights below fp32": ("--main-params-dtype fp16", "the optimizer takes gradients as they are and steps in fp32"),
    "moments with scales": ("--use-precision-aware-optimizer --exp-avg-dtype fp8",
                            "AdamW's moments are kept in fp32 or bf16; give one of these"),
    "narrow moments alone": ("--exp-avg-sq-dtype bf16", "other than fp32 need --use-precision-aware-optimizer"),
    "moments of SGD": ("--optimizer sgd --use-precision-aware-optimizer", "is for AdamW's moments"),
    "an offloaded optimizer": ("--optimizer-cpu-offload", "set offload_to_cpu: true in the FSDP2 file instead"),
    "sums in fp32": ("--ddp-reduce-scatter-with-fp32-accumulation",
                     "set reduce_dtype: fp32 in the FSDP2 file instead"),
    "a rate of its own": ("--decoupled-lr 0.1", "settings of their own by --param-group-overrides"),
    "virtual stages": ("--num-virtual-stages-per-pipeline-rank 2",
                       "pipeline parallelism is not part of this program"),
    "split experts": ("--expert-tensor-parallel-size 2",
                      "experts are shared out whole, by --expert-model-parallel-size"),
    "MindSpeed's sharding": ("--layerzero", "this program shards by FSDP2; use --use-torch-fsdp2"),
    "all of the validation": ("--full-validation",
                              "an evaluation has --eval-iters batches of the one validation set"),
    "another surplus": ("--mid-level-dataset-surplus 0.01", "it is always Megatron's default, 0.005"),
    "conversations by a flag": ("--sft", "by launch/preprocess/preprocess_data.py"),
    "moved samples": ("--use-data-balance", "sequences have --seq-length tokens and stay on their rank"),
    "trained beside adapters": ("--lora-mixed-training True", "adapters alone are trained"),
    "restarts inside": ("--inprocess-restart", "the launcher restarts a run, which goes on from the newest checkpoint"),
    "planted errors": ("--error-injection-rate 5", "there is no rerun state machine here"),
    "files of gradients": ("--save-wgrads-interval 5", "no such files are written here"),
    "Megatron's YAML": ("--yaml-cfg model.yaml", "give the flags, or a file of them by --config"),
    "a model in Python": ("--spec local", "a model of your own comes by --model-plugin"),
    "torchrun's flags": ("--nproc_per_node 8", "it is a flag of torchrun; give it before the program's name"),
    "another framework": ("--ai-framework mindspore", "the programs are LibTorch's"),
    "no positions at all": ("--no-position-embedding", "say rope or none there"),
    "a vocabulary that is too small": ("--padded-vocab-size 50", "but there are 61 tokens; give as many or more"),
}


@pytest.mark.parametrize("name", CASES)
def test_is_refused(name):
    flags, reason = CASES[name]
    check(([*PRETRAIN, *MOCK, *RATE, *flags.split()], USAGE, reason))


def test_defaults_and_flags_without_effect_are_let_through():
    defaults = (
        "--fp8-margin 0 --moe-aux-loss-coeff 0 --moe-router-load-balancing-type aux_loss --softmax-type vanilla "
        "--rope-type rope --exp-avg-dtype fp32 --mid-level-dataset-surplus 0.005 --lr-mult 1 --kv-lora-rank 32 "
        "--expert-tensor-parallel-size 1 --padded-vocab-size 64 --position-embedding-type rope --no-position-embedding "
        "--use-dist-ckpt --tiktoken-pattern v2")
    done = run(*PRETRAIN, *MOCK, *RATE, *defaults.split())
    assert done.returncode == 0, done.stderr
    reason = "it only matters with --fp8-recipe delayed or custom, which are refused"
    assert f"--fp8-margin ({reason})" in done.stdout + done.stderr
    assert "padded vocab (size: 61) with 3 dummy tokens (new size: 64)" in done.stdout
