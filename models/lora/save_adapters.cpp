#include "models/lora/save_adapters.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/files/output_file.h"
#include "checkpoint/hugging_face/save_hf_sharded.h"
#include "checkpoint/weights/published_tensors.h"
#include "framework/modules/megatron_module.h"
#include "models/lora/lora.h"

namespace megashard {
namespace {

/// "model.layers.0.self_attn.q_proj.lora_A.weight" -> "q_proj", as PEFT names its targets.
std::string target_of(const std::string& name) {
  const auto end = name.rfind(".lora_");
  const auto begin = name.rfind('.', end - 1) + 1;
  return name.substr(begin, end - begin);
}

/// A whole number without a point, as PEFT has it.
nlohmann::ordered_json number(double value) {
  if (value == std::floor(value)) return static_cast<int64_t>(value);
  return value;
}

}  // namespace

void save_adapters(MegatronModule& model, const Arguments& arguments, const std::string& folder,
                   const ProcessGroupPtr& group) {
  std::set<std::string> targets;
  ShardedTensors tensors;
  for (auto& [name, piece] : published_tensors(checked_state_dict(model), model.weight_map())) {
    if (!is_lora_parameter(name)) continue;
    targets.insert(target_of(name));
    tensors.emplace_back("base_model.model." + name, std::move(piece));
  }
  const auto write_config = [&](const std::string& beside) {
    const nlohmann::ordered_json config = {{"peft_type", "LORA"},
                                           {"task_type", "CAUSAL_LM"},
                                           {"base_model_name_or_path", *arguments.hf_model},
                                           {"r", *arguments.lora_r},
                                           {"lora_alpha", number(arguments.lora_alpha)},
                                           {"lora_dropout", arguments.lora_dropout},
                                           {"target_modules", targets},
                                           {"bias", "none"},
                                           {"fan_in_fan_out", false},
                                           {"modules_to_save", nullptr},
                                           {"inference_mode", true}};
    write_file_atomically(beside + "/adapter_config.json", config.dump(2) + "\n");
  };
  save_hf_sharded(folder, tensors, group,
                  {.max_shard_bytes = std::numeric_limits<int64_t>::max(),  // PEFT reads one file
                   .stem = "adapter_model",
                   .beside = write_config});
}

}  // namespace megashard
