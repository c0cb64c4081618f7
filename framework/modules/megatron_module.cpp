#include "framework/modules/megatron_module.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/values/tensor_info.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

/// Module names of Hugging Face, Megatron and GPT-2.
constexpr std::string_view kEmbeddingsAndOutputs[] = {
    "embed_tokens",    "embed_positions",     "pos_embed", "wte",         "wpe",
    "word_embeddings", "position_embeddings", "lm_head",   "output_layer"};

}  // namespace

ShardedTensors MegatronModule::state_dict() {
  if (!trained_only_) return whole_state_dict();
  ShardedTensors trained;
  for (const auto& item : named_parameters(/*recurse=*/true)) {
    if (item.value().requires_grad()) trained.emplace_back(item.key(), reshard_and_view(item.value()));
  }
  return trained;
}

ShardedTensors MegatronModule::whole_state_dict() {
  ShardedTensors entries;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : named_parameters(/*recurse=*/true)) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      entries.emplace_back(item.key(), reshard_and_view(item.value()));
    }
  }
  for (const auto& item : named_buffers(/*recurse=*/true)) {
    entries.emplace_back(item.key(), ShardedTensor::replicated(item.value()));
  }
  return entries;
}

std::vector<std::pair<std::string, std::string>> MegatronModule::tied_names() const {
  std::vector<std::pair<std::string, std::string>> tied;
  if (trained_only_) return tied;
  std::unordered_map<const c10::TensorImpl*, std::string> first;
  for (const auto& item : named_parameters(/*recurse=*/true)) {
    const auto [found, is_new] = first.emplace(item.value().unsafeGetTensorImpl(), item.key());
    if (!is_new) tied.emplace_back(item.key(), found->second);
  }
  return tied;
}

bool MegatronModule::is_embedding_or_output_parameter(const std::string& name) const {
  const size_t end = name.rfind('.'), begin = end == name.npos ? end : name.rfind('.', end - 1);
  const auto module = end == name.npos ? "" : name.substr(begin + 1, end - begin - 1);  // npos + 1 is 0
  return std::ranges::count(kEmbeddingsAndOutputs, module) != 0;
}

namespace {

/// Dtype and sizes of each tensor, by name: "float32[4, 3]".
std::map<std::string, std::string> kinds_of(const ShardedTensors& tensors) {
  std::map<std::string, std::string> kinds;
  for (const auto& [name, tensor] : tensors) {
    kinds[name] = torch_dtype_name(tensor.local.scalar_type()) + describe_sizes(tensor.global_sizes);
  }
  return kinds;
}

}  // namespace

ShardedTensors checked_state_dict(MegatronModule& model) {
  auto saved = model.state_dict_for_save_checkpoint();
  const auto loaded = kinds_of(model.state_dict());
  const auto kinds = kinds_of(saved);
  std::string differences;
  for (const auto& [name, kind] : kinds) {
    const auto found = loaded.find(name);
    if (found == loaded.end()) {
      differences += "; " + name + " " + kind + " is only saved";
    } else if (found->second != kind) {
      differences += "; " + name + " is saved as " + kind + " and loaded as " + found->second;
    }
  }
  for (const auto& [name, kind] : loaded) {
    if (kinds.count(name) == 0) differences += "; " + name + " " + kind + " is not saved";
  }
  TORCH_CHECK_VALUE(differences.empty(),
                    "the model's state_dict_for_save_checkpoint() and state_dict() must hold the same tensors, or the "
                    "checkpoint could not be loaded",
                    differences);
  return saved;
}

}  // namespace megashard
