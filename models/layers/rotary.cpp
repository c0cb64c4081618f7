#include "models/layers/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <c10/core/InferenceMode.h>

#include <numbers>

#include "parallel/copies/on_device.h"

namespace megashard {

at::Tensor inverse_frequencies(const RotaryConfig& config, int64_t rotary_dim) {
  const auto exponents = at::arange(0, rotary_dim, 2, at::TensorOptions().dtype(at::kFloat)) / rotary_dim;
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

namespace {

std::vector<int64_t> axes_of_pairs(const RotaryConfig& config, int64_t pairs) {
  std::vector<int64_t> axes;
  const auto& section = config.mrope_section;
  if (section.empty()) return axes;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    int64_t axis = pair % 3;
    if (config.mrope_interleaved) {
      if (pair >= 3 * section[static_cast<size_t>(axis)]) axis = 0;
    } else {
      axis = pair < section[0] ? 0 : pair < section[0] + section[1] ? 1 : 2;
    }
    axes.push_back(axis);
  }
  return axes;
}

}  // namespace

RotaryEmbedding::RotaryEmbedding(const DecoderConfig& config, const RotaryConfig& rotary)
    : class_name_(config.names.rotary),
      config_(rotary),
      rotary_dim_(static_cast<int64_t>(static_cast<double>(config.head_dim) * rotary.fraction)),
      axis_of_pair_(axes_of_pairs(rotary, rotary_dim_ / 2)) {}

RotaryTables RotaryEmbedding::tables(const at::Tensor& positions, const at::Tensor& hidden) {
  if (!frequencies_.defined() || frequencies_.device() != hidden.device()) {
    frequencies_ = on_device(inverse_frequencies(config_, rotary_dim_), hidden.device());
    axes_ = on_device(at::tensor(axis_of_pair_, at::kLong), hidden.device());
  }
  auto by_pair = positions.unsqueeze(-1);  // [B, T, 1]
  if (positions.dim() == 3) {
    TORCH_CHECK(!axis_of_pair_.empty() && positions.size(0) == 3, "position ids ", positions.sizes(),
                " must be [B, T], or [3, B, T] for a model with M-RoPE");
    by_pair = positions.index_select(0, axes_).permute({1, 2, 0});  // [B, T, R/2]
  }
  const auto angles = by_pair.to(at::kFloat) * frequencies_;
  return {angles.cos().to(hidden.scalar_type()), angles.sin().to(hidden.scalar_type())};
}

RotaryTables RotaryEmbedding::forward(const at::Tensor& hidden, const at::Tensor& position_ids, int64_t length) {
  const c10::InferenceMode no_inference(false);  // tables outlive this call, and a training step may use them
  const at::NoGradGuard no_grad;
  if (position_ids.defined()) return tables(on_device(position_ids, hidden.device()), hidden);
  const auto& cos = cached_.cos;
  const bool fits = cos.defined() && cos.size(0) == length && cos.scalar_type() == hidden.scalar_type() &&
                    cos.device() == hidden.device();
  if (!fits) cached_ = tables(at::arange(length, hidden.options().dtype(at::kLong)), hidden);
  return cached_;
}

}  // namespace megashard
