#include "models/float8/float8_layers.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "framework/arguments/argument_value.h"
#include "framework/diagnostics.h"
#include "framework/modules/module_patterns.h"
#include "framework/modules/wrap_policy.h"
#include "models/kernels/float4_linear.h"
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

class Float4Compute final : public LinearCompute {
 public:
  at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) override {
    return float4_linear(x, weight, bias);
  }
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

/// The number in "model.layers.7" or "model.language_model.layers.7.mlp"; nullopt outside of the decoder's layers.
std::optional<int64_t> decoder_layer_of(std::string_view path) {
  for (const std::string_view part : {"model.", "language_model.", "layers."}) {
    if (path.starts_with(part)) {
      path.remove_prefix(part.size());
    } else if (part == "layers.") {
      return std::nullopt;
    }
  }
  return parse_integer(path.substr(0, path.find('.')));
}

/// Gives the layers this compute. `flag` begins the message if there are none.
int64_t set_computes(torch::nn::Module& model, const std::shared_ptr<LinearCompute>& compute, int64_t multiple,
                     const Float8Modules& modules, const std::string& flag) {
  const auto all = model.named_modules("", /*include_self=*/false);
  int64_t layers_of_decoder = 0;
  for (const auto& item : all)
    layers_of_decoder = std::max(layers_of_decoder, decoder_layer_of(item.key()).value_or(-1) + 1);
  const int64_t left_out = modules.first + modules.last;
  require(left_out == 0 || left_out < layers_of_decoder,
          flag + ": --first-last-layers-bf16 leaves out all " + std::to_string(layers_of_decoder) +
              " layers; lower --num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16.");
  int64_t count = 0;
  for (const auto& item : all) {
    auto* module = dynamic_cast<LinearLayers*>(item.value().get());
    if (module == nullptr || is_output_projection(item.key()) || is_lora_parameter(item.key() + ".")) continue;
    const auto number = decoder_layer_of(item.key());
    if (number && (*number < modules.first || *number >= layers_of_decoder - modules.last)) continue;
    if (!takes(modules, item.key())) continue;
    const auto layers = module->linear_layers();
    const auto& weight = layers.front().weight;
    if (weight.size(-2) % multiple != 0 || weight.size(-1) % multiple != 0) continue;
    module->set_compute(compute);
    for (const auto& layer : layers) count += matrices_of(layer.weight);
  }
  const std::string part = modules.only.empty() ? "the model" : modules.only.front();
  require(count > 0, flag + ": no linear layer of " + part + " has sizes that are multiples of " +
                         std::to_string(multiple) + "; leave it out");
  return count;
}

}  // namespace

int64_t use_float8(torch::nn::Module& model, const Float8Options& options, const Float8Modules& modules) {
  return set_computes(model, std::make_shared<Float8Compute>(options), options.recipe == Float8Recipe::kMxfp8 ? 32 : 16,
                      modules, "--fp8-format");
}

int64_t use_float4(torch::nn::Module& model, const Float8Modules& modules) {
  return set_computes(model, std::make_shared<Float4Compute>(), 16, modules, "--fp4-format");
}

}  // namespace megashard
