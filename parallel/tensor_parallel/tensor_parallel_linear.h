#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include "parallel/collectives/device_mesh.h"

namespace megashard {

struct ColumnParallelLinearOptions {
  int64_t in_features = 0;
  int64_t out_features = 0;  ///< of the whole model; a multiple of the mesh's ranks
  DeviceMeshPtr mesh{};      ///< 1-D
  bool bias = true;
  bool gather_output = false;  ///< true: every rank returns all out_features
};

/// y = x A^T + b with A, b cut by output features over the ranks of a tensor-parallel mesh
/// (megatron.core ColumnParallelLinear; ColwiseParallel of PyTorch over a Linear). Input [...,
/// in_features], the same on all ranks; output [..., out_features / ranks]. Weights start as those
/// of torch::nn::Linear of the whole sizes, from the same draws, at every number of ranks.
class ColumnParallelLinearImpl : public torch::nn::Cloneable<ColumnParallelLinearImpl> {
 public:
  explicit ColumnParallelLinearImpl(ColumnParallelLinearOptions options);
  void reset() override;
  void reset_parameters();  ///< also after fully_shard
  at::Tensor forward(const at::Tensor& input);

  ColumnParallelLinearOptions options;
  at::Tensor weight;  ///< [out_features / ranks, in_features]
  at::Tensor bias;    ///< [out_features / ranks], undefined without
};
TORCH_MODULE(ColumnParallelLinear);

struct RowParallelLinearOptions {
  int64_t in_features = 0;  ///< of the whole model; a multiple of the mesh's ranks
  int64_t out_features = 0;
  DeviceMeshPtr mesh{};  ///< 1-D
  bool bias = true;
  bool input_is_parallel = true;  ///< false: every rank is given all in_features
};

/// y = sum over ranks of x_r A_r^T, + b, with A cut by input features and b on all ranks
/// (megatron.core RowParallelLinear; RowwiseParallel of PyTorch). Input [..., in_features / ranks];
/// output [..., out_features], the same on all ranks. Weights start as in ColumnParallelLinear.
class RowParallelLinearImpl : public torch::nn::Cloneable<RowParallelLinearImpl> {
 public:
  explicit RowParallelLinearImpl(RowParallelLinearOptions options);
  void reset() override;
  void reset_parameters();  ///< also after fully_shard
  at::Tensor forward(const at::Tensor& input);

  RowParallelLinearOptions options;
  at::Tensor weight;  ///< [out_features, in_features / ranks]
  at::Tensor bias;    ///< [out_features], undefined without
};
TORCH_MODULE(RowParallelLinear);

}  // namespace megashard
