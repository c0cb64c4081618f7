#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "parallel/collectives/device_mesh.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Layout of a parameter that is this rank's piece of a weight over one mesh dimension beside FSDP's: tensor-parallel
/// layers, or experts that are spread over ranks (in PyTorch, a DTensor on the TP or EP mesh).
struct TensorParallelLayout {
  ProcessGroupPtr group;
  std::string dim_name;  ///< name of the group's mesh dimension
  Placement placement;   ///< shard(dim): equal pieces in rank order; or replicate()
};

using TensorParallelLayouts = std::vector<TensorParallelLayout>;

/// Marks `parameter`, which has the piece's sizes, as a piece of a weight over the 1-D `mesh`; a further call adds a
/// further mesh dimension, or replaces that of the same name. fully_shard then shards the piece; sizes, offsets and
/// checkpoints refer to the whole model's weight. Call before fully_shard. Stays with the tensor through set_data and
/// Module::to. Does not keep the mesh's group alive: modules keep their mesh.
void set_tensor_parallel(const at::Tensor& parameter, const DeviceMeshPtr& mesh, Placement placement);
/// In the order of the calls; empty for a whole weight.
TensorParallelLayouts tensor_parallel_layouts(const at::Tensor& parameter);

/// This rank's piece, of sizes `piece_sizes`, of the whole model's weight; a view. Returns a tensor that already has
/// the piece's sizes as it is.
at::Tensor tensor_parallel_slice(const at::Tensor& whole, at::IntArrayRef piece_sizes,
                                 const TensorParallelLayouts& layouts);

/// Mesh of the FSDP mesh's dimensions followed by those of the layouts.
DeviceMeshPtr joint_mesh(const DeviceMeshPtr& fsdp_mesh, const TensorParallelLayouts& layouts);
/// Translates a part of a piece (sizes and offsets within the piece) to a part of the whole model's weight on the joint
/// mesh. If FSDP and a layout shard the same dimension, FSDP's placement becomes strided.
ShardedTensor in_whole_model(ShardedTensor part, const TensorParallelLayouts& layouts, DeviceMeshPtr joint);
/// A parameter that is not under fully_shard, whole or as its piece.
ShardedTensor unsharded_view(const at::Tensor& parameter);

/// Throws if FSDP over `fsdp_mesh` cannot shard the piece: different device types, or meshes that are not dimensions of
/// one mesh.
void check_tensor_parallel(const std::string& name, const at::Tensor& parameter, const DeviceMesh& fsdp_mesh);

}  // namespace megashard
