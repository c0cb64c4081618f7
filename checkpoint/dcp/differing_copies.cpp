#include "checkpoint/dcp/differing_copies.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <set>

#include "checkpoint/files/crc32.h"
#include "checkpoint/values/gather_values.h"
#include "checkpoint/values/state_dict_keys.h"

namespace megashard {
namespace {

Value checksums(const ShardedTensors& tensors) {
  Dict sums;
  for (const auto& [key, tensor] : tensors) {
    const bool is_whole = tensor.is_replicated() && tensor.local.sizes() == at::IntArrayRef(tensor.global_sizes);
    if (!is_whole || !is_model_key(key)) continue;
    const auto local = tensor.local.detach().cpu().contiguous();
    sums.set(key, int64_t{crc32(0, local.const_data_ptr(), static_cast<int64_t>(local.nbytes()))});
  }
  return sums;
}

}  // namespace

std::vector<std::string> differing_copies(const ShardedTensors& tensors, const ProcessGroupPtr& group) {
  std::map<std::string, std::set<int64_t>> sums;
  for (const auto& of_rank : gather_values(group, [&] { return checksums(tensors); })) {
    for (const auto& [key, sum] : of_rank.as_dict().entries) sums[key.as_string()].insert(sum.as_int());
  }
  std::vector<std::string> names;
  for (const auto& [key, different] : sums) {
    if (different.size() > 1) names.push_back(key);
  }
  return names;
}

}  // namespace megashard
