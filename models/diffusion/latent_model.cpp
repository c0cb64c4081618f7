#include "models/diffusion/latent_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "models/diffusion/latent_parts.h"
#include "models/lora/lora.h"
#include "parallel/sequence_parallel/ulysses.h"

namespace megashard {

LatentModel::LatentModel(LatentSpec spec) : spec_(std::move(spec)) { weight_init().std = kLatentInitStd; }

at::Tensor LatentModel::channels_first(const at::Tensor& prediction) const {
  const int64_t channels = spec_.patches.channels, box = spec_.patches.values() / channels;
  const auto wide = prediction.to(at::kFloat);
  return spec_.channels_last ? wide.unflatten(2, {box, channels}).permute({3, 2, 0, 1})
                             : wide.unflatten(2, {channels, box}).permute({2, 3, 0, 1});
}

ModelOutput LatentModel::forward(Batch input) {
  check_input(input);
  return output_of(input, predict(input));
}

void LatentModel::check_input(const Batch& input) const {
  const auto& latents = input.at(kLatents);
  TORCH_CHECK(latents.dim() == 3 && latents.size(0) == spec_.patches.values(), class_name(), " takes latents [",
              spec_.patches.values(), ", B, T], got ", latents.sizes());
  TORCH_CHECK(spec_.takes_second_text || !input.find(kSecondText).defined(), class_name(),
              " takes features of one text encoder, and the data have those of two: write the features for this model");
  TORCH_CHECK(spec_.takes_sounds || !input.find(kSounds).defined(), class_name(),
              " takes no sounds, and the data have some: write the features for this model");
}

ModelOutput LatentModel::output_of(const Batch& input, const at::Tensor& prediction) const {
  const auto& latents = input.at(kLatents);
  const auto predicted = channels_first(prediction);
  const auto targets = input.find(kTargets);
  if (!targets.defined()) return {.predictions = predicted.flatten(0, 1).contiguous()};
  TORCH_CHECK(targets.sizes() == latents.sizes(), "targets have the sizes of the latents, ", latents.sizes(), ", got ",
              targets.sizes());
  const auto difference = predicted - targets.to(at::kFloat).view(predicted.sizes());
  return {.token_losses = difference.square().mean(at::IntArrayRef{0, 1})};
}

at::Tensor LatentModel::with_conditions(const Batch& input, int64_t in_values) const {
  auto patches = input.at(kLatents);
  const auto conditions = input.find(kConditions);
  const int64_t wanted = in_values - patches.size(0), given = conditions.defined() ? conditions.size(0) : 0;
  TORCH_CHECK(given == wanted, class_name(), " takes ", wanted, " values of conditions for a patch, and the data have ",
              given, ": give those of its task (text to video has none)");
  if (conditions.defined()) patches = at::cat({patches, conditions.to(patches.scalar_type())});
  return patches.permute({1, 2, 0}).contiguous();
}

void LatentModel::check_sequence_ranks(int64_t ranks) const {
  check_ulysses_heads(class_name(), spec_.num_heads, spec_.num_heads, ranks);
}

bool LatentModel::keeps_fp32(const std::string& name) const {
  std::istringstream path(name);
  for (std::string part; std::getline(path, part, '.');) {
    if (std::ranges::count(spec_.in_fp32, part) > 0) return true;
  }
  return false;
}

WeightMap LatentModel::weight_map() const {
  WeightMap map{.renamings = spec_.renamings};
  add_adapter_forms(*this, map);
  return map;
}

at::Tensor key_mask_of(const Batch& input) {
  const auto mask = input.token_mask();
  if (!mask.defined() || input.sequence.is_whole()) return mask;
  return whole_of_rows(mask, 1, input.sequence);
}

}  // namespace megashard
