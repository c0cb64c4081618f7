#include "framework/training/save_contract.h"

#include <c10/util/Exception.h>

#include <map>

#include "checkpoint/values/tensor_info.h"

namespace megashard {
namespace {

/// By name: "float32[4, 3]".
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
