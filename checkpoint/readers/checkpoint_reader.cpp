#include "checkpoint/readers/checkpoint_reader.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "checkpoint/values/value_paths.h"

namespace megashard {

void CheckpointReader::add_tensor(TensorInfo info) {
  index_.emplace(info.name, tensors_.size());
  tensors_.push_back(std::move(info));
}

void CheckpointReader::add_value(ValueKey key, Value known) {
  values_.emplace(key.key, std::move(known));
  value_keys_.push_back(std::move(key));
}

Value CheckpointReader::read_value(const std::string& key) {
  const auto found = values_.find(key);
  TORCH_CHECK_VALUE(found != values_.end(), path_, " has no value \"", key, "\"");
  return found->second;
}

const TensorInfo* CheckpointReader::find(const std::string& key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

const TensorInfo& CheckpointReader::tensor_at(const std::string& key) const {
  const auto* info = find(key);
  TORCH_CHECK_VALUE(info != nullptr, path_, " has no tensor \"", key, "\"");
  return *info;
}

at::Tensor CheckpointReader::read_tensor(const std::string& key) {
  const auto& sizes = tensor_at(key).sizes;
  return read_rows(key, 0, sizes.empty() ? 1 : sizes[0]);
}

void CheckpointReader::check_fit(const std::string& key, const ShardedTensor& into) {
  const auto& sizes = tensor_at(key).sizes;
  TORCH_CHECK_VALUE(sizes == into.global_sizes, key, " has sizes ", describe_sizes(sizes), " in ", path_, ", and ",
                    describe_sizes(into.global_sizes),
                    " here: another model was saved; give the flags of the run that wrote it");
}

void CheckpointReader::read_into(const std::string& key, const ShardedTensor& into, ReadQueue& /*reads*/) {
  const at::NoGradGuard no_grad;
  CheckpointReader::check_fit(key, into);
  if (into.local.numel() == 0) return;
  const bool is_scalar = into.offsets.empty();
  const auto rows = read_rows(key, is_scalar ? 0 : into.offsets[0], is_scalar ? 1 : into.local.size(0));
  into.local.detach().copy_(narrowed(rows, into.offsets, into.local.sizes()));
}

Dict CheckpointReader::read_values(const std::function<bool(const std::string& key)>& wanted) {
  std::vector<FlatValue> leaves;
  auto keys = tensors_.size();
  for (const auto& [key, path] : value_keys_) {
    if (find(key) == nullptr) ++keys;
    if (!wanted || wanted(key)) leaves.push_back({key, path, read_value(key)});
  }
  return nest_values(std::move(leaves), keys);
}

}  // namespace megashard
