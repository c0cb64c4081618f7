#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace at {
class Tensor;
}

namespace megashard {

enum class ReduceOp { kSum, kAvg, kMax, kMin };

/// Handle of a collective that may still run; empty handles are complete.
class Work {
 public:
  Work() = default;
  explicit Work(c10::intrusive_ptr<c10::intrusive_ptr_target> work);  // a c10d::Work

  /// CPU tensors: blocks until the data is there or the group's deadline passed (throws, naming group and rank).
  /// CUDA tensors: makes the current stream wait; the host does not block.
  void wait();

  bool pending() const { return work_.defined(); }

 private:
  c10::intrusive_ptr<c10::intrusive_ptr_target> work_;
};

/// A set of ranks that communicate. Calls are collective: every member makes the same ones in the same order.
/// Tensors are contiguous and on device_type(). A group of one rank is legal and moves nothing.
class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }  ///< members as ranks of the world
  const std::string& name() const { return name_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  virtual c10::DeviceType device_type() const = 0;

  /// output [size * n], input [n] (the same dtype); input may be this rank's slice of output.
  virtual Work all_gather_into(at::Tensor output, at::Tensor input) = 0;
  /// output [n], input [size * n]; input may be overwritten. The order of addition is the rank order.
  virtual Work reduce_scatter_into(at::Tensor output, at::Tensor input, ReduceOp op) = 0;
  virtual Work all_reduce(at::Tensor tensor, ReduceOp op) = 0;
  virtual Work broadcast(at::Tensor tensor, int root) = 0;  ///< root: rank in this group
  /// output and input [size * n]: slice i of input goes to rank i.
  virtual Work all_to_all_into(at::Tensor output, at::Tensor input) = 0;
  virtual void barrier() = 0;

  /// Every member's string, in rank order. For plans and errors, not for tensors. Works on every backend.
  virtual std::vector<std::string> all_gather_strings(const std::string& mine) = 0;

  /// A group of some of this group's ranks (given as ranks in this group, ascending), called by its members
  /// only, each with the same `name`, which is unique within this group's life.
  virtual std::shared_ptr<ProcessGroup> subgroup(const std::vector<int>& members, const std::string& name) = 0;

 protected:
  ProcessGroup(int rank, std::vector<int> ranks, std::string name, std::chrono::milliseconds timeout);

 private:
  int rank_;
  std::vector<int> ranks_;
  std::string name_;
  std::chrono::milliseconds timeout_;
};

using ProcessGroupPtr = std::shared_ptr<ProcessGroup>;

}  // namespace megashard
