#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>

#include "framework/modules/weight_init_mixin.h"

namespace megashard {

/// y = x W^T + b. Unlike torch::nn::Linear it starts without values: init_weights() or a checkpoint
/// gives them, and a start does not pay for random numbers that nobody reads.
class Linear : public torch::nn::Module, public SelfInitializing {
 public:
  struct Options {
    int64_t in = 0;
    int64_t out = 0;
    bool bias = false;
    double init_scale = 1;  ///< on the std of the initialisation
  };
  explicit Linear(const Options& options);

  at::Tensor forward(const at::Tensor& x);  // [..., in] -> [..., out]
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "Linear"; }

  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out]

 private:
  double init_scale_;
};

/// Rows of a table; starts without values, as Linear. A padding row gets no gradient and starts at
/// zero.
class Embedding : public torch::nn::Module, public SelfInitializing {
 public:
  Embedding(int64_t rows, int64_t width, std::optional<int64_t> padding_index = std::nullopt);

  /// indices [...] int64 -> [..., width]. On a CPU, an index outside the table is an error that
  /// names it.
  at::Tensor forward(const at::Tensor& indices);
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "Embedding"; }

  at::Tensor weight;  // [rows, width]

 private:
  int64_t rows_;
  std::optional<int64_t> padding_index_;
};

}  // namespace megashard
