#include "framework/objectives/denoising.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "framework/latent_columns.h"

namespace megashard {
namespace {

/// [B] fp32: the loss of a sample's patches is multiplied by it.
constexpr const char* kTimestepWeights = "timestep_weights";

/// The patches of row `row` that are no padding, [P, T].
at::Tensor patches_of(const at::Tensor& column, int64_t row, int64_t length) {
  return column.select(1, row).narrow(1, 0, length);
}

/// A video's sounds get the video's noise level, and noise that is drawn behind the video's.
class NoisySounds {
 public:
  explicit NoisySounds(Batch& batch) : clean_(batch.find(kSounds)), given_(batch.take(kSoundNoise)) {
    if (!clean_.defined()) return;
    const auto options = clean_.options().dtype(at::kFloat).pinned_memory(clean_.is_pinned());
    noisy_ = at::empty(clean_.sizes(), options);
    targets_ = at::empty(clean_.sizes(), options);
  }

  void set_row(int64_t row, const NoiseLevel& level, at::Generator& generator) const {
    if (!clean_.defined()) return;
    const at::Tensor x = clean_[row], n = given_.defined() ? given_[row] : at::randn(x.sizes(), generator);
    noisy_[row].copy_(level.latents * x + level.noise * n);
    targets_[row].copy_(level.target_latents * x + level.target_noise * n);
  }

  void add_to(Batch& batch) const {
    batch.set(kSounds, noisy_, Axis::kRow);
    batch.set(kSoundTargets, targets_, Axis::kRow, /*is_input=*/false);
  }

 private:
  at::Tensor clean_, given_, noisy_, targets_;  // [B, S, P]; undefined: there are no sounds
};

}  // namespace

double uniform_draw(at::Generator& generator) { return at::rand({}, generator, at::kDouble).item<double>(); }

std::vector<std::string> Denoising::columns() const { return {kLossMask, kTargets, kTimestepWeights}; }

void Denoising::prepare(Batch& batch) const {
  const at::Tensor clean = batch.at(kLatents), mask = batch.token_mask(), given_noise = batch.take(kNoise);
  const at::Tensor given_timesteps = batch.take(kTimesteps);
  const at::Tensor seeds = batch.at(kNoiseSeeds);
  const auto of_rows = clean.options().dtype(at::kFloat).pinned_memory(clean.is_pinned());
  const at::Tensor timesteps = at::empty({batch.rows()}, of_rows), weights = at::empty({batch.rows()}, of_rows);
  const NoisySounds sounds(batch);
  const at::Tensor noisy = at::zeros_like(clean, of_rows), targets = at::zeros_like(clean, of_rows);
  for (int64_t row = 0; row < batch.rows(); ++row) {
    at::Generator generator =
        at::detail::createCPUGenerator(static_cast<uint64_t>(seeds.const_data_ptr<int64_t>()[row]));
    const int64_t length = mask.defined() ? mask[row].sum().item<int64_t>() : batch.length();
    const NoiseLevel level =
        level_at(given_timesteps.defined() ? given_timesteps[row].item<double>() : draw_timestep(generator, length));
    const at::Tensor x = patches_of(clean, row, length);
    const at::Tensor n =
        given_noise.defined() ? patches_of(given_noise, row, length) : at::randn({x.size(0), length}, generator);
    patches_of(noisy, row, length).copy_(level.latents * x + level.noise * n);
    patches_of(targets, row, length).copy_(level.target_latents * x + level.target_noise * n);
    sounds.set_row(row, level, generator);
    timesteps.mutable_data_ptr<float>()[row] = static_cast<float>(level.timestep);
    weights.mutable_data_ptr<float>()[row] = static_cast<float>(level.weight);
  }
  const at::Tensor is_clean = batch.find(kCleanPatches);
  batch.set(kLatents, is_clean.defined() ? at::where(is_clean, clean, noisy) : noisy);
  batch.set(kTargets, targets, Axis::kToken, /*is_input=*/false);
  batch.set(kTimesteps, timesteps, Axis::kRow);
  sounds.add_to(batch);
  batch.set(kTimestepWeights, weights, Axis::kRow, /*is_input=*/false);
}

at::Tensor Denoising::weights(const Batch& batch) const {
  return batch.at(kLossMask) * batch.at(kTimestepWeights).unsqueeze(1);
}

Loss Denoising::operator()(const LossInputs& in) const {
  const at::Tensor& mask = in.batch.at(kLossMask);
  const at::Tensor sum = (in.token_losses * weights(in.batch)).sum();
  const at::Tensor errors = (in.token_losses.detach() * mask).sum(), patches = mask.sum().to(at::kDouble);
  return {.sum = sum,
          .metrics = {{.name = name_, .sum = sum.detach().to(at::kDouble), .count = patches},
                      {.name = "mse", .sum = errors.to(at::kDouble), .count = patches}}};
}

}  // namespace megashard
