#include "framework/arguments/argument_table_foreign.h"

namespace megashard::detail {

namespace {

void accept_parts_of_precision(ForeignFlags& flags) {
  flags.accept("loss scaling belongs to fp16", {{"--loss-scale", 1},
                                                {"--initial-loss-scale", 1},
                                                {"--min-loss-scale", 1},
                                                {"--loss-scale-window", 1},
                                                {"--hysteresis", 1}});
  flags.accept("it only matters with --fp8-format, which is refused", {{"--fp8-recipe", 1},
                                                                       {"--fp8-quantizer-factory", 1},
                                                                       {"--fp8-margin", 1},
                                                                       {"--fp8-interval", 1},
                                                                       {"--fp8-amax-history-len", 1},
                                                                       {"--fp8-amax-compute-algo", 1},
                                                                       {"--no-fp8-wgrad", 0, "", "--disable-fp8-wgrad"},
                                                                       {"--first-last-layers-bf16"},
                                                                       {"--num-layers-at-start-in-bf16", 1},
                                                                       {"--num-layers-at-end-in-bf16", 1},
                                                                       {"--keep-fp8-transpose-cache"},
                                                                       {"--reuse-grad-buf-for-mxfp8-param-ag"},
                                                                       {"--moe-router-padding-for-fp8"},
                                                                       {"--moe-router-padding-for-quantization"}});
  flags.accept("it only matters with --fp4-format, which is refused",
               {{"--fp4-recipe", 1}, {"--fp4-quantizer-factory", 1}});
  flags.accept("it only matters with --use-kitchen-attention, which is refused", {{"--kitchen-attention-backend", 1}});
}

void accept_parts_of_parallelism(ForeignFlags& flags) {
  flags.accept(
      "it only matters with tensor parallelism, which is not in this version",
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
  flags.accept("it only matters with tensor parallelism, which is not in this version", {{"--muon-tp-mode", 1}});
}

void accept_parts_of_networks(ForeignFlags& flags) {
  flags.accept("it only matters with --mtp-num-layers, which is refused",
               {{"--mtp-loss-scaling-factor", 1}, {"--mtp-standalone"}});
  flags.accept("it only matters with --qk-clip, which is refused",
               {{"--qk-clip-alpha", 1}, {"--qk-clip-threshold", 1}});
  flags.accept("it only matters with --window-size, which is refused", {{"--window-attn-skip-freq", 1}});
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
  flags.accept("it only matters with --multi-latent-attention, which is refused", {{"--q-lora-rank", 1},
                                                                                   {"--kv-lora-rank", 1},
                                                                                   {"--qk-head-dim", 1},
                                                                                   {"--qk-pos-emb-head-dim", 1},
                                                                                   {"--v-head-dim", 1},
                                                                                   {"--mscale", 1},
                                                                                   {"--mscale-all-dim", 1},
                                                                                   {"--cache-mla-latents"}});
  flags.accept("it only matters with --is-hybrid-model, which is refused", {{"--mamba-state-dim", 1},
                                                                            {"--mamba-head-dim", 1},
                                                                            {"--mamba-num-groups", 1},
                                                                            {"--mamba-num-heads", 1},
                                                                            {"--disable-mamba-mem-eff-path"}});
  flags.accept("it only matters with --moe-expert-capacity-factor, which is refused",
               {{"--moe-pad-expert-input-to-capacity"}, {"--moe-token-drop-policy", 1}});
  flags.accept("it only matters with --moe-shared-expert-intermediate-size, which is refused",
               {{"--moe-shared-expert-overlap"}});
  flags.accept("it only matters with --moe-router-enable-expert-bias, which is refused",
               {{"--moe-router-bias-update-rate", 1}});
  flags.accept("it only matters with --moe-use-upcycling, which is refused", {{"--moe-upcycling-granularity", 1}});
}

void accept_parts_of_runs(ForeignFlags& flags) {
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
  flags.accept("it only matters with --ref-model, which is refused",
               {{"--dpo-beta", 1}, {"--dpo-loss-type", 1}, {"--dpo-label-smoothing", 1}});
}

}  // namespace

void accept_flags_of_refused_ones(ForeignFlags& flags) {
  accept_parts_of_precision(flags);
  accept_parts_of_parallelism(flags);
  accept_parts_of_networks(flags);
  accept_parts_of_runs(flags);
}

}  // namespace megashard::detail
