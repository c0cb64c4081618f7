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

/// Backend memory for communication buffers. kRegistered: known to the network (NCCL: registered user buffers).
/// kSymmetric: the same on every rank and mapped by all of them (NCCL: windows), so that copy engines and switches move
/// and add it; needs NVLink between all ranks.
enum class GroupMemory { kRegistered, kSymmetric };

/// Handle of an asynchronous collective; empty handles are complete. Dropping a handle without wait() abandons its
/// collective, and the group is unusable afterwards.
class Work {
 public:
  /// Interface for backends: the first wait() on any copy of the handle calls finish(), once.
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

  /// CPU tensors: blocks until the data is there, or throws at the group's deadline (operation, group, rank and time
  /// waited). Reductions are partly computed here, so all ranks must wait in the same order. CUDA tensors: makes the
  /// current stream wait; does not block the host.
  void wait();

  bool pending() const { return task_ != nullptr; }

 private:
  std::shared_ptr<Task> task_;
};

/// Elements of each rank's slice of output and input in an all-to-all; empty: equal slices. The size sent by one rank
/// must be the size received by the other.
struct Splits {
  std::vector<int64_t> output{}, input{};

  bool equal() const { return input.empty() && output.empty(); }
};

/// Set of ranks that communicate. Calls are collective: all members make the same calls in the same order, each from
/// one thread at a time. Tensors are contiguous and on device_type(). A group of one rank is legal and moves nothing.
/// Groups on the CPU reduce each element in rank order (16-bit floats in fp32, rounded once; kAvg divides at the end),
/// so results are identical on all ranks and independent of how tensors are packed into buffers.
class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }  ///< members as world ranks
  const std::string& name() const { return name_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  virtual c10::DeviceType device_type() const = 0;
  /// Device of this rank's tensors. GPU groups are bound to one device; the default is the calling thread's current
  /// accelerator.
  virtual c10::Device device() const;

  /// output [size * n], input [n] (the same dtype); input may be this rank's slice of output.
  virtual Work all_gather_into(at::Tensor output, at::Tensor input) = 0;
  /// output [n], input [size * n]; output may be this rank's slice of input. Same dtype, except that an fp32 output may
  /// have a 16-bit float input if takes_narrow_sums(): values are widened before they are added.
  virtual Work reduce_scatter_into(at::Tensor output, at::Tensor input, ReduceOp op) = 0;
  virtual bool takes_narrow_sums() const { return false; }
  virtual Work all_reduce(at::Tensor tensor, ReduceOp op) = 0;
  virtual Work broadcast(at::Tensor tensor, int root) = 0;  ///< root: rank in this group
  /// Slice i of input goes to rank i; slice i of output comes from rank i. Without splits output and input are [size *
  /// n] with equal slices.
  virtual Work all_to_all_into(at::Tensor output, at::Tensor input, const Splits& splits = {}) = 0;
  /// output and input [n]: in a ring of all ranks, input goes to rank + distance, and output comes from rank -
  /// distance.
  virtual Work shift_into(at::Tensor output, at::Tensor input, int distance) = 0;
  virtual void barrier() = 0;

  /// Uninitialised communication buffer; ordinary memory if the backend has no other. kSymmetric: every rank requests
  /// the same sizes in the same order.
  virtual at::Tensor allocate(int64_t numel, c10::ScalarType dtype, c10::Device device, GroupMemory memory);

  /// Strings of all members in rank order. For plans and errors, not for tensors. Works on every backend.
  virtual std::vector<std::string> all_gather_strings(const std::string& mine);

  /// Makes all later waits of this group, and of groups that share its failures, throw `failure`.
  virtual void fail(std::exception_ptr failure);

  /// A group of some of this group's ranks (as ranks in this group, ascending). Called by its members only, all with
  /// the same `name`, which need not be unique.
  virtual std::shared_ptr<ProcessGroup> subgroup(const std::vector<int>& members, const std::string& name) = 0;
  /// Like subgroup(), but called by all ranks of this group, each with the members of its own part; all parts have the
  /// same size. NCCL splits its communicator instead of connecting again.
  virtual std::shared_ptr<ProcessGroup> split(const std::vector<int>& members, const std::string& name) {
    return subgroup(members, name);
  }

 protected:
  ProcessGroup(int rank, std::vector<int> ranks, std::string name, std::chrono::milliseconds timeout);

  // Argument checks for backends; each throws an error with operation and group.
  /// kGather: output [size * n], input [n]; kScatter: the reverse; kSliced: both [size * n]; kEqual: both [n].
  enum class Shapes { kGather, kScatter, kSliced, kEqual };
  void check_tensor(const char* operation, const at::Tensor& tensor) const;
  void check_tensors(const char* operation, Shapes shapes, const at::Tensor& output, const at::Tensor& input) const;
  void check_all_to_all(const at::Tensor& output, const at::Tensor& input, const Splits& splits) const;
  void check_reduction(const char* operation, const at::Tensor& tensor, ReduceOp op) const;
  void check_root(int root) const;
  /// The rank at this distance after this one in the ring of all ranks.
  int rank_behind(int distance) const { return ((rank() + distance) % size() + size()) % size(); }
  /// `members` as world ranks, and this rank's index among them.
  std::vector<int> members_in_world(const std::vector<int>& members, const std::string& name) const;
  int place_in(const std::vector<int>& members) const;
  /// Prefix of a new subgroup's store keys: the same on all its members and different each time, so that groups of the
  /// same name do not mix.
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
