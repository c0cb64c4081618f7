#include "launch/arguments/foreign_flags.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <utility>

namespace megashard {
namespace {

constexpr const char* kNone = "there is none here: leave it out";
constexpr const char* kBatch =
    "here it is --global-batch-size: sequences of a micro batch x steps x data parallel ranks";
constexpr const char* kDtypes = "here they are param_dtype and reduce_dtype of --fsdp2-config-path";
constexpr const char* kFsdp = "here it is --use-torch-fsdp2, with the keys of --fsdp2-config-path";
constexpr const char* kLaunch = "here it is `megashard launch -n N -- pretrain ...`";
constexpr const char* kMaster = "here it is MASTER_ADDR and MASTER_PORT of the environment";
constexpr const char* kNodes = "several machines need torchrun, Slurm or MPI (docs/launch.md)";
constexpr const char* kFused = "there is none here, and fused kernels are always used: leave it out";

constexpr std::array kNames = std::to_array<std::pair<const char*, const char*>>({
    // torchrun and accelerate launch
    {"nproc-per-node", kLaunch},
    {"nnodes", kNodes},
    {"node-rank", kNodes},
    {"num-processes", kLaunch},
    {"num-machines", kNodes},
    {"machine-rank", kNodes},
    {"main-process-ip", kMaster},
    {"main-process-port", kMaster},
    {"gpu-ids", "here it is CUDA_VISIBLE_DEVICES of the environment"},
    {"cpu", "here it is --device cpu"},
    {"num-cpu-threads-per-process", "here it is OMP_NUM_THREADS of the environment"},
    {"mixed-precision", kDtypes},
    {"fp8-backend", "here they are --fp8-format and --fp8-recipe"},
    {"fp8-enable-fsdp-float8-all-gather", "here it is fp8_all_gather of --fsdp2-config-path"},
    {"gradient-accumulation-steps", kBatch},
    {"gradient-clipping", "here it is --clip-grad"},
    {"dynamo-backend", kFused},
    {"deepspeed", kFsdp},
    {"use-deepspeed", kFsdp},
    {"zero-stage", kFsdp},
    {"offload-optimizer-device", "here it is offload_to_cpu of --fsdp2-config-path"},
    {"offload-param-device", "here it is offload_to_cpu of --fsdp2-config-path"},
    {"use-megatron-lm", "leave it out: Megatron's flags are taken as they are"},
    {"debug", kNone},
    {"tee", kNone},
    {"log-dir", kNone},
    {"module", kNone},
    {"fsdp", kFsdp},
    {"fsdp-config", kFsdp},
    {"use-fsdp", kFsdp},
    // TrainingArguments, and arguments of transformers' and TRL's scripts
    {"model-name-or-path", "here it is --hf-model"},
    {"dataset-name", "here it is --data-path, of prepared files (docs/data.md)"},
    {"train-file", "here it is --data-path, of prepared files (docs/data.md)"},
    {"max-seq-length", "here it is --seq-length"},
    {"block-size", "here it is --seq-length"},
    {"output-dir", "here it is --save"},
    {"logging-dir", "here it is --tensorboard-dir"},
    {"report-to", "here they are --tensorboard-dir and --metrics-file"},
    {"per-device-train-batch-size", "here it is --micro-batch-size"},
    {"per-device-eval-batch-size", "an evaluation has the training's --micro-batch-size"},
    {"max-steps", "here it is --train-iters"},
    {"num-train-epochs", "here it is --train-iters, or --train-samples: epochs x samples"},
    {"learning-rate", "here it is --lr"},
    {"lr-scheduler-type", "here it is --lr-decay-style"},
    {"warmup-steps", "here it is --lr-warmup-iters"},
    {"num-warmup-steps", "here it is --lr-warmup-iters"},
    {"warmup-ratio", "here it is --lr-warmup-fraction"},
    {"adam-epsilon", "here it is --adam-eps"},
    {"max-grad-norm", "here it is --clip-grad"},
    {"optim", "here it is --optimizer"},
    {"gradient-checkpointing",
     "here it is --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"},
    {"logging-steps", "here it is --log-interval"},
    {"save-steps", "here it is --save-interval"},
    {"eval-steps", "here it is --eval-interval"},
    {"save-total-limit", "here it is --most-recent-k"},
    {"save-only-model", "here it is --no-save-optim"},
    {"resume-from-checkpoint", "here it is --load"},
    {"dataloader-num-workers", "here it is --num-workers"},
    {"average-tokens-across-devices", "here it is --calculate-per-token-loss"},
    {"ddp-timeout", "here it is --distributed-timeout-minutes"},
    {"use-liger-kernel", kFused},
    {"torch-compile", kFused},
    {"load-best-model-at-end", kNone},
    {"push-to-hub", kNone},
    {"neftune-noise-alpha", kNone},
    {"label-smoothing-factor", kNone},
    {"packing", "here it is --neat-packing"},
    {"assistant-only-loss", "of conversations answers alone are learnt (docs/data.md): leave it out"},
    {"lora-rank", "here it is --lora-r"},
    // flags for generation
    {"prompt", "the programs take tokens; `launch/ask.py MODEL_DIR TEXT` asks in text"},
    {"max-new-tokens", "`megashard generate` has it, and for infer it is --generate"},
});

}  // namespace

std::optional<NameHere> name_here(const std::string& spelling) {
  std::string name = spelling.substr(std::min(spelling.find_first_not_of('-'), spelling.size()));
  std::ranges::replace(name, '_', '-');
  const auto found = std::ranges::find(kNames, name, [](const auto& each) { return std::string(each.first); });
  if (found == kNames.end()) return std::nullopt;
  NameHere here{found->second, {}};
  std::istringstream words(here.text);
  for (std::string word; words >> word;) {
    while (word.ends_with(':') || word.ends_with(',')) word.pop_back();
    if (word.starts_with("--") && word.size() > 2) here.flags.push_back(word);
  }
  return here;
}

}  // namespace megashard
