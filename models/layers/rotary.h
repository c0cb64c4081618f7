#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "models/config/decoder_config.h"

namespace megashard {

/// Cosines and sines of the angles, computed once a forward and shared by all layers. Undefined: no
/// rotation.
struct RotaryTables {
  at::Tensor cos;  // [T, R/2] or [B, T, R/2]
  at::Tensor sin;

  template <class F>
  void visit_tensors(F&& f) {
    f(cos);
    f(sin);
  }
};

/// Rotary angles. It owns no parameter and no buffer: the frequencies follow from the
/// configuration, so there is nothing to store, to shard or to materialise. They are kept on the
/// device from one forward to the next, and so are the tables of the positions 0 .. T-1.
class RotaryEmbedding : public torch::nn::Module {
 public:
  explicit RotaryEmbedding(const DecoderConfig& config) : RotaryEmbedding(config, config.rotary) {}
  RotaryEmbedding(const DecoderConfig& config, const RotaryConfig& rotary);

  /// Tables of the dtype and on the device of `hidden`; position_ids [B, T], with M-RoPE also
  /// [3, B, T] (time, height, width), or undefined for 0 .. length-1. `length`: of the sequence,
  /// whose frequencies may depend on it (depends_on_length); `end` [] int64, where positions were
  /// given: one more than the last of them in the whole batch.
  RotaryTables forward(const at::Tensor& hidden, const at::Tensor& position_ids, int64_t length,
                       const at::Tensor& end = {});
  bool depends_on_length() const { return config_.depends_on_length(); }
  std::string class_name() const { return class_name_; }

 private:
  at::Tensor frequencies(const at::Tensor& end) const;
  RotaryTables tables(const at::Tensor& positions, const at::Tensor& hidden, const at::Tensor& end);

  std::string class_name_;
  RotaryConfig config_;
  int64_t rotary_dim_;
  std::vector<int64_t> axis_of_pair_;  // M-RoPE: the position id that turns each channel pair
  // On the device of the last forward:
  at::Tensor frequencies_, long_frequencies_, exponents_, axes_;
  RotaryTables cached_;
};

/// 1 / (theta^(2 i / R)), scaled as the configuration asks; [R/2] fp32 on the CPU. Where they depend
/// on the sequence's length, those of short ones.
at::Tensor inverse_frequencies(const RotaryConfig& config, int64_t rotary_dim);

}  // namespace megashard
