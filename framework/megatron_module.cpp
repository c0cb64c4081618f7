#include "framework/megatron_module.h"

#include <unordered_set>

#include "parallel/fully_shard.h"

namespace megashard {

ShardedTensors MegatronModule::sharded_state_dict() {
  ShardedTensors entries;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : named_parameters(/*recurse=*/true)) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      entries.emplace_back(item.key(), sharded_view(item.value()));
    }
  }
  for (const auto& item : named_buffers(/*recurse=*/true)) {
    entries.emplace_back(item.key(), ShardedTensor::replicated(item.value()));
  }
  return entries;
}

}  // namespace megashard
