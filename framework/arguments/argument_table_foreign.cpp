#include "framework/arguments/argument_table.h"

namespace megashard::detail {

namespace {

struct Foreign {
  const char* flag;
  int words;
  const char* reason;
};

constexpr int kAny = Option::kAnyNumber;
constexpr const char* kEager = "there are no separate kernels to choose from here";
constexpr const char* kNoLossScale = "loss scaling belongs to fp16";
constexpr const char* kNoBoard = "metrics go to --metrics-file";
constexpr const char* kNoProfiler =
    "programs are profiled from outside here, for example with nsys or perf";
constexpr const char* kTorchDist = "it is an option of the torch_dist format";
constexpr const char* kNoPython = "there is no Python garbage collector here";
constexpr const char* kOverlapped = "FSDP2 overlaps its collectives with compute anyway";

constexpr Foreign kWithoutEffect[] = {
    {"--use-mcore-models", 0, "there are no other models here"},
    {"--transformer-impl", 1, "layers are LibTorch's, without Transformer Engine"},
    {"--attention-backend", 1, "LibTorch chooses the attention kernel"},
    {"--use-flash-attn", 0, "LibTorch chooses the attention kernel"},
    {"--no-masked-softmax-fusion", 0, kEager},
    {"--use-fused-rmsnorm", 0, kEager},
    {"--use-fused-swiglu", 0, kEager},
    {"--moe-grouped-gemm", 0, kEager},
    {"--moe-permute-fusion", 0, kEager},
    {"--moe-token-dispatcher-type", 1, "rows go to their experts by all-to-all exchanges"},
    {"--no-bias-gelu-fusion", 0, kEager},
    {"--no-bias-swiglu-fusion", 0, kEager},
    {"--no-bias-dropout-fusion", 0, kEager},
    {"--no-rope-fusion", 0, kEager},
    {"--no-persist-layer-norm", 0, kEager},
    {"--cross-entropy-loss-fusion", 0, kEager},
    {"--attention-softmax-in-fp32", 0, "softmax is always accumulated in fp32"},
    {"--no-query-key-layer-scaling", 0, "scores are scaled once"},
    {"--apply-query-key-layer-scaling", 0, "it only protects fp16 from overflow"},
    {"--accumulate-allreduce-grads-in-fp32", 0,
     "with FSDP2 reduce_dtype in the FSDP2 file decides"},
    {"--loss-scale", 1, kNoLossScale},
    {"--initial-loss-scale", 1, kNoLossScale},
    {"--min-loss-scale", 1, kNoLossScale},
    {"--loss-scale-window", 1, kNoLossScale},
    {"--hysteresis", 1, kNoLossScale},
    {"--overlap-grad-reduce", 0, kOverlapped},
    {"--overlap-param-gather", 0, kOverlapped},
    {"--train-sync-interval", 1, "ranks meet in every step's collectives"},
    {"--manual-gc", 0, kNoPython},
    {"--manual-gc-interval", 1, kNoPython},
    {"--no-manual-gc-eval", 0, kNoPython},
    {"--profile", 0, kNoProfiler},
    {"--profile-step-start", 1, kNoProfiler},
    {"--profile-step-end", 1, kNoProfiler},
    {"--use-pytorch-profiler", 0, kNoProfiler},
    {"--profile-ranks", kAny, kNoProfiler},
    {"--record-memory-history", 0, kNoProfiler},
    {"--memory-snapshot-path", 1, kNoProfiler},
    {"--tensorboard-dir", 1, kNoBoard},
    {"--tensorboard-log-interval", 1, kNoBoard},
    {"--tensorboard-queue-size", 1, kNoBoard},
    {"--log-timers-to-tensorboard", 0, kNoBoard},
    {"--log-validation-ppl-to-tensorboard", 0, kNoBoard},
    {"--log-memory-to-tensorboard", 0, kNoBoard},
    {"--log-world-size-to-tensorboard", 0, kNoBoard},
    {"--no-log-loss-scale-to-tensorboard", 0, kNoBoard},
    {"--wandb-project", 1, kNoBoard},
    {"--wandb-exp-name", 1, kNoBoard},
    {"--wandb-save-dir", 1, kNoBoard},
    {"--timing-log-level", 1, "the parts of a step are in --metrics-file"},
    {"--timing-log-option", 1, "the parts of a step are in --metrics-file"},
    {"--logging-level", 1, "notices and warnings are always shown"},
    {"--no-ckpt-fully-parallel-save", 0, kTorchDist},
    {"--ckpt-fully-parallel-load", 0, kTorchDist},
    {"--ckpt-assume-constant-structure", 0, kTorchDist},
    {"--no-create-attention-mask-in-dataloader", 0, "a causal mask is never stored"},
    {"--num-dataset-builder-threads", 1, "index files are built by one thread"},
    {"--variable-seq-lengths", 0, "it only matters between pipeline stages"},
    {"--distributed-timeout-seconds-after-init", 1,
     "--distributed-timeout-minutes holds throughout"},
};

constexpr const char* kSwap =
    "use --fine-grained-activation-offloading with --offload-modules, or offload_modules in the "
    "FSDP2 file";
constexpr const char* kNormsAndActivations =
    "list the layers under recompute_modules and aten::mm under recompute_save_ops in the FSDP2 "
    "file: norms and activations are recomputed, products are kept";
constexpr const char* kMindSpeedJson =
    "MindSpeed-MM's JSON files are not read; describe the model by --hf-model and the data by "
    "--data-path";
constexpr const char* kSharding =
    "this program shards by FSDP2; use --use-torch-fsdp2 with --fsdp2-config-path instead";
constexpr const char* kRerun = "there is no rerun state machine here; leave it out";
constexpr const char* kGroups =
    "parameter groups with settings of their own are not part of this program; leave it out";
constexpr const char* kNonPersistent =
    "there are no non-persistent checkpoints here; use --save-interval";

struct Refused {
  const char* flag;
  int words;
  const char* reason;
  const char* neutral = "";
};

constexpr Refused kRefused[] = {
    {"--distribute-saved-activations", 0,
     "it spreads them over tensor parallel ranks, of which there are none; leave it out"},
    {"--moe-layer-recompute", 0, "give --recompute-activations --recompute-modules moe instead"},
    {"--recompute-activation-function", 0, kNormsAndActivations},
    {"--recompute-norm", 0, kNormsAndActivations},
    {"--swap-attention", 0, kSwap},
    {"--swap-modules", 1, kSwap},
    {"--adaptive-memory-optimization", 0, "choose what is recomputed or offloaded by hand"},
    {"--use-distributed-optimizer", 0,
     "FSDP2 shards the optimizer's state already; leave it out and keep --use-torch-fsdp2"},
    {"--use-custom-fsdp", 0, kSharding},
    {"--use-megatron-fsdp", 0, kSharding},
    {"--data-parallel-sharding-strategy", 1, kSharding, "no_shard"},
    {"--torch-fsdp2-no-reshard-after-forward", 0,
     "set reshard_after_forward: false in the FSDP2 file instead"},
    {"--num-distributed-optimizer-instances", 1,
     "replicas come from sharding_size in the FSDP2 file", "1"},
    {"--virtual-pipeline-model-parallel-size", 1,
     "pipeline parallelism is not part of this program; FSDP2 shards over all ranks instead"},
    {"--num-layers-per-virtual-pipeline-stage", 1,
     "pipeline parallelism is not part of this program; FSDP2 shards over all ranks instead"},
    {"--fp8-format", 1, "fp8 training is not part of this program; use param_dtype: bf16"},
    {"--fp8-param-gather", 0, "fp8 training is not part of this program; use param_dtype: bf16"},
    {"--use-legacy-models", 0,
     "Megatron's old model classes are not part of this program; leave it out"},
    {"--batch-size", 1, "Megatron removed it long ago; use --micro-batch-size"},
    {"--warmup", 1, "Megatron removed it long ago; use --lr-warmup-fraction"},
    {"--model-parallel-size", 1, "Megatron removed it long ago; use --tensor-model-parallel-size"},
    {"--checkpoint-activations", 0,
     "Megatron renamed it; use --recompute-granularity full --recompute-method uniform "
     "--recompute-num-layers 1"},
    {"--iterations-to-skip", kAny, "steps are never skipped; change the data instead"},
    {"--check-for-spiky-loss", 0, kRerun},
    {"--rerun-mode", 1, kRerun, "disabled"},
    {"--decoupled-lr", 1, kGroups},
    {"--decoupled-min-lr", 1, kGroups},
    {"--lr-mult", 1, kGroups},
    {"--lr-scale-modules", kAny, kGroups},
    {"--weight-decay-exclude-modules", kAny, kGroups},
    {"--calculate-per-sample-loss", 0,
     "use --calculate-per-token-loss, or neither for the mean of microbatches"},
    {"--calculate-token-loss", 0, "use --calculate-per-token-loss"},
    {"--calculate-square-loss", 0,
     "use --calculate-per-token-loss, or neither for the mean of microbatches"},
    {"--ckpt-convert-update-legacy-dist-opt-format", 0, "use the program `megashard convert`"},
    {"--non-persistent-save-interval", 1, kNonPersistent},
    {"--non-persistent-ckpt-type", 1, kNonPersistent},
    {"--non-persistent-global-ckpt-dir", 1, kNonPersistent},
    {"--per-split-data-args-path", 1,
     "use --train-data-path, --valid-data-path and --test-data-path instead"},
    {"--load-base-model", 1, "the weights that LoRA adapts come from --hf-model"},
    {"--mm-data", 1, kMindSpeedJson},
    {"--mm-model", 1, kMindSpeedJson},
    {"--mm-tool", 1, kMindSpeedJson},
    {"--num-experts", 1,
     "experts are described by the config.json of --hf-model, not by Megatron's flags; leave it "
     "out"},
};

}  // namespace

void add_foreign_options(std::vector<Option>& rows) {
  OptionGroup accepted("accepted, without effect here", rows);
  for (const auto& each : kWithoutEffect)
    accepted.without_effect(each.flag, each.words, each.reason);
  OptionGroup refused("known, but refused", rows);
  for (const auto& each : kRefused)
    refused.refused(each.flag, each.words, each.reason).except(each.neutral);
}

}  // namespace megashard::detail
