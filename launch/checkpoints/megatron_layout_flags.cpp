#include "launch/checkpoints/megatron_layout_flags.h"

#include "framework/diagnostics.h"
#include "framework/modules/model_registry.h"
#include "models/register_models.h"

namespace megashard {

void MegatronLayoutFlags::add(CLI::App& app) {
  app.add_flag("--megatron-layout", use,
               "the torch_dist side has megatron-core's names and rows: linear_qkv by groups, "
               "linear_fc1 of gate and up, a padded vocabulary");
  app.add_option("--make-vocab-size-divisible-by", make_vocab_size_divisible_by,
                 "of the padding, as in Megatron [128]");
  app.add_option("--tensor-model-parallel-size", tensor_model_parallel_size,
                 "times it, as in Megatron [1]; nothing else depends on it");
}

std::optional<MegatronLayout> MegatronLayoutFlags::layout(const std::string& hf_dir, const std::string& flag) const {
  if (!use) return std::nullopt;
  for (const auto& [name, value] : {std::pair("--make-vocab-size-divisible-by", make_vocab_size_divisible_by),
                                    std::pair("--tensor-model-parallel-size", tensor_model_parallel_size)}) {
    if (value < 1) throw UsageError(std::string(name) + " is " + std::to_string(value) + "; it must be at least 1.");
  }
  if (hf_dir.empty()) {
    throw UsageError("--megatron-layout needs " + flag +
                     ": the model's config.json says how many heads and groups there are");
  }
  ModelRegistry registry;
  register_models(registry);
  return registry.layout(hf_dir, make_vocab_size_divisible_by * tensor_model_parallel_size);
}

}  // namespace megashard
