#include "models/float8/float8_layers.h"

#include <algorithm>
#include <memory>
#include <string>

#include "framework/diagnostics.h"
#include "framework/modules/module_patterns.h"
#include "framework/modules/wrap_policy.h"
#include "models/layers/linear_layers.h"
#include "models/lora/lora.h"

namespace megashard {

namespace {

class Float8Compute final : public LinearCompute {
 public:
  explicit Float8Compute(const Float8Options& options) : options_(options) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) override {
    return float8_linear(x, weight, bias, options_);
  }

 private:
  Float8Options options_;
};

int64_t matrices_of(const at::Tensor& weight) { return weight.dim() == 2 ? 1 : weight.size(0); }

bool matches(const std::vector<std::string>& patterns, const std::string& path) {
  return std::ranges::any_of(patterns, [&](const auto& pattern) { return matches_native_pattern(pattern, path); });
}

bool takes(const Float8Modules& modules, const std::string& layer) {
  if (matches(modules.ignored, layer)) return false;
  if (modules.only.empty()) return true;
  for (auto end = layer.find('.'); end != layer.npos; end = layer.find('.', end + 1)) {
    if (matches(modules.only, layer.substr(0, end))) return true;
  }
  return matches(modules.only, layer);
}

}  // namespace

int64_t use_float8(torch::nn::Module& model, const Float8Options& options, const Float8Modules& modules) {
  const int64_t multiple = options.recipe == Float8Recipe::kMxfp8 ? 32 : 16;
  const auto compute = std::make_shared<Float8Compute>(options);
  int64_t count = 0;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    auto* module = dynamic_cast<LinearLayers*>(item.value().get());
    if (module == nullptr || is_output_projection(item.key()) || is_lora_parameter(item.key() + ".")) continue;
    if (!takes(modules, item.key())) continue;
    const auto layers = module->linear_layers();
    const auto& weight = layers.front().weight;
    if (weight.size(-2) % multiple != 0 || weight.size(-1) % multiple != 0) continue;
    module->set_compute(compute);
    for (const auto& layer : layers) count += matrices_of(layer.weight);
  }
  if (count == 0) {
    const std::string part = modules.only.empty() ? "the model" : modules.only.front();
    throw UsageError("--fp8-format: no linear layer of " + part + " has sizes that are multiples of " +
                     std::to_string(multiple) + "; leave it out");
  }
  return count;
}

}  // namespace megashard
