#include "models/float8/float8_layers.h"

#include <string>

#include "framework/diagnostics.h"
#include "framework/modules/wrap_policy.h"
#include "models/layers/linear.h"
#include "models/lora/lora.h"

namespace megashard {

int64_t use_float8(torch::nn::Module& model, const Float8Options& options) {
  const int64_t multiple = options.recipe == Float8Recipe::kMxfp8 ? 32 : 16;
  int64_t count = 0;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    auto* layer = dynamic_cast<Linear*>(item.value().get());
    if (layer == nullptr || is_output_projection(item.key()) || is_lora_parameter(item.key() + ".")) continue;
    if (layer->weight.size(0) % multiple != 0 || layer->weight.size(1) % multiple != 0) continue;
    layer->compute_in_float8(options);
    ++count;
  }
  if (count == 0) {
    throw UsageError("--fp8-format: no linear layer of the model has sizes that are multiples of " +
                     std::to_string(multiple) + "; leave it out");
  }
  return count;
}

}  // namespace megashard
