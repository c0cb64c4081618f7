#include "launch/generate/generated_set.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>

#include "checkpoint/hugging_face/safetensors.h"

namespace megashard {

void GeneratedSet::add(const std::vector<int64_t>& prompt, const at::Tensor& answer, const at::Tensor& log_probs) {
  const at::Tensor tokens = answer.contiguous(), values = log_probs.contiguous();
  const int64_t count = tokens.numel();
  const auto* token = tokens.const_data_ptr<int64_t>();
  tokens_.insert(tokens_.end(), prompt.begin(), prompt.end());
  tokens_.insert(tokens_.end(), token, token + count);
  loss_mask_.resize(loss_mask_.size() + prompt.size(), 0);
  loss_mask_.resize(tokens_.size(), 1);
  log_probs_.resize(log_probs_.size() + prompt.size(), 0);
  log_probs_.insert(log_probs_.end(), values.const_data_ptr<float>(), values.const_data_ptr<float>() + count);
  ends_.push_back(static_cast<int64_t>(tokens_.size()));
  answer_tokens_ += count;
}

void GeneratedSet::write(const std::string& path) const {
  const auto as_tensor = [](const auto& values, at::ScalarType dtype) {
    auto* data = const_cast<void*>(static_cast<const void*>(values.data()));  // NOLINT: only read
    return at::from_blob(data, {static_cast<int64_t>(values.size())}, dtype);
  };
  std::vector<std::pair<std::string, at::Tensor>> entries = {
      {"tokens", as_tensor(tokens_, at::kInt)},
      {"loss_mask", as_tensor(loss_mask_, at::kByte)},
      {"sample_ends", as_tensor(ends_, at::kLong)},
      {"column.infer_logprobs", as_tensor(log_probs_, at::kFloat)}};
  if (temperature_ != 0 && temperature_ != 1) {
    const int64_t tokens = std::ssize(tokens_);
    entries.emplace_back("column.temperatures", at::full({tokens}, temperature_, at::kFloat));
  }
  std::vector<TensorInfo> infos;
  for (const auto& [name, values] : entries)
    infos.push_back({.name = name, .dtype = values.scalar_type(), .sizes = values.sizes().vec()});
  SafetensorsWriter file(path, std::move(infos));
  for (const TensorInfo& each : file.tensors()) {
    for (const auto& [name, values] : entries) {
      if (name == each.name) file.write(values);
    }
  }
  file.finish();
}

}  // namespace megashard
