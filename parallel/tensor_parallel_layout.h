#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "parallel/collectives/device_mesh.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Layout of a parameter that is this rank's piece of a tensor-parallel weight (in PyTorch, a DTensor on the TP mesh).
struct TensorParallelLayout {
  ProcessGroupPtr group;
  std::string dim_name;  ///< name of the group's mesh dimension
  Placement placement;   ///< shard(dim): equal pieces in rank order; or replicate()
};

/// Marks `parameter`, which has the piece's sizes, as a tensor-parallel weight over the 1-D `mesh`. fully_shard then
/// shards the piece; sizes, offsets and checkpoints refer to the whole model's weight. Call before fully_shard. Stays
/// with the tensor through set_data and Module::to. Does not keep the mesh's group alive: modules keep their mesh.
void set_tensor_parallel(const at::Tensor& parameter, const DeviceMeshPtr& mesh, Placement placement);
std::optional<TensorParallelLayout> tensor_parallel_layout(const at::Tensor& parameter);

/// This rank's piece, of sizes `piece_sizes`, of the whole model's weight; a view. Returns a tensor that already has
/// the piece's sizes as it is.
at::Tensor tensor_parallel_slice(const at::Tensor& whole, at::IntArrayRef piece_sizes,
                                 const TensorParallelLayout& layout);

/// Mesh of the FSDP mesh's dimensions followed by the tensor-parallel one.
DeviceMeshPtr joint_mesh(const DeviceMeshPtr& fsdp_mesh, const TensorParallelLayout& layout);
/// Translates a part of a tensor-parallel piece (sizes and offsets within the piece) to a part of the whole model's
/// weight on the joint mesh. If FSDP and tensor parallelism shard the same dimension, FSDP's placement becomes strided.
ShardedTensor in_whole_model(ShardedTensor part, const TensorParallelLayout& layout, DeviceMeshPtr joint);
/// A parameter that is not under fully_shard, whole or as its tensor-parallel piece.
ShardedTensor unsharded_view(const at::Tensor& parameter);

/// Throws if FSDP over `fsdp_mesh` cannot shard the piece: different device types, or meshes that are not dimensions of
/// one mesh.
void check_tensor_parallel(const std::string& name, const at::Tensor& parameter, const DeviceMesh& fsdp_mesh);

}  // namespace megashard
