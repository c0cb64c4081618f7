#include "framework/training/loss_scale.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <utility>

#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/value_tensors.h"

namespace megashard {
namespace {

constexpr const char* kScale = "scale";
constexpr const char* kGrowthTracker = "growth_tracker";
constexpr const char* kHysteresisTracker = "hysteresis_tracker";

std::optional<GradScaler::State> saved_state(const Value* optimizer) {
  const auto* fields = optimizer == nullptr ? nullptr : optimizer->get_if<Dict>();
  const Value* saved = fields == nullptr ? nullptr : fields->find(kGradScalerKey);
  const auto* values = saved == nullptr ? nullptr : saved->get_if<Dict>();
  if (values == nullptr || values->entries.empty()) return std::nullopt;  // Megatron's constant one
  const auto tensor = tensor_in(values->at(kScale));
  TORCH_CHECK_VALUE(!tensor || tensor->numel() == 1, "the checkpoint's loss scale has ", tensor ? tensor->numel() : 0,
                    " numbers instead of one");
  const GradScaler::State state{.scale = tensor ? tensor->item().toDouble() : values->at(kScale).as_double(),
                                .growth_tracker = values->at(kGrowthTracker).as_int(),
                                .hysteresis_tracker = values->at(kHysteresisTracker).as_int()};
  TORCH_CHECK_VALUE(state.scale > 0 && std::isfinite(state.scale), "the checkpoint's loss scale is ", state.scale);
  return state;
}

bool is_dynamic(const GradScaler* scaler) { return scaler != nullptr && scaler->is_dynamic(); }

}  // namespace

std::optional<GradScaler::Options> scaler_options(const Arguments& arguments) {
  if (arguments.has_constant_loss_scale())
    return GradScaler::Options{.initial_scale = *arguments.loss_scale, .is_dynamic = false};
  if (!arguments.gradients_in_fp16) return std::nullopt;
  return GradScaler::Options{.initial_scale = arguments.initial_loss_scale,
                             .growth_interval = arguments.loss_scale_window,
                             .min_scale = arguments.min_loss_scale,
                             .hysteresis = arguments.hysteresis};
}

std::unique_ptr<GradScaler> make_scaler(const std::optional<GradScaler::Options>& options,
                                        const std::vector<at::Tensor>& parameters) {
  if (!options) return nullptr;
  return std::make_unique<GradScaler>(*options, parameters.empty() ? c10::kCPU : parameters.front().device());
}

void save_loss_scale(const GradScaler* scaler, Dict& optimizer) {
  if (!is_dynamic(scaler)) return;
  const auto state = scaler->state();
  Dict values;
  values.set(kScale, tensor_value(at::full({1}, state.scale, at::kFloat)));
  values.set(kGrowthTracker, state.growth_tracker);
  values.set(kHysteresisTracker, state.hysteresis_tracker);
  optimizer.set(kGradScalerKey, std::move(values));
}

std::optional<GradScaler::State> loss_scale_to_load(const GradScaler* scaler, const Value* optimizer,
                                                    std::vector<std::string>& lines) {
  auto saved = saved_state(optimizer);
  if (is_dynamic(scaler)) {
    if (!saved) lines.push_back("the checkpoint has no dynamic loss scale: it starts from its first value");
    return saved;
  }
  if (saved) lines.push_back("the checkpoint's dynamic loss scale is left, since this run has none");
  return std::nullopt;
}

}  // namespace megashard
