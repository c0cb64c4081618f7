#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "framework/modules/adapters.h"

namespace megashard {

/// Computes a linear layer in another way than x W^T + b: in fp8.
class LinearCompute {
 public:
  virtual ~LinearCompute() = default;
  /// x [..., in], weight [out, in], bias [out] or undefined -> [..., out]
  virtual at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) = 0;
};

/// Adds scale * lora_b(lora_a(dropout(x))) to a linear layer (PEFT's LoraLayer).
struct LowRankAdapter {
  at::Tensor lora_a, lora_b;  ///< parameters lora_A.weight [r, in] and lora_B.weight [out, r]; of experts [E, ...]
  double scale = 0, dropout = 0;
};

/// A module of linear layers that fp8 and LoRA change: a Linear, or the experts of a layer.
class LinearLayers : public HasAdapters {
 public:
  struct Layer {
    std::string name;               ///< in the module; empty: the module itself
    std::string parameter;          ///< of the module
    at::Tensor weight;              ///< the parameter: [out, in], of experts [E, out, in] or [E, layers, out, in]
    const LowRankAdapter* adapter;  ///< null: none
  };
  virtual std::vector<Layer> linear_layers() const = 0;
  /// Replaces x W^T + b in all layers.
  virtual void set_compute(std::shared_ptr<LinearCompute> compute) = 0;
  /// Gives the layers of these names adapters: lora_A initialised as torch's linear layers, lora_B zero.
  virtual void add_adapters(const std::vector<std::string>& names, int64_t rank, double scale, double dropout) = 0;
};

/// Bound of the uniform initialisation of lora_A: Kaiming's with a = sqrt(5).
inline double lora_init_bound(int64_t in) { return 1 / std::sqrt(static_cast<double>(in)); }

}  // namespace megashard
