#include "models/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>
#include <c10/core/InferenceMode.h>

#include <numbers>

namespace megashard {

at::Tensor inverse_frequencies(const RotaryConfig& config, int64_t rotary_dim) {
  const auto exponents =
      at::arange(0, rotary_dim, 2, at::TensorOptions().dtype(at::kFloat)) / rotary_dim;
  const auto plain = at::pow(at::Scalar(config.theta), exponents).reciprocal();
  if (config.kind == RotaryConfig::Kind::kDefault) return plain;
  if (config.kind == RotaryConfig::Kind::kLinear) return plain / config.factor;

  // llama3: long waves are stretched by the factor, short ones kept, those between blended.
  const auto wave = (2 * std::numbers::pi) / plain;
  const double longest_kept = config.original_max_positions / config.high_freq_factor;
  const double shortest_stretched = config.original_max_positions / config.low_freq_factor;
  const auto stretched = at::where(wave.gt(shortest_stretched), plain / config.factor, plain);
  const auto smooth = (config.original_max_positions / wave - config.low_freq_factor) /
                      (config.high_freq_factor - config.low_freq_factor);
  const auto blended = (1 - smooth) * stretched / config.factor + smooth * stretched;
  const auto between = wave.ge(longest_kept).logical_and(wave.le(shortest_stretched));
  return at::where(between, blended, stretched);
}

RotaryEmbedding::RotaryEmbedding(const DecoderConfig& config)
    : class_name_(config.names.rotary),
      config_(config.rotary),
      rotary_dim_(
          static_cast<int64_t>(static_cast<double>(config.head_dim) * config.rotary.fraction)) {}

RotaryTables RotaryEmbedding::tables(const at::Tensor& positions, const at::Tensor& hidden) const {
  const auto frequencies = inverse_frequencies(config_, rotary_dim_).to(hidden.device());
  const auto angles = positions.to(at::kFloat).unsqueeze(-1) * frequencies;
  return {angles.cos().to(hidden.scalar_type()), angles.sin().to(hidden.scalar_type())};
}

RotaryTables RotaryEmbedding::forward(const at::Tensor& hidden, const at::Tensor& position_ids) {
  const c10::InferenceMode no_inference(
      false);  // tables outlive this call, and a training step may use them
  const at::NoGradGuard no_grad;
  if (position_ids.defined()) return tables(position_ids.to(hidden.device()), hidden);
  const int64_t length = hidden.size(1);
  const auto& cos = cached_.cos;
  const bool fits = cos.defined() && cos.size(0) == length &&
                    cos.scalar_type() == hidden.scalar_type() && cos.device() == hidden.device();
  if (!fits) cached_ = tables(at::arange(length, hidden.options().dtype(at::kLong)), hidden);
  return cached_;
}

}  // namespace megashard
