#include "framework/training/latent_sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <utility>

#include "framework/objectives/denoising.h"

namespace megashard {

at::Tensor predictions(MultiModalModule& model, Batch whole, const InferenceRanks& ranks) {
  const c10::NoGradGuard no_grad;
  whole.sequence = ranks.sequence.with_length(whole.length());
  whole.take(kTargets);
  Batch mine = rows_of_rank(to_device(model.prepared(std::move(whole)), ranks.device));
  const SequenceShard shard = mine.sequence;
  const at::Tensor own = model(std::move(mine)).predictions;
  TORCH_CHECK(own.defined(), model.class_name(), " returned no predictions for a batch without targets");
  return whole_of_rows(own, 2, shard).cpu();
}

at::Tensor sample_latents(MultiModalModule& model, Batch whole, const LatentSampling& options,
                          const InferenceRanks& ranks) {
  const c10::NoGradGuard no_grad;
  const int64_t rows = whole.rows();
  whole.set(kTimesteps, at::full({rows}, 1000, at::kFloat), Axis::kRow);
  make_objective("flow-matching", {})->prepare(whole);  // latents become noise
  Batch without_text = whole;
  const bool is_guided = options.guidance_scale != 1;
  if (is_guided) {
    const auto for_all = [&](const at::Tensor& each) {
      return each.defined() ? each.unsqueeze(0).expand({rows, -1, -1}).contiguous() : each;
    };
    TORCH_CHECK(options.empty_text_features.defined(), "guidance needs the text features of the empty prompt");
    without_text.set(kTextFeatures, for_all(options.empty_text_features), Axis::kRow);
    if (options.empty_text_mask.defined())
      without_text.set(kTextMask, options.empty_text_mask.unsqueeze(0).expand({rows, -1}).contiguous(), Axis::kRow);
  }
  const at::Tensor is_clean = whole.find(kCleanPatches);
  at::Tensor latents = whole.at(kLatents);
  const auto sigma_at = [&](int64_t step) {
    const double sigma = 1 - static_cast<double>(step) / static_cast<double>(options.steps);
    return shifted_sigma(sigma, options.shift);
  };
  for (int64_t step = 0; step < options.steps; ++step) {
    const auto velocity_for = [&](Batch batch) {
      batch.set(kLatents, latents);
      batch.set(kTimesteps, at::full({rows}, 1000 * sigma_at(step), at::kFloat), Axis::kRow);
      return predictions(model, std::move(batch), ranks);
    };
    at::Tensor velocity = velocity_for(whole);
    if (is_guided) {
      const at::Tensor free = velocity_for(without_text);
      velocity = free + options.guidance_scale * (velocity - free);
    }
    const at::Tensor next = latents + (sigma_at(step + 1) - sigma_at(step)) * velocity;
    latents = is_clean.defined() ? at::where(is_clean, latents, next) : next;
  }
  return latents;
}

}  // namespace megashard
