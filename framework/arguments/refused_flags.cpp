#include "framework/arguments/compatibility_flags.h"

namespace megashard::detail {

namespace {

constexpr const char* kSharding =
    "this program shards by FSDP2; use --use-torch-fsdp2 with --fsdp2-config-path instead";
constexpr const char* kNoPipeline =
    "pipeline parallelism is not part of this program; FSDP2 shards over all ranks instead";
constexpr const char* kFp32Steps = "the optimizer takes gradients as they are and steps in fp32; leave it out";

void refuse_launching(CompatibilityFlags& flags) {
  flags.refuse(
      "it is a flag of torchrun; give it before the program's name, or use `megashard launch -n "
      "RANKS -- pretrain ...`",
      {{"--nproc-per-node", 1}, {"--nnodes", 1}, {"--node-rank", 1}, {"--master-addr", 1}, {"--master-port", 1}});
  flags.refuse("the programs are LibTorch's; leave it out", {{"--ai-framework", 1, "pytorch"}});
  flags.refuse("Megatron's YAML has another form; give the flags, or a file of them by --config", {{"--yaml-cfg", 1}});
  flags.refuse("it names Python code; a model of your own comes by --model-plugin", {{"--spec", kAny}});
  flags.refuse("Megatron's old model classes are not part of this program; leave it out", {{"--use-legacy-models"}});
  flags.refuse("Megatron removed it long ago; use --micro-batch-size", {{"--batch-size", 1}});
  flags.refuse("Megatron removed it long ago; use --lr-warmup-fraction", {{"--warmup", 1}});
  flags.refuse("Megatron removed it long ago; use --tensor-model-parallel-size", {{"--model-parallel-size", 1}});
  flags.refuse("Megatron renamed it; use --recompute-granularity full --recompute-method uniform "
               "--recompute-num-layers 1",
               {{"--checkpoint-activations"}, {"--activations-checkpoint-method", 1}});
}

void refuse_memory(CompatibilityFlags& flags) {
  flags.refuse("every tensor-parallel rank keeps its own; --sequence-parallel divides them",
               {{"--distribute-saved-activations"}});
  flags.refuse("give --recompute-activations --recompute-modules moe instead", {{"--moe-layer-recompute"}});
  flags.refuse("list the layers under recompute_modules and aten::mm under recompute_save_ops in the FSDP2 "
               "file: norms and activations are recomputed, products are kept",
               {{"--recompute-norm"}});
  flags.refuse("list the layers under recompute_modules in the FSDP2 file and the operators whose results "
               "are kept under recompute_save_ops",
               {{"--recompute-skip-core-attention"}, {"--recompute-num-layers-skip-core-attention", 1, "0"}});
  flags.refuse("use --fine-grained-activation-offloading with --offload-modules, or offload_modules in the "
               "FSDP2 file",
               {{"--swap-attention"}, {"--swap-modules", 1}});
  flags.refuse("choose what is recomputed or offloaded by hand", {{"--adaptive-memory-optimization"}});
  flags.refuse("set offload_to_cpu: true in the FSDP2 file instead", {{"--optimizer-cpu-offload"}});
  flags.refuse(kFp32Steps, {{"--main-grads-dtype", 1, "fp32"}, {"--main-params-dtype", 1, "fp32"}});
}

void refuse_parallelism(CompatibilityFlags& flags) {
  flags.refuse("FSDP2 shards the optimizer's state already; leave it out and keep --use-torch-fsdp2",
               {{"--use-distributed-optimizer"}});
  flags.refuse(kSharding, {{"--use-custom-fsdp"},
                           {"--use-megatron-fsdp"},
                           {"--data-parallel-sharding-strategy", 1, "no_shard"},
                           {"--outer-dp-sharding-strategy", 1, "no_shard"},
                           {"--enable-full-sharding-in-hsdp"},
                           {"--layerzero"},
                           {"--layerzero-config", 1}});
  flags.refuse("set reshard_after_forward: false in the FSDP2 file instead",
               {{"--torch-fsdp2-no-reshard-after-forward"}});
  flags.refuse("replicas come from sharding_size in the FSDP2 file",
               {{"--num-distributed-optimizer-instances", 1, "1"}});
  flags.refuse(kNoPipeline, {{"--virtual-pipeline-model-parallel-size", 1, "1"},
                             {"--num-layers-per-virtual-pipeline-stage", 1},
                             {"--num-virtual-stages-per-pipeline-rank", 1, "1"}});
  flags.refuse("experts are shared out whole, by --expert-model-parallel-size; leave it out",
               {{"--expert-tensor-parallel-size", 1, "1"}});
  flags.refuse("every sequence has as many ranks; use --context-parallel-size", {{"--hybrid-context-parallel"}});
  flags.refuse("all parts of a model are sharded over the same ranks; leave it out",
               {{"--hetero-parallel"}, {"--hetero-encoder-mbs-scale", 1, "1"}});
  flags.refuse("every rank must be there; --dry-run --world-size N needs none", {{"--fake-process-group"}});
}

void refuse_precision(CompatibilityFlags& flags) {
  flags.refuse("weights stay as they are stored; set fp8_all_gather: true in the FSDP2 file to gather them in fp8",
               {{"--fp8-param-gather"}});
  flags.refuse("all linear layers but the output's compute in fp8, in all three products; leave it out",
               {{"--no-fp8-wgrad", 0, "", "--disable-fp8-wgrad"}});
  flags.refuse("weights stay as they are stored; leave it out", {{"--fp4-param-gather"}});
  flags.refuse("the FSDP2 file decides on precision; use param_dtype and reduce_dtype there",
               {{"--te-precision-config-file", 1},
                {"--kitchen-config-file", 1},
                {"--kitchen-recipe-number", 1},
                {"--use-kitchen-attention"}});
  flags.refuse("products of bf16 and fp32 are computed as LibTorch does by default; leave it out",
               {{"--disable-bf16-reduced-precision-matmul"}, {"--allow-tf32"}});
  flags.refuse("kernels are not chosen for that; --deterministic-mode has deterministic ones",
               {{"--batch-invariant-mode"}});
  flags.refuse("set reduce_dtype: fp32 in the FSDP2 file instead", {{"--ddp-reduce-scatter-with-fp32-accumulation"}});
}

void refuse_steps(CompatibilityFlags& flags) {
  flags.refuse("steps are never skipped; change the data instead", {{"--iterations-to-skip", kAny}});
  flags.refuse("the batch never changes at given steps; use --rampup-batch-size",
               {{"--phase-transition-iterations", 1}});
  flags.refuse("there is no rerun state machine here; leave it out", {{"--check-for-spiky-loss"},
                                                                      {"--check-for-large-grads"},
                                                                      {"--rerun-mode", 1, "disabled"},
                                                                      {"--result-rejected-tracker-filename", 1},
                                                                      {"--error-injection-rate", 1, "0"}});
  flags.refuse("give parameters settings of their own by --param-group-overrides",
               {{"--decoupled-lr", 1},
                {"--decoupled-min-lr", 1},
                {"--apply-wd-to-qk-layernorm"},
                {"--no-weight-decay-cond-type", 1}});
  flags.refuse("use --muon-extra-scale-factor", {{"--matched-adamw-rms", 1, "0.2"}});
  flags.refuse("use --muon-num-ns-steps", {{"--ns-steps", 1, "5"}});
  flags.refuse("every run steps its optimizer; leave it out", {{"--enable-dummy-optimizer"}});
  flags.refuse("use --calculate-per-token-loss, or neither for the mean of microbatches",
               {{"--calculate-per-sample-loss"}, {"--calculate-square-loss"}});
  flags.refuse("use --calculate-per-token-loss", {{"--calculate-token-loss"}});
  flags.refuse("use --dpo-nll-weight", {{"--pref-ftx", 1, "0.0"}});
  flags.refuse("use megashard rl (docs/reinforcement_learning.md), or --objective policy",
               {{"--perform-rl-step"}, {"--stage", 1}});
  flags.refuse("replicas are never compared here; leave it out",
               {{"--check-weight-hash-across-dp-replicas-interval", 1}});
  flags.refuse("the launcher restarts a run, which goes on from the newest checkpoint of --load; use "
               "--save-interval, and --exit-duration-in-mins or --exit-signal-handler",
               {{"--inprocess-restart"}, {"--enable-ft-package"}, {"--adlr-autoresume"}});
}

void refuse_checkpoints(CompatibilityFlags& flags) {
  flags.refuse("use the program `megashard convert`", {{"--ckpt-convert-update-legacy-dist-opt-format"}});
  flags.refuse("there are no non-persistent checkpoints here; use --save-interval",
               {{"--non-persistent-save-interval", 1},
                {"--non-persistent-ckpt-type", 1},
                {"--non-persistent-global-ckpt-dir", 1},
                {"--non-persistent-local-ckpt-dir", 1},
                {"--non-persistent-local-ckpt-algo", 1, "fully_parallel"},
                {"--replication"}});
  flags.refuse("checkpoints are written as Megatron writes them today; leave it out",
               {{"--dist-ckpt-save-pre-mcore-014"}});
  flags.refuse("with --bf16 the fp32 copies of a checkpoint are always loaded; leave it out",
               {{"--load-main-params-from-ckpt"}});
  flags.refuse("no such files are written here; leave it out", {{"--save-wgrads-interval", 1},
                                                                {"--save-dgrads-interval", 1},
                                                                {"--dump-param-to-param-group-map", 1},
                                                                {"--config-logger-dir", 1}});
  flags.refuse("the weights that LoRA adapts come from --hf-model", {{"--load-base-model", 1}});
}

void refuse_data(CompatibilityFlags& flags) {
  flags.refuse("use --train-data-path, --valid-data-path and --test-data-path instead",
               {{"--per-split-data-args-path", 1}});
  flags.refuse("an evaluation has --eval-iters batches of the one validation set; leave it out",
               {{"--full-validation"}, {"--multiple-validation-sets"}});
  flags.refuse("it is always Megatron's default, 0.005; leave it out", {{"--mid-level-dataset-surplus", 1, "0.005"}});
  flags.refuse("all samples are used; change the data instead", {{"--sample-rate", 1, "1.0"}});
  flags.refuse("tokens are trained on in their order; prepare the data so beforehand", {{"--fim-data"}});
  flags.refuse("conversations are turned into tokens and masks by launch/preprocess/preprocess_data.py; "
               "leave it out",
               {{"--sft"}});
  flags.refuse("sequences have --seq-length tokens and stay on their rank; leave it out",
               {{"--use-data-balance"}, {"--use-image-mbs-data-balance"}, {"--use-txt-dynamic-batching"}});
  flags.refuse("it belongs to BERT and retrieval models, which are not trained here; leave it out",
               {{"--ict-load", 1},
                {"--bert-load", 1},
                {"--titles-data-path", 1},
                {"--evidence-data-path", 1},
                {"--block-data-path", 1},
                {"--embedding-path", 1}});
}

void refuse_experts(CompatibilityFlags& flags) {
  flags.refuse(
      "routers choose by their scores, without noise; leave it out",
      {{"--moe-input-jitter-eps", 1, "0"}, {"--moe-router-force-load-balancing"}, {"--moe-enable-routing-replay"}});
  flags.refuse("every token reaches all the experts that it chose; leave it out",
               {{"--moe-expert-capacity-factor", 1}});
  flags.refuse("no model family of this program has experts of that kind; leave it out",
               {{"--moe-apply-probs-on-input"}, {"--moe-use-upcycling"}});
}

void refuse_attention(CompatibilityFlags& flags) {
  flags.refuse("no model family of this program has attention of that kind; leave it out",
               {{"--qk-l2-norm"}, {"--qk-clip"}});
  flags.refuse("linear attention comes with a model by --hf-model, whose config.json describes it; leave it out",
               {{"--experimental-attention-variant", 1}, {"--linear-attention-freq", 1}});
  flags.refuse("M-RoPE's sections come from the config.json of --hf-model", {{"--mrope-section", kAny}});
}

void refuse_layers(CompatibilityFlags& flags) {
  flags.refuse("the MLP is GELU, --openai-gelu, --squared-relu or --swiglu; use one of these",
               {{"--quick-geglu"}, {"--glu-linear-offset", 1, "0.0"}, {"--activation-func-clamp-value", 1}});
  flags.refuse("the embedding is drawn as the other weights, by --init-method-std",
               {{"--embedding-init-method-std", 1}});
  flags.refuse("all layers of a network are alike, and none is Mamba's; leave it out",
               {{"--is-hybrid-model"},
                {"--hybrid-attention-ratio", 1, "0.0"},
                {"--hybrid-mlp-ratio", 1, "0.0"},
                {"--hybrid-override-pattern", 1},
                {"--heterogeneous-layers-config-path", 1},
                {"--heterogeneous-layers-config-encoded-json", 1}});
  flags.refuse("networks here have no encoder beside the decoder; use --num-layers", {{"--decoder-num-layers", 1}});
  flags.refuse("networks here have no encoder beside the decoder; use --seq-length", {{"--decoder-seq-length", 1}});
  flags.refuse("vision towers come with a vision-language model by --hf-model; leave it out",
               {{"--vision-pretraining"}});
}

void refuse_adapters(CompatibilityFlags& flags) {
  flags.refuse("adapters stand on linear layers; choose them by --lora-target-modules",
               {{"--lora-target-parameters", kAny}, {"--lora-apply-modules", kAny, "all"}});
  flags.refuse("adapters alone are trained; leave it out", {{"--lora-mixed-training", 1, "False"}});
}

}  // namespace

void add_refused_flags(std::vector<Option>& rows) {
  CompatibilityFlags flags(rows);
  refuse_launching(flags);
  refuse_memory(flags);
  refuse_parallelism(flags);
  refuse_precision(flags);
  refuse_steps(flags);
  refuse_checkpoints(flags);
  refuse_data(flags);
  refuse_experts(flags);
  refuse_attention(flags);
  refuse_layers(flags);
  refuse_adapters(flags);
}

}  // namespace megashard::detail
