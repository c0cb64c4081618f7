#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "models/config/decoder_config.h"

namespace megashard {

/// Cosines and sines of the angles, computed once per forward and shared by all layers. Undefined: no rotation.
struct RotaryTables {
  at::Tensor cos;  // [T, R/2] or [B, T, R/2]
  at::Tensor sin;

  template <class F>
  void visit_tensors(F&& f) {
    f(cos);
    f(sin);
  }
};

/// Rotary embedding. It has no parameters or buffers: the frequencies follow from the configuration, so nothing is
/// stored, sharded or materialised. Frequencies, and tables of the positions 0 .. T-1, are cached on the device.
class RotaryEmbedding : public torch::nn::Module {
 public:
  RotaryEmbedding(std::string class_name, int64_t head_dim, const RotaryConfig& rotary);

  /// Tables with the dtype and device of `hidden`; position_ids [B, T], with M-RoPE also [3, B, T] (time, height,
  /// width), or undefined for 0 .. length-1. `length` is that of the sequence, on which frequencies may depend
  /// (depends_on_length). `end` [] int64, with position_ids: the maximum of the whole batch plus one.
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
  std::vector<int64_t> axis_of_pair_;  // M-RoPE: the position id for each channel pair
  // On the device of the last forward.
  at::Tensor frequencies_, long_frequencies_, exponents_, axes_;
  RotaryTables cached_;
};

/// 1 / (theta^(2 i / R)), scaled by the configuration; [R/2] fp32 on the CPU. For short sequences, if the length
/// matters.
at::Tensor inverse_frequencies(const RotaryConfig& config, int64_t rotary_dim);

}  // namespace megashard
