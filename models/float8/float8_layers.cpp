#include "models/float8/float8_layers.h"

#include <memory>
#include <string>

#include "framework/diagnostics.h"
#include "framework/modules/wrap_policy.h"
#include "models/layers/linear.h"
#include "models/lora/lora.h"
#include "models/moe/experts.h"

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

}  // namespace

int64_t use_float8(torch::nn::Module& model, const Float8Options& options) {
  const int64_t multiple = options.recipe == Float8Recipe::kMxfp8 ? 32 : 16;
  int64_t count = 0;
  const auto fits = [&](const at::Tensor& weight) {
    return weight.size(-2) % multiple == 0 && weight.size(-1) % multiple == 0;
  };
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    if (auto* experts = dynamic_cast<Experts*>(item.value().get())) {
      const auto projections = experts->projections();
      if (!fits(projections.front().weight)) continue;
      experts->compute_in_float8(options);
      for (const auto& projection : projections) count += projection.weight.size(0);
      continue;
    }
    auto* layer = dynamic_cast<Linear*>(item.value().get());
    if (layer == nullptr || is_output_projection(item.key()) || is_lora_parameter(item.key() + ".")) continue;
    if (!fits(layer->weight)) continue;
    TORCH_INTERNAL_ASSERT(layer->is_plain(), "use_float8 comes before add_lora");
    layer->set_compute(std::make_shared<Float8Compute>(options));
    ++count;
  }
  if (count == 0) {
    throw UsageError("--fp8-format: no linear layer of the model has sizes that are multiples of " +
                     std::to_string(multiple) + "; leave it out");
  }
  return count;
}

}  // namespace megashard
