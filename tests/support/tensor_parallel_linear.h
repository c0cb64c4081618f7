#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include "parallel/collectives/device_mesh.h"

namespace megashard {

struct ColumnParallelLinearOptions {
  int64_t in_features = 0;
  int64_t out_features = 0;  ///< of the whole layer; a multiple of the number of the mesh's ranks
  DeviceMeshPtr mesh{};      ///< 1-D
  bool bias = true;
  bool gather_output = false;  ///< true: every rank returns all out_features
};

/// y = x A^T + b with A and b sharded by output features over a tensor-parallel mesh (megatron.core
/// ColumnParallelLinear; PyTorch's ColwiseParallel over a Linear). Input [..., in_features], the same on all ranks;
/// output [..., out_features / ranks]. Initialised like a torch::nn::Linear of the whole sizes, with the same random
/// draws for any number of ranks.
class ColumnParallelLinearImpl : public torch::nn::Cloneable<ColumnParallelLinearImpl> {
 public:
  explicit ColumnParallelLinearImpl(ColumnParallelLinearOptions options);
  void reset() override;
  void reset_parameters();  ///< also after fully_shard
  at::Tensor forward(const at::Tensor& input);

  ColumnParallelLinearOptions options;
  at::Tensor weight;  ///< [out_features / ranks, in_features]
  at::Tensor bias;    ///< [out_features / ranks]; undefined without bias
};
TORCH_MODULE(ColumnParallelLinear);

struct RowParallelLinearOptions {
  int64_t in_features = 0;  ///< of the whole layer; a multiple of the number of the mesh's ranks
  int64_t out_features = 0;
  DeviceMeshPtr mesh{};  ///< 1-D
  bool bias = true;
  bool input_is_parallel = true;  ///< false: every rank gets all in_features
};

/// y = (sum over ranks of x_r A_r^T) + b, with A sharded by input features and b on all ranks (megatron.core
/// RowParallelLinear; PyTorch's RowwiseParallel). Input [..., in_features / ranks]; output [..., out_features], the
/// same on all ranks. Initialised as in ColumnParallelLinear.
class RowParallelLinearImpl : public torch::nn::Cloneable<RowParallelLinearImpl> {
 public:
  explicit RowParallelLinearImpl(RowParallelLinearOptions options);
  void reset() override;
  void reset_parameters();  ///< also after fully_shard
  at::Tensor forward(const at::Tensor& input);

  RowParallelLinearOptions options;
  at::Tensor weight;  ///< [out_features, in_features / ranks]
  at::Tensor bias;    ///< [out_features]; undefined without bias
};
TORCH_MODULE(RowParallelLinear);

}  // namespace megashard
