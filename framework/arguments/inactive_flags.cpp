#include "framework/arguments/compatibility_flags.h"

namespace megashard::detail {

namespace {

void accept_parts_of_precision(CompatibilityFlags& flags) {
  flags.accept("it only matters with --fp8-recipe delayed or custom, which are refused",
               {{"--fp8-quantizer-factory", 1},
                {"--fp8-margin", 1},
                {"--fp8-interval", 1},
                {"--fp8-amax-history-len", 1},
                {"--fp8-amax-compute-algo", 1}});
  flags.accept("fp8 numbers of weights are made anew for each product",
               {{"--keep-fp8-transpose-cache"}, {"--reuse-grad-buf-for-mxfp8-param-ag"}});
  flags.accept("an expert's rows need no padding here",
               {{"--moe-router-padding-for-fp8"}, {"--moe-router-padding-for-quantization"}});
  flags.accept("it only matters with --fp4-recipe custom, which is refused", {{"--fp4-quantizer-factory", 1}});
  flags.accept("it only matters with --use-kitchen-attention, which is refused", {{"--kitchen-attention-backend", 1}});
}

void accept_parts_of_parallelism(CompatibilityFlags& flags) {
  flags.accept(
      "tensor-parallel layers communicate in one way here",
      {{"--no-async-tensor-model-parallel-allreduce", 0, "", "--disable-async-tensor-model-parallel-allreduce"},
       {"--tp-comm-overlap"},
       {"--tp-comm-overlap-cfg", 1},
       {"--no-tp-comm-bulk-wgrad", 0, "", "--disable-tp-comm-bulk-wgrad"},
       {"--no-tp-comm-bulk-dgrad", 0, "", "--disable-tp-comm-bulk-dgrad"},
       {"--no-tp-comm-overlap-ag", 0, "", "--disable-tp-comm-overlap-ag"},
       {"--no-tp-comm-overlap-rs", 0, "", "--disable-tp-comm-overlap-rs"},
       {"--tp-comm-overlap-rs-dgrad"},
       {"--no-tp-comm-split-ag", 0, "", "--disable-tp-comm-split-ag"},
       {"--no-tp-comm-split-rs", 0, "", "--disable-tp-comm-split-rs"},
       {"--tp-comm-bootstrap-backend", 1},
       {"--no-clone-scatter-output-in-embedding", 0, "", "--disable-clone-scatter-output-in-embedding"},
       {"--use-tp-pp-dp-mapping"},
       {"--moe-extended-tp"}});
  flags.accept("it only matters between pipeline stages, of which there is one",
               {{"--variable-seq-lengths"},
                {"--pipeline-model-parallel-comm-backend", 1},
                {"--use-ring-exchange-p2p"},
                {"--defer-embedding-wgrad-compute"},
                {"--wgrad-deferral-limit", 1},
                {"--overlap-p2p-communication-warmup-flush"},
                {"--no-overlap-p2p-communication"},
                {"--microbatch-group-size-per-virtual-pipeline-stage", 1},
                {"--account-for-embedding-in-pipeline-split"},
                {"--account-for-loss-in-pipeline-split"},
                {"--decoder-first-pipeline-num-layers", 1},
                {"--decoder-last-pipeline-num-layers", 1},
                {"--pipeline-model-parallel-layout", 1},
                {"--no-scatter-gather-tensors-in-pipeline"},
                {"--use-multiparameter-pipeline-model-parallel"}});
  flags.accept("it only matters with --hybrid-context-parallel, which is refused",
               {{"--max-seqlen-per-dp-cp-rank", 1}});
  flags.accept("it only matters with --use-megatron-fsdp, which is refused",
               {{"--fsdp-double-buffer"}, {"--fsdp-manual-registration"}, {"--suggested-communication-unit-size", 1}});
  flags.accept("it only matters with --optimizer-cpu-offload, which is refused",
               {{"--optimizer-offload-fraction", 1},
                {"--use-torch-optimizer-for-cpu-offload"},
                {"--overlap-cpu-optimizer-d2h-h2d"},
                {"--no-pin-cpu-grads"},
                {"--no-pin-cpu-params"}});
  flags.accept("muon orthogonalises whole matrices, of whatever ranks their rows are", {{"--muon-tp-mode", 1}});
}

void accept_parts_of_networks(CompatibilityFlags& flags) {
  flags.accept("it places the layers of --mtp-num-layers on pipeline stages, and there is one stage",
               {{"--mtp-standalone"}});
  flags.accept("it only matters with --qk-clip, which is refused",
               {{"--qk-clip-alpha", 1}, {"--qk-clip-threshold", 1}});
  flags.accept("it only matters with --position-embedding-type relative, which is refused",
               {{"--relative-attention-num-buckets", 1}, {"--relative-attention-max-distance", 1}});
  flags.accept("it only matters with --experimental-attention-variant, which is refused",
               {{"--dsa-indexer-n-heads", 1},
                {"--dsa-indexer-head-dim", 1},
                {"--dsa-indexer-topk", 1},
                {"--dsa-indexer-loss-coeff", 1},
                {"--dsa-indexer-use-sparse-loss"},
                {"--linear-conv-kernel-dim", 1},
                {"--linear-key-head-dim", 1},
                {"--linear-value-head-dim", 1},
                {"--linear-num-key-heads", 1},
                {"--linear-num-value-heads", 1}});
  flags.accept("it only matters with --is-hybrid-model, which is refused", {{"--mamba-state-dim", 1},
                                                                            {"--mamba-head-dim", 1},
                                                                            {"--mamba-num-groups", 1},
                                                                            {"--mamba-num-heads", 1},
                                                                            {"--disable-mamba-mem-eff-path"}});
  flags.accept("it only matters with --moe-expert-capacity-factor, which is refused",
               {{"--moe-pad-expert-input-to-capacity"}, {"--moe-token-drop-policy", 1}});
  flags.accept("shared experts are computed behind the others", {{"--moe-shared-expert-overlap"}});
  flags.accept("inference keeps no latents", {{"--cache-mla-latents"}});
  flags.accept("it only matters with --moe-use-upcycling, which is refused", {{"--moe-upcycling-granularity", 1}});
}

void accept_parts_of_runs(CompatibilityFlags& flags) {
  flags.accept("it only matters with --replication, which is refused",
               {{"--replication-jump", 1}, {"--replication-factor", 1}});
  flags.accept("it only matters with --adlr-autoresume, which is refused", {{"--adlr-autoresume-interval", 1}});
  flags.accept("it only matters with --enable-ft-package, which is refused",
               {{"--calc-ft-timeouts"}, {"--ft-num-warmup-iters", 1}});
  flags.accept("it only matters with --error-injection-rate, which is refused", {{"--error-injection-type", 1}});
  flags.accept("it only matters with --inprocess-restart, which is refused",
               {{"--inprocess-max-iterations", 1},
                {"--inprocess-monitor-thread-interval", 1},
                {"--inprocess-monitor-process-interval", 1},
                {"--inprocess-progress-watchdog-interval", 1},
                {"--inprocess-heartbeat-interval", 1},
                {"--inprocess-soft-timeout", 1},
                {"--inprocess-hard-timeout", 1},
                {"--inprocess-heartbeat-timeout", 1},
                {"--inprocess-barrier-timeout", 1},
                {"--inprocess-completion-timeout", 1},
                {"--inprocess-last-call-wait", 1},
                {"--inprocess-termination-grace-time", 1},
                {"--inprocess-granularity", 1},
                {"--inprocess-active-world-size", 1},
                {"--inprocess-empty-cuda-cache"}});
  flags.accept("it only matters with --sft, which is refused", {{"--sft-tokenizer-prompt-format", 1}});
  flags.accept("it only matters with --fim-data, which is refused", {{"--fim-rate", 1},
                                                                     {"--fim-spm-rate", 1},
                                                                     {"--fim-split-sample", 1},
                                                                     {"--fim-fragment-rate", 1},
                                                                     {"--fim-no-prefix", 1},
                                                                     {"--fim-prefix-token", 1},
                                                                     {"--fim-middle-token", 1},
                                                                     {"--fim-suffix-token", 1},
                                                                     {"--fim-pad-token", 1},
                                                                     {"--fim-eod-token", 1}});
  flags.accept("it only matters with a data balance, which is refused",
               {{"--data-balance-sorting-algo", 1}, {"--mbs-data-balance-sorting-algo", 1}});
  flags.accept("it only matters with --use-txt-dynamic-batching, which is refused",
               {{"--max-seq-len", 1}, {"--dynamic-batch-buffer-size", 1}});
}

void accept_inference(CompatibilityFlags& flags) {
  flags.accept("it belongs to Megatron's text generation",
               {{"--flash-decode"},
                {"--symmetric-ar-type", 1},
                {"--inference-fuse-tp-communication"},
                {"--mlp-chunks-for-prefill", 1},
                {"--inference-batch-times-seqlen-threshold", 1},
                {"--max-tokens-to-oom", 1},
                {"--use-legacy-static-engine"},
                {"--inference-max-requests", 1},
                {"--inference-max-seq-length", 1},
                {"--inference-max-batch-size", 1},
                {"--inference-dynamic-batching"},
                {"--inference-dynamic-batching-buffer-size-gb", 1},
                {"--inference-dynamic-batching-paused-buffer-size-gb", 1},
                {"--inference-dynamic-batching-block-size", 1},
                {"--inference-dynamic-batching-max-requests", 1},
                {"--inference-dynamic-batching-max-tokens", 1},
                {"--inference-dynamic-batching-num-cuda-graphs", 1},
                {"--inference-dynamic-batching-track-paused-request-events"},
                {"--decode-only-cuda-graphs"},
                {"--inference-dynamic-batching-unified-memory-level", 1},
                {"--nccl-all-reduce-for-prefill"},
                {"--enable-chunked-prefill"},
                {"--disable-chunked-prefill"},
                {"--inference-dynamic-batching-cuda-graph-max-tokens", 1},
                {"--inference-dynamic-batching-cuda-graph-mixed-prefill-count", 1},
                {"--inference-logging-step-interval", 1},
                {"--inference-wandb-logging", 0, "", "--no-inference-wandb-logging"},
                {"--inference-coordinator-port", 1},
                {"--moe-pad-experts-for-cuda-graph-inference"}});
}

void accept_reinforcement_learning(CompatibilityFlags& flags) {
  flags.accept(
      "it only matters with --perform-rl-step, which is refused",
      {{"--rl-prompts-per-eval", 1},
       {"--grpo-prompts-per-step", 1},
       {"--grpo-group-size", 1},
       {"--grpo-iterations", 1},
       {"--grpo-clamp-eps-lower", 1},
       {"--grpo-clamp-eps-upper", 1},
       {"--grpo-kl-beta", 1},
       {"--grpo-entropy-term-weight", 1},
       {"--grpo-filter-groups-with-same-reward"},
       {"--langrl-inference-server-type", 1},
       {"--langrl-inference-server-conversation-template", 1},
       {"--langrl-external-server", 0, "", "--no-langrl-external-server"},
       {"--langrl-env-config", 1},
       {"--rl-default-temperature", 1},
       {"--rl-default-top-p", 1},
       {"--rl-default-top-k", 1},
       {"--rl-offload-optimizer-during-inference"},
       {"--rl-offload-kv-cache-during-training", 0, "", "--no-rl-offload-kv-cache-during-training"},
       {"--rl-remove-kv-cache-during-training", 0, "", "--no-rl-remove-kv-cache-during-training"},
       {"--rl-reset-cuda-graphs", 0, "", "--no-rl-reset-cuda-graphs"},
       {"--rl-partial-rollouts", 0, "", "--no-rl-partial-rollouts"},
       {"--rl-inference-logprobs-is-correction", 0, "", "--no-rl-inference-logprobs-is-correction"},
       {"--rl-importance-sampling-truncation-coef", 1},
       {"--rl-use-sequence-packing", 0, "", "--no-rl-use-sequence-packing"},
       {"--rl-sequence-packing-max-sequences-per-bin", 1},
       {"--rl-sequence-packing-algo", 1},
       {"--rl-training-cuda-graphs", 0, "", "--no-rl-training-cuda-graphs"},
       {"--rl-inference-tensor-model-parallel-size", 1},
       {"--rl-inference-pipeline-model-parallel-size", 1},
       {"--rl-inference-expert-model-parallel-size", 1},
       {"--rl-inference-expert-tensor-model-parallel-size", 1},
       {"--rl-inference-model-unified-memory-level", 1},
       {"--rl-offload-inference-model-weights-when-idle", 0, "", "--no-rl-offload-inference-model-weights-when-idle"},
       {"--refit-method", 1},
       {"--rl-verify-model-weights-swap", 0, "", "--no-rl-verify-model-weights-swap"},
       {"--rl-parallel-generation-tasks", 1},
       {"--rl-skip-bos-token", 0, "", "--no-rl-skip-bos-token"}});
}

void accept_retrieval_and_vision(CompatibilityFlags& flags) {
  flags.accept("it belongs to BERT, T5 and retrieval models, which are not trained here",
               {{"--bert-no-binary-head"},
                {"--mask-prob", 1},
                {"--short-seq-prob", 1},
                {"--output-bert-embeddings"},
                {"--bert-embedder-type", 1},
                {"--ict-head-size", 1},
                {"--biencoder-projection-dim", 1},
                {"--biencoder-shared-query-context-model"},
                {"--query-in-block-prob", 1},
                {"--use-one-sent-docs"},
                {"--retriever-report-topk-accuracies", kAny},
                {"--retriever-score-scaling"},
                {"--indexer-batch-size", 1},
                {"--indexer-log-interval", 1}});
  flags.accept("it only matters with --vision-pretraining, which is refused",
               {{"--num-classes", 1},
                {"--img-h", 1},
                {"--img-w", 1},
                {"--num-channels", 1},
                {"--patch-dim", 1},
                {"--classes-fraction", 1},
                {"--data-per-class-fraction", 1},
                {"--no-data-sharding"},
                {"--head-lr-mult", 1},
                {"--vision-pretraining-type", 1},
                {"--vision-backbone-type", 1},
                {"--swin-backbone-type", 1},
                {"--mask-type", 1},
                {"--mask-factor", 1},
                {"--iter-per-epoch", 1},
                {"--dino-local-img-size", 1},
                {"--dino-local-crops-number", 1},
                {"--dino-head-hidden-size", 1},
                {"--dino-bottleneck-size", 1},
                {"--dino-freeze-last-layer", 1},
                {"--dino-norm-last-layer"},
                {"--dino-warmup-teacher-temp", 1},
                {"--dino-teacher-temp", 1},
                {"--dino-warmup-teacher-temp-epochs", 1}});
}

}  // namespace

void accept_flags_of_refused_ones(CompatibilityFlags& flags) {
  accept_parts_of_precision(flags);
  accept_parts_of_parallelism(flags);
  accept_parts_of_networks(flags);
  accept_parts_of_runs(flags);
}

void accept_flags_of_other_programs(CompatibilityFlags& flags) {
  accept_inference(flags);
  accept_reinforcement_learning(flags);
  accept_retrieval_and_vision(flags);
}

}  // namespace megashard::detail
