#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "parallel/collectives/device_mesh.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// A parameter that is this rank's piece of a tensor-parallel weight (in PyTorch, a DTensor on the
/// TP mesh).
struct TensorParallelLayout {
  ProcessGroupPtr group;
  std::string dim_name;  ///< of the group's mesh dimension
  Placement placement;   ///< shard(dim): pieces of equal size, in rank order; or replicate()
};

/// Declares `parameter`, whose sizes are those of the piece, a tensor-parallel weight over the 1-D
/// `mesh`. fully_shard then shards the piece, and sizes, offsets and checkpoints speak of the whole
/// model's weight. To be called before fully_shard; lasts as long as the tensor, through set_data
/// and Module::to. The mesh's group is not kept alive by it: modules keep their mesh.
void set_tensor_parallel(const at::Tensor& parameter, const DeviceMeshPtr& mesh, Placement placement);
std::optional<TensorParallelLayout> tensor_parallel_layout(const at::Tensor& parameter);

/// This rank's piece, of sizes `piece_sizes`, of the whole model's weight; a view. A tensor that
/// has the piece's sizes already is returned as it is.
at::Tensor tensor_parallel_slice(const at::Tensor& whole, at::IntArrayRef piece_sizes,
                                 const TensorParallelLayout& layout);

/// The dimensions of an FSDP mesh, then the tensor-parallel one.
DeviceMeshPtr joint_mesh(const DeviceMeshPtr& fsdp_mesh, const TensorParallelLayout& layout);
/// A part of a tensor-parallel piece (sizes and offsets within the piece) as a part of the whole
/// model's weight, on the joint mesh. Where both shard one dimension, FSDP's placement becomes a
/// strided one.
ShardedTensor in_whole_model(ShardedTensor part, const TensorParallelLayout& layout, DeviceMeshPtr joint);
/// The whole of a parameter that is not under fully_shard, or its tensor-parallel piece.
ShardedTensor unsharded_view(const at::Tensor& parameter);

/// Throws if FSDP over `fsdp_mesh` cannot shard the piece: another device type, or meshes that are
/// not dimensions of one.
void check_tensor_parallel(const std::string& name, const at::Tensor& parameter, const DeviceMesh& fsdp_mesh);

}  // namespace megashard
