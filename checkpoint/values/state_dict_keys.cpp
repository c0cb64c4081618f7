#include "checkpoint/values/state_dict_keys.h"

namespace megashard {

std::string model_key(std::string_view weight) { return std::string(kModelPrefix) + std::string(weight); }

bool is_model_key(std::string_view key) { return key.starts_with(kModelPrefix); }

bool is_optimizer_key(std::string_view key) { return key.starts_with(kOptimizerPrefix); }

std::string optimizer_state_key(std::string_view weight, std::string_view buffer) {
  return std::string(kOptimizerStatePrefix) + std::string(weight) + "." + std::string(buffer);
}

std::optional<OptimizerStateKey> split_optimizer_state_key(std::string_view key) {
  const auto begin = kOptimizerStatePrefix.size();
  const auto last = key.rfind('.');
  if (!key.starts_with(kOptimizerStatePrefix) || last < begin) return std::nullopt;
  return OptimizerStateKey{std::string(key.substr(begin, last - begin)), std::string(key.substr(last + 1))};
}

bool is_extra_state(std::string_view key) { return key.ends_with("_extra_state"); }

std::vector<Value> tensor_path(const std::string& key) {
  if (is_model_key(key)) return {"model", key.substr(kModelPrefix.size())};
  if (auto parts = split_optimizer_state_key(key))
    return {kOptimizerKey, kStateKey, std::move(parts->weight), std::move(parts->buffer)};
  return {key};
}

}  // namespace megashard
