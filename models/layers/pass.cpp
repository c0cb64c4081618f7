#include "models/layers/pass.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "parallel/copies/on_device.h"

namespace megashard {

namespace {

using Kind = RotaryConfig::Kind;

at::Tensor exponents(int64_t rotary_dim) {
  return at::arange(0, rotary_dim, 2, at::TensorOptions().dtype(at::kFloat)) / rotary_dim;
}

at::Tensor plain_frequencies(const RotaryConfig& config, int64_t rotary_dim) {
  return at::pow(at::Scalar(config.theta), exponents(rotary_dim)).reciprocal();
}

/// The pairs behind `fraction` do not turn.
at::Tensor proportional_frequencies(const RotaryConfig& config, const at::Tensor& plain) {
  auto frequencies = plain / config.factor;
  const auto turning = static_cast<int64_t>(config.fraction * static_cast<double>(plain.size(0)));
  frequencies.narrow(0, turning, plain.size(0) - turning).zero_();
  return frequencies;
}

at::Tensor divided_by_pair(const at::Tensor& plain, const std::vector<double>& factors) {
  return plain / at::tensor(factors, at::TensorOptions().dtype(at::kFloat));
}

/// Long wavelengths are stretched by the factor, short ones kept, those between interpolated.
at::Tensor llama3_frequencies(const RotaryConfig& config, const at::Tensor& plain) {
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

/// As Llama 3's by another criterion: pairs up to the one with beta_fast turns in the original positions are kept,
/// those from the one with beta_slow turns on are stretched.
at::Tensor yarn_frequencies(const RotaryConfig& config, const at::Tensor& plain, int64_t rotary_dim) {
  const auto channels = static_cast<double>(rotary_dim);
  const auto pair_of = [&](double turns) {
    return channels * std::log(config.original_max_positions / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(config.theta));
  };
  double low = pair_of(config.beta_fast), high = pair_of(config.beta_slow);
  if (config.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, channels - 1);
  if (low == high) high += 0.001;
  const auto pairs = at::arange(rotary_dim / 2, at::TensorOptions().dtype(at::kFloat));
  const auto kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1);
  return plain / config.factor * (1 - kept) + plain * kept;
}

}  // namespace

at::Tensor inverse_frequencies(const RotaryConfig& config, int64_t rotary_dim) {
  const auto plain = plain_frequencies(config, rotary_dim);
  switch (config.kind) {
    case Kind::kLinear:
      return plain / config.factor;
    case Kind::kLlama3:
      return llama3_frequencies(config, plain);
    case Kind::kYarn:
      return yarn_frequencies(config, plain, rotary_dim);
    case Kind::kLongrope:
      return divided_by_pair(plain, config.short_factor);
    case Kind::kProportional:
      return proportional_frequencies(config, plain);
    case Kind::kDefault:
    case Kind::kDynamic:
      break;
  }
  return plain;
}

namespace {

int64_t channels_in_tables(const RotaryConfig& config, int64_t head_dim) {
  if (config.head_dim > 0) head_dim = config.head_dim;
  if (config.kind == Kind::kProportional) return head_dim;
  return static_cast<int64_t>(static_cast<double>(head_dim) * config.fraction);
}

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

RotaryEmbedding::RotaryEmbedding(std::string class_name, int64_t head_dim, const RotaryConfig& rotary)
    : class_name_(std::move(class_name)),
      config_(rotary),
      rotary_dim_(channels_in_tables(rotary, head_dim)),
      axis_of_pair_(axes_of_pairs(rotary, rotary_dim_ / 2)) {}

at::Tensor RotaryEmbedding::frequencies(const at::Tensor& end) const {
  if (!depends_on_length()) return frequencies_;
  if (config_.kind == Kind::kLongrope)
    return at::where(end.gt(config_.original_max_positions), long_frequencies_, frequencies_);
  const double longest = config_.original_max_positions, factor = config_.factor;
  const auto channels = static_cast<double>(rotary_dim_);
  const auto stretch = end.to(at::kFloat).clamp_min(longest) * factor / longest - (factor - 1);
  return (stretch.pow(channels / (channels - 2)) * config_.theta).pow(exponents_).reciprocal();
}

RotaryTables RotaryEmbedding::tables(const at::Tensor& positions, const at::Tensor& hidden, const at::Tensor& end) {
  if (!frequencies_.defined() || frequencies_.device() != hidden.device()) {
    frequencies_ = on_device(inverse_frequencies(config_, rotary_dim_), hidden.device());
    axes_ = on_device(at::tensor(axis_of_pair_, at::kLong), hidden.device());
    if (depends_on_length()) exponents_ = on_device(exponents(rotary_dim_), hidden.device());
    if (config_.kind == Kind::kLongrope)
      long_frequencies_ =
          on_device(divided_by_pair(plain_frequencies(config_, rotary_dim_), config_.long_factor), hidden.device());
  }
  auto by_pair = positions.unsqueeze(-1);  // [B, T, 1]
  if (positions.dim() == 3) {
    TORCH_CHECK(!axis_of_pair_.empty() && positions.size(0) == 3, "position ids ", positions.sizes(),
                " must be [B, T], or [3, B, T] for a model with M-RoPE");
    by_pair = positions.index_select(0, axes_).permute({1, 2, 0});  // [B, T, R/2]
  }
  const auto angles = by_pair.to(at::kFloat) * frequencies(end);
  auto cos = angles.cos(), sin = angles.sin();
  if (config_.magnitude != 1) {
    cos = cos * config_.magnitude;
    sin = sin * config_.magnitude;
  }
  return {cos.to(hidden.scalar_type()), sin.to(hidden.scalar_type())};
}

RotaryTables RotaryEmbedding::forward(const at::Tensor& hidden, const at::Tensor& position_ids, int64_t length,
                                      const at::Tensor& end) {
  const c10::InferenceMode no_inference(false);  // tables are cached, and a training step may use them
  const at::NoGradGuard no_grad;
  const auto longs = hidden.options().dtype(at::kLong);
  const auto behind_last = [&] {
    if (!depends_on_length() || end.defined()) return end;
    return at::full({}, length, longs);
  };
  if (position_ids.defined()) return tables(on_device(position_ids, hidden.device()), hidden, behind_last());
  const auto& cos = cached_.cos;
  const bool fits = cos.defined() && cos.size(0) == length && cos.scalar_type() == hidden.scalar_type() &&
                    cos.device() == hidden.device();
  if (!fits) cached_ = tables(at::arange(length, longs), hidden, behind_last());
  return cached_;
}

namespace {

at::Tensor ends_of(const std::vector<int64_t>& lengths) {
  const at::Tensor ends = at::empty({std::ssize(lengths) + 1}, at::TensorOptions(at::kInt).device(at::kCPU));
  auto* end = ends.mutable_data_ptr<int32_t>();
  *end = 0;
  for (const int64_t length : lengths) {
    end[1] = end[0] + static_cast<int32_t>(length);
    ++end;
  }
  return ends;
}

at::Tensor begins_of(const std::vector<int64_t>& lengths, int64_t rows, int64_t row_length) {
  const at::Tensor begins = at::empty({rows, row_length}, at::TensorOptions(at::kLong).device(at::kCPU));
  auto* begin = begins.mutable_data_ptr<int64_t>();
  int64_t token = 0;
  for (const int64_t length : lengths) {
    std::fill_n(begin + token, length, token % row_length);
    token += length;
  }
  return begins;
}

}  // namespace

at::Tensor Documents::token_begins(int64_t rows, int64_t length, c10::Device device) const {
  if (begins.defined()) return begins;
  const auto tokens = at::arange(rows * length, at::TensorOptions(at::kInt).device(device));
  const auto document = at::searchsorted(ends, tokens, /*out_int32=*/false, /*right=*/true) - 1;
  return ends.index_select(0, document).to(at::kLong).remainder(length).view({rows, length});
}

std::shared_ptr<const Documents> Documents::of(const at::Tensor& lengths, int64_t rows, int64_t length, bool in_ring,
                                               c10::Device device) {
  if (!lengths.defined()) return nullptr;
  TORCH_CHECK(lengths.is_cpu() && lengths.dim() == 1 && lengths.scalar_type() == at::kLong,
              "document_lengths must be int64 of one dimension in host memory, got ", lengths.scalar_type(), " ",
              lengths.sizes(), " on ", lengths.device());
  const auto dense = lengths.contiguous();
  const auto* first = dense.const_data_ptr<int64_t>();
  auto documents = std::make_shared<Documents>();
  documents->lengths.assign(first, first + dense.numel());
  int64_t tokens = 0;
  for (const int64_t each : documents->lengths) {
    TORCH_CHECK(each > 0 && tokens % length + each <= length, "document_lengths ", documents->lengths,
                " are not those of rows of ", length, " tokens: a document ends with its row");
    tokens += each;
    documents->longest = std::max(documents->longest, each);
  }
  TORCH_CHECK(tokens == rows * length, "document_lengths are of ", tokens, " tokens, but there are ", rows, " rows of ",
              length);
  if (in_ring || device.is_cpu()) {
    documents->begins = on_device(begins_of(documents->lengths, rows, length), device);
  } else {
    documents->ends = on_device(ends_of(documents->lengths), device);
  }
  return documents;
}

at::Tensor chunked_lengths(const at::Tensor& lengths, int64_t rows, int64_t length, int64_t chunk) {
  std::vector<int64_t> pieces;
  const auto cut = [&](int64_t document) {
    for (int64_t begin = 0; begin < document; begin += chunk) pieces.push_back(std::min(chunk, document - begin));
  };
  if (lengths.defined()) {
    const auto dense = lengths.contiguous();
    for (int64_t i = 0; i < dense.numel(); ++i) cut(dense.const_data_ptr<int64_t>()[i]);
  } else {
    for (int64_t row = 0; row < rows; ++row) cut(length);
  }
  return at::tensor(pieces, at::kLong);
}

at::Tensor query_factors(const QueryTemperature& temperature, const at::Tensor& positions) {
  const auto turns = ((positions + temperature.offset).to(at::kFloat) / temperature.length).floor();
  return (turns + 1).log() * temperature.beta + 1;
}

}  // namespace megashard
