#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "parallel/collectives/device_mesh.h"
#include "parallel/collectives/process_group.h"

namespace megashard::testing {

struct CollectiveCall {
  /// "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift", "allocate"
  std::string operation;
  at::ScalarType dtype;
  int64_t numel;                 ///< numel of the input
  ReduceOp op = ReduceOp::kSum;  ///< reductions only
};

/// A process group that records this rank's collectives. The log belongs to the rank and outlives the group.
class RecordingGroup : public ProcessGroup {
 public:
  RecordingGroup(ProcessGroupPtr inner, std::vector<CollectiveCall>& log)
      : ProcessGroup(inner->rank(), inner->ranks(), inner->name(), inner->timeout()),
        inner_(std::move(inner)),
        log_(log) {}

  c10::DeviceType device_type() const override { return inner_->device_type(); }
  c10::Device device() const override { return inner_->device(); }
  Work all_gather_into(at::Tensor output, at::Tensor input) override {
    note("all_gather", input);
    return inner_->all_gather_into(output, input);
  }
  Work reduce_scatter_into(at::Tensor output, at::Tensor input, ReduceOp op) override {
    note("reduce_scatter", input, op);
    return inner_->reduce_scatter_into(output, input, op);
  }
  bool takes_narrow_sums() const override { return inner_->takes_narrow_sums(); }
  Work all_reduce(at::Tensor tensor, ReduceOp op) override {
    note("all_reduce", tensor, op);
    return inner_->all_reduce(tensor, op);
  }
  Work broadcast(at::Tensor tensor, int root) override { return inner_->broadcast(tensor, root); }
  Work all_to_all_into(at::Tensor output, at::Tensor input, const Splits& splits) override {
    note("all_to_all", input);
    return inner_->all_to_all_into(output, input, splits);
  }
  Work shift_into(at::Tensor output, at::Tensor input, int distance) override {
    note("shift", input);
    return inner_->shift_into(output, input, distance);
  }
  void barrier() override { inner_->barrier(); }
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, c10::Device device, GroupMemory memory) override {
    const bool symmetric = memory == GroupMemory::kSymmetric;
    log_.push_back({symmetric ? "allocate_symmetric" : "allocate", dtype, numel});
    return inner_->allocate(numel, dtype, device, memory);
  }
  std::shared_ptr<ProcessGroup> subgroup(const std::vector<int>& members, const std::string& name) override {
    return std::make_shared<RecordingGroup>(inner_->subgroup(members, name), log_);
  }

 protected:
  void note(const char* operation, const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) {
    log_.push_back({operation, tensor.scalar_type(), tensor.numel(), op});
  }

  ProcessGroupPtr inner_;
  std::vector<CollectiveCall>& log_;
};

inline int64_t count(const std::vector<CollectiveCall>& calls, const std::string& operation) {
  return std::count_if(calls.begin(), calls.end(), [&](const auto& call) { return call.operation == operation; });
}

/// A mesh over `world` whose groups record their collectives.
inline DeviceMeshPtr recording_mesh(const ProcessGroupPtr& world, const std::vector<int>& shape,
                                    const std::vector<std::string>& names, std::vector<CollectiveCall>& log) {
  const DeviceMesh plain(world, shape, names);
  std::vector<ProcessGroupPtr> groups;
  for (int dim = 0; dim < plain.ndim(); ++dim) {
    groups.push_back(std::make_shared<RecordingGroup>(plain.group(dim), log));
  }
  return std::make_shared<DeviceMesh>(groups, names);
}

}  // namespace megashard::testing
