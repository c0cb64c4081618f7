#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "framework/arguments/optimizer_arguments.h"

namespace megashard {

/// The numbers of Megatron's --muon-* flags (NVIDIA's emerging_optimizers).
struct NewtonSchulzOptions {
  int64_t num_ns_steps = 5;
  MuonCoefficients coefficients = MuonCoefficients::kQuintic;
  MuonScaleMode scale_mode = MuonScaleMode::kSpectral;
  double extra_scale_factor = 1;
  bool tf32 = true;  ///< a GPU may round the factors of its products (--muon-fp32-matmul-prec medium, high)
};

/// The nearest orthogonal matrix of a whole fp32 matrix, scaled by its sizes. Iterates X <- a X + (b A + c A A) X with
/// A = X X^T, on the side that makes A small.
at::Tensor orthogonalized(const at::Tensor& matrix, const NewtonSchulzOptions& options);

/// The same of a matrix that holds several projections: in each group of sum(split_shapes) rows the first
/// split_shapes[0] rows are of the first one, and so on. Each is a matrix of its own. None: one projection.
at::Tensor orthogonalized(const at::Tensor& matrix, const std::vector<int64_t>& split_shapes,
                          const NewtonSchulzOptions& options);

}  // namespace megashard
