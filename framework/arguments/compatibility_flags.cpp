#include "framework/arguments/compatibility_flags.h"

namespace megashard::detail {

namespace {

void accept_kernels(CompatibilityFlags& flags) {
  flags.accept("there are no other models here", {{"--use-mcore-models"}});
  flags.accept("layers are LibTorch's, without Transformer Engine", {{"--transformer-impl", 1}});
  flags.accept("the attention kernel follows from device and dtype",
               {{"--attention-backend", 1}, {"--use-flash-attn"}});
  flags.accept("there are no separate kernels to choose from here", {{"--no-masked-softmax-fusion"},
                                                                     {"--use-fused-rmsnorm"},
                                                                     {"--use-fused-swiglu"},
                                                                     {"--use-fused-rotary-pos-emb"},
                                                                     {"--use-fused-ring-attention-update"},
                                                                     {"--megatron-cp-in-bnsd"},
                                                                     {"--use-fused-weighted-squared-relu"},
                                                                     {"--use-te-activation-func"},
                                                                     {"--moe-grouped-gemm"},
                                                                     {"--moe-use-legacy-grouped-gemm"},
                                                                     {"--moe-permute-fusion"},
                                                                     {"--moe-router-fusion"},
                                                                     {"--no-bias-swiglu-fusion"},
                                                                     {"--no-bias-dropout-fusion"},
                                                                     {"--no-rope-fusion"},
                                                                     {"--no-persist-layer-norm"},
                                                                     {"--no-gradient-reduce-div-fusion"},
                                                                     {"--cross-entropy-loss-fusion"},
                                                                     {"--cross-entropy-fusion-impl", 1},
                                                                     {"--disable-jit-fuser"},
                                                                     {"--jit-compile"},
                                                                     {"--allow-internal-format"},
                                                                     {"--optimization-level", 1}});
  flags.accept("SwiGLU's result is never kept for backward, which makes it again",
               {{"--recompute-activation-function"}});
  flags.accept("softmax is always accumulated in fp32", {{"--attention-softmax-in-fp32"}});
  flags.accept("scores are scaled once", {{"--no-query-key-layer-scaling"}});
  flags.accept("it only protects fp16 from overflow", {{"--apply-query-key-layer-scaling"}});
  flags.accept("nothing is captured in CUDA graphs here", {{"--enable-cuda-graph"},
                                                           {"--external-cuda-graph"},
                                                           {"--cuda-graph-impl", 1},
                                                           {"--cuda-graph-scope", kAny},
                                                           {"--cuda-graph-warmup-steps", 1}});
  flags.accept("random numbers are LibTorch's", {{"--te-rng-tracker"}, {"--inference-rng-tracker"}});
  flags.accept("it prepares a model for ONNX, which is not written here", {{"--onnx-safe", 1}});
  flags.accept("it only allows others, which have to be known themselves", {{"--enable-experimental"}});
}

void accept_communication(CompatibilityFlags& flags) {
  flags.accept("FSDP2 overlaps its collectives with compute anyway",
               {{"--overlap-grad-reduce"}, {"--overlap-param-gather"}, {"--overlap-param-gather-with-optimizer-step"}});
  flags.accept("FSDP2 reduces the gradients of a unit at once, without buckets",
               {{"--ddp-num-buckets", 1},
                {"--ddp-bucket-size", 1},
                {"--ddp-pad-buckets-for-high-nccl-busbw"},
                {"--ddp-average-in-collective"},
                {"--DDP-impl", 1},
                {"--no-align-grad-reduce"},
                {"--no-align-param-gather"}});
  flags.accept("with FSDP2 reduce_dtype in the FSDP2 file decides", {{"--accumulate-allreduce-grads-in-fp32"}});
  flags.accept("NCCL is tuned by its own environment variables", {{"--nccl-communicator-config-path", 1},
                                                                  {"--use-nccl-ub"},
                                                                  {"--disable-symmetric-registration"},
                                                                  {"--use-sharp"},
                                                                  {"--sharp-enabled-group", 1},
                                                                  {"--high-priority-stream-groups", kAny},
                                                                  {"--create-all-gather-group"}});
  flags.accept("the groups are those of --distributed-backend", {{"--disable-gloo-process-groups"}});
  flags.accept("there is no program around this one that starts the groups", {{"--lazy-mpu-init", 1}});
  flags.accept("keys and values always travel beside the compute", {{"--use-cp-send-recv-overlap"}});
  flags.accept("a ring's keys take one way, over all its places", {{"--cp-window-size", 1}});
  flags.accept("rows go to their experts by all-to-all exchanges", {{"--moe-token-dispatcher-type", 1},
                                                                    {"--moe-enable-deepep"},
                                                                    {"--moe-flex-dispatcher-backend", 1},
                                                                    {"--moe-deepep-num-sms", 1},
                                                                    {"--moe-hybridep-num-sms", 1},
                                                                    {"--moe-permutation-async-comm"},
                                                                    {"--overlap-moe-expert-parallel-comm"},
                                                                    {"--ep-overlap-early-attn-memory-release"}});
  flags.accept("backward takes its steps in one order", {{"--delay-wgrad-compute"}});
  flags.accept("ranks meet in every step's collectives", {{"--train-sync-interval", 1}});
  flags.accept("--distributed-timeout-minutes holds throughout", {{"--distributed-timeout-seconds-after-init", 1}});
  flags.accept("no work moves between ranks to balance it", {{"--encoder-dp-balance"}});
}

void accept_watching(CompatibilityFlags& flags) {
  flags.accept(
      "there is no Python garbage collector here",
      {{"--manual-gc"}, {"--manual-gc-interval", 1}, {"--no-manual-gc-eval", 0, "", "--disable-manual-gc-eval"}});
  flags.accept("--profile is PyTorch's profiler", {{"--use-pytorch-profiler"}});
  flags.accept("--profile has no such part here; `megashard plan` forecasts a step",
               {{"--profile-subgraph-seg"},
                {"--profile-stage", 1},
                {"--simulated-nnodes", 1},
                {"--simulated-nproc-per-node", 1}});
  flags.accept("--log-memory prints the bytes of each class at the peak",
               {{"--record-memory-history"}, {"--memory-snapshot-path", 1}});
  flags.accept("metrics go to --metrics-file",
               {{"--tensorboard-queue-size", 1},
                {"--wandb-project", 1},
                {"--wandb-entity", 1},
                {"--wandb-exp-name", 1},
                {"--wandb-save-dir", 1},
                {"--no-one-logger"},
                {"--one-logger-project", 1},
                {"--one-logger-run-name", 1},
                {"--one-logger-async"},
                {"--app-tag-run-name", 1},
                {"--app-tag-run-version", 1}});
  flags.accept("it is not measured here; --metrics-file has what is", {{"--log-energy"},
                                                                       {"--log-memory-interval", 1},
                                                                       {"--log-device-memory-used"},
                                                                       {"--log-max-attention-logit"},
                                                                       {"--moe-per-layer-logging"},
                                                                       {"--log-straggler"},
                                                                       {"--straggler-ctrlr-port", 1},
                                                                       {"--straggler-minmax-count", 1},
                                                                       {"--disable-straggler-on-startup"},
                                                                       {"--run-workload-inspector-server"}});
  flags.accept("timers meet at no barrier here", {{"--no-barrier-with-level-1-timing"}});
}

void accept_files(CompatibilityFlags& flags) {
  flags.accept("it is an option of the torch_dist format",
               {{"--no-ckpt-fully-parallel-save", 0, "", "--disable-ckpt-fully-parallel-save"},
                {"--ckpt-fully-parallel-load"},
                {"--ckpt-assume-constant-structure"},
                {"--dist-ckpt-optim-fully-reshardable"},
                {"--distrib-optim-fully-reshardable-mem-efficient"}});
  flags.accept("Megatron gave it up for --ckpt-format", {{"--use-dist-ckpt"}, {"--dist-ckpt-format", 1}});
  flags.accept("all ranks write a checkpoint together anyway", {{"--ckpt-fully-parallel-save"}});
  flags.accept("it belongs to the format fsdp_dtensor, which is not here",
               {{"--no-strict-fsdp-dtensor-load", 0, "", "--disable-strict-fsdp-dtensor-load"}});
  flags.accept("--async-save has a thread of its own anyway", {{"--use-persistent-ckpt-worker"}});
  flags.accept("a checkpoint is loaded at any number of ranks", {{"--use-mp-args-from-checkpoint-args"}});
  flags.accept("files are read from file systems", {{"--disable-msc"}, {"--object-storage-cache-path", 1}});
  flags.accept("a causal mask is never stored", {{"--no-create-attention-mask-in-dataloader"}});
  flags.accept("index files are built by one thread", {{"--num-dataset-builder-threads", 1}});
  flags.accept(
      "sample indices are built in memory at every start",
      {{"--dataloader-fast-cache-load"}, {"--dataloader-defer-npy-index-mmap"}, {"--per-dataset-sequences-path", 1}});
  flags.accept("the loader is a thread of its rank", {{"--exit-signal-handler-for-dataloader"}});
  flags.accept("no token counts as padding here", {{"--allow-ambiguous-pad-tokens"}});
  flags.accept(
      "training reads tokens; the tokenizer is for preprocessing",
      {{"--tokenizer-metadata", 1},
       {"--tokenizer-special-tokens", kAny},
       {"--legacy-tokenizer"},
       {"--tiktoken-pattern", 1},
       {"--tiktoken-num-special-tokens", 1},
       {"--tiktoken-special-tokens", kAny},
       {"--tokenizer-sentencepiece-legacy"},
       {"--tokenizer-hf-use-fast"},
       {"--tokenizer-hf-include-special-tokens"},
       {"--no-use-tokenizer-model-from-checkpoint-args", 0, "", "--disable-use-tokenizer-model-from-checkpoint-args"}});
  flags.accept("no code of a model's folder is ever run", {{"--trust-remote-code"}});
  flags.accept("gradients reach adapters without it", {{"--lora-register-forward-hook", kAny}});
}

void name_again(Option& option, const CompatibilityFlag& flag) {
  if (*flag.other != '\0') option.alias(flag.other);
}

}  // namespace

void CompatibilityFlags::accept(const std::string& reason, std::initializer_list<CompatibilityFlag> flags) {
  for (const auto& each : flags) name_again(accepted_.without_effect(each.flag, each.nargs, reason), each);
}

void CompatibilityFlags::refuse(const std::string& reason, std::initializer_list<CompatibilityFlag> flags) {
  for (const auto& each : flags) {
    name_again(refused_.refused(each.flag, each.nargs, reason).unless(each.allowed_value), each);
  }
}

void add_compatibility_flags(std::vector<Option>& rows) {
  CompatibilityFlags flags(rows);
  accept_kernels(flags);
  accept_communication(flags);
  accept_watching(flags);
  accept_files(flags);
  accept_flags_of_refused_ones(flags);
  accept_flags_of_other_programs(flags);
}

}  // namespace megashard::detail
