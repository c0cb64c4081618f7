#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace at {
class Tensor;
}

namespace megashard {

enum class ReduceOp { kSum, kAvg, kMax, kMin };

/// Memory of a group's own for communication buffers. kRegistered: known to the network (NCCL:
/// registered user buffers). kSymmetric: the same on every rank and mapped by all of them (NCCL:
/// windows), so that copy engines and switches move and add it; needs NVLink between all ranks.
enum class GroupMemory { kRegistered, kSymmetric };

/// Handle of a collective that may still run; empty handles are complete. A handle that is dropped
/// without wait() abandons its collective: the group is of no use after that.
class Work {
 public:
  /// What a backend implements: finish() is called once, by the first wait() on any copy of the
  /// handle.
  class Task {
   public:
    virtual ~Task() = default;
    virtual void finish() = 0;

   private:
    friend class Work;
    bool waited_for_ = false;
  };

  Work() = default;
  explicit Work(std::shared_ptr<Task> task) : task_(std::move(task)) {}

  /// CPU tensors: blocks until the data is there or the group's deadline passed (throws one
  /// message with operation, group, rank and the time waited). Part of a reduction is computed
  /// here, so every rank waits in the same order. CUDA tensors: makes the current stream wait; the
  /// host does not block.
  void wait();

  bool pending() const { return task_ != nullptr; }

 private:
  std::shared_ptr<Task> task_;
};

/// Elements of each rank's slice in an all-to-all, of output and of input; none: equal slices. What a rank sends to
/// another is what that one receives from it.
struct Splits {
  std::vector<int64_t> output{}, input{};

  bool equal() const { return input.empty() && output.empty(); }
};

/// A set of ranks that communicate. Calls are collective: every member makes the same ones in the
/// same order, from one thread at a time. Tensors are contiguous and on device_type(). A group of
/// one rank is legal and moves nothing. Groups on the CPU reduce element by element in rank order
/// (16-bit floats in fp32, rounded once; kAvg divides at the end): the result does not depend on
/// how tensors are packed into buffers, and is the same on every rank.
class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }  ///< members as ranks of the world
  const std::string& name() const { return name_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  virtual c10::DeviceType device_type() const = 0;
  /// Of this rank's tensors. Groups on GPUs are made for one; the default is the accelerator that
  /// is current on the calling thread.
  virtual c10::Device device() const;

  /// output [size * n], input [n] (the same dtype); input may be this rank's slice of output.
  virtual Work all_gather_into(at::Tensor output, at::Tensor input) = 0;
  /// output [n], input [size * n]; output may be this rank's slice of input. Of one dtype, but an output of fp32 may
  /// have an input of 16-bit floats where the group takes_narrow_sums(): each is widened before it is added.
  virtual Work reduce_scatter_into(at::Tensor output, at::Tensor input, ReduceOp op) = 0;
  virtual bool takes_narrow_sums() const { return false; }
  virtual Work all_reduce(at::Tensor tensor, ReduceOp op) = 0;
  virtual Work broadcast(at::Tensor tensor, int root) = 0;  ///< root: rank in this group
  /// Slice i of input goes to rank i; slice i of output comes from rank i. Without splits output and input are
  /// [size * n] and their slices alike.
  virtual Work all_to_all_into(at::Tensor output, at::Tensor input, const Splits& splits = {}) = 0;
  /// output and input [n]: input goes to the rank `distance` behind this one, and output comes from
  /// the one as far before it, all ranks in a ring.
  virtual Work shift_into(at::Tensor output, at::Tensor input, int distance) = 0;
  virtual void barrier() = 0;

  /// Uninitialised, for communication buffers; ordinary memory where the backend has no other.
  /// kSymmetric: every rank asks for the same sizes in the same order.
  virtual at::Tensor allocate(int64_t numel, c10::ScalarType dtype, c10::Device device, GroupMemory memory);

  /// Every member's string, in rank order. For plans and errors, not for tensors. Works on every
  /// backend.
  virtual std::vector<std::string> all_gather_strings(const std::string& mine);

  /// From now on no wait of this group, or of one that shares its failures, begins: each throws `failure`.
  virtual void fail(std::exception_ptr failure);

  /// A group of some of this group's ranks (given as ranks in this group, ascending), called by its
  /// members only, each with the same `name`, which need not be unique.
  virtual std::shared_ptr<ProcessGroup> subgroup(const std::vector<int>& members, const std::string& name) = 0;
  /// The same, called by all ranks of this group, each with the members of its own part; the parts
  /// are of one size. NCCL splits its communicator instead of connecting anew.
  virtual std::shared_ptr<ProcessGroup> split(const std::vector<int>& members, const std::string& name) {
    return subgroup(members, name);
  }

 protected:
  ProcessGroup(int rank, std::vector<int> ranks, std::string name, std::chrono::milliseconds timeout);

  // Checks of the arguments, for backends; each throws one error with the operation and the
  // group.
  /// Output [size * n] of input [n], the reverse, [size * n] both, [n] both.
  enum class Shapes { kGather, kScatter, kSliced, kEqual };
  void check_tensor(const char* operation, const at::Tensor& tensor) const;
  void check_tensors(const char* operation, Shapes shapes, const at::Tensor& output, const at::Tensor& input) const;
  void check_all_to_all(const at::Tensor& output, const at::Tensor& input, const Splits& splits) const;
  void check_reduction(const char* operation, const at::Tensor& tensor, ReduceOp op) const;
  void check_root(int root) const;
  /// The rank so far behind this one in the ring of all.
  int rank_behind(int distance) const { return ((rank() + distance) % size() + size()) % size(); }
  /// `members` as ranks of the world, and this rank's place among them.
  std::vector<int> members_in_world(const std::vector<int>& members, const std::string& name) const;
  int place_in(const std::vector<int>& members) const;
  /// Where a new subgroup's keys are in the store: the same for all its members, and another one
  /// every time, so that groups of one name do not meet.
  std::string next_store_prefix(const std::string& name, const std::vector<int>& members_in_world);

 private:
  int rank_;
  std::vector<int> ranks_;
  std::string name_;
  std::chrono::milliseconds timeout_;
  std::map<std::string, int> subgroups_made_;  // by name and members
};

using ProcessGroupPtr = std::shared_ptr<ProcessGroup>;

}  // namespace megashard
