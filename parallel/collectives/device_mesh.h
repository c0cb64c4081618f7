#pragma once

#include <c10/core/Device.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Ranks of a world as an n-D array in row-major order, with one process group per dimension
/// (torch.distributed.DeviceMesh). Coordinates are computed locally; creating the groups is collective.
class DeviceMesh {
 public:
  /// Collective over `world`, whose size must be the product of `shape`. Names are optional for 1-D meshes only.
  DeviceMesh(ProcessGroupPtr world, std::vector<int> shape, std::vector<std::string> dim_names = {});
  /// From existing groups, one per dimension (DeviceMesh.from_group).
  DeviceMesh(std::vector<ProcessGroupPtr> groups, std::vector<std::string> dim_names);

  int ndim() const { return static_cast<int>(groups_.size()); }
  int size() const;  ///< number of ranks in the mesh
  int size(int dim) const { return groups_[dim]->size(); }
  int coordinate(int dim) const { return groups_[dim]->rank(); }
  const ProcessGroupPtr& group(int dim) const { return groups_[dim]; }
  const ProcessGroupPtr& group(const std::string& dim_name) const;
  /// The named dimensions in the given order, with this mesh's groups (DeviceMesh["dp", "tp"]). Not collective.
  std::shared_ptr<const DeviceMesh> submesh(const std::vector<std::string>& dim_names) const;
  /// One group over the named dimensions, its ranks in the mesh's order (DeviceMesh._flatten); without names the group
  /// of this rank alone. The first call is collective over the mesh. Throws for several dimensions of a mesh that was
  /// made from existing groups.
  ProcessGroupPtr flatten(const std::vector<std::string>& dim_names) const;
  const std::vector<std::string>& dim_names() const { return dim_names_; }
  c10::DeviceType device_type() const { return groups_[0]->device_type(); }
  c10::Device device() const { return device_; }  ///< device of this rank's tensors, on any thread
  std::string describe() const;                   ///< "(Replicate=2, Shard=4)"

 private:
  int dim_of(const std::string& dim_name) const;

  ProcessGroupPtr world_;  // null: from existing groups
  std::vector<ProcessGroupPtr> groups_;
  std::vector<std::string> dim_names_;
  c10::Device device_;
  mutable std::map<std::vector<std::string>, ProcessGroupPtr> flattened_;
};

using DeviceMeshPtr = std::shared_ptr<const DeviceMesh>;

}  // namespace megashard
