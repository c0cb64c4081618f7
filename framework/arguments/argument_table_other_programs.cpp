#include "framework/arguments/argument_table_foreign.h"

namespace megashard::detail {

namespace {

void accept_inference(ForeignFlags& flags) {
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

void accept_reinforcement_learning(ForeignFlags& flags) {
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

void accept_retrieval_and_vision(ForeignFlags& flags) {
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

void accept_flags_of_other_programs(ForeignFlags& flags) {
  accept_inference(flags);
  accept_reinforcement_learning(flags);
  accept_retrieval_and_vision(flags);
}

}  // namespace megashard::detail
