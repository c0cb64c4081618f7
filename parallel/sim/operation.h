#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "parallel/sim/sim_device.h"

namespace megashard::sim {

/// One operation on a device's current stream while it is enqueued and run. Holds the device's lock.
class Operation {
 public:
  Operation(SimDevice& device, const std::string& name);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  void reads(const at::Tensor& tensor) { touch(tensor, false); }
  void writes(const at::Tensor& tensor) { touch(tensor, true); }
  void reads(const void* begin, size_t bytes) { touch(begin, bytes, false, nullptr); }
  void writes(const void* begin, size_t bytes) { touch(begin, bytes, true, nullptr); }
  /// For nodes added to the recording by hand.
  const std::vector<Recording::Place>& after() const { return after_; }
  /// Runs `work` now and whenever the recording is replayed. Only for operations that access memory.
  void run(std::function<void()> work);
  void recorded(std::function<void()> work);  ///< run(), for work that has run already

  void is_collective(int64_t bytes, double seconds = 0) { collective_ = {bytes, seconds}; }
  /// With shapes: element size in bytes for a kernel of this project.
  void has_elements_of(int64_t bytes) { is_narrow_ = bytes == 2; }
  /// With shapes: seconds besides those for memory traffic.
  void computes(double seconds) { arithmetic_ = seconds; }
  void end();  ///< ends the operation early; the destructor does it otherwise

  SimDevice& device() { return device_; }
  c10::StreamId stream() const { return stream_; }

 private:
  void touch(const at::Tensor& tensor, bool writes);
  void touch(const void* begin, size_t bytes, bool writes, const std::string* name);
  void report(const Access& earlier, bool earlier_wrote, bool writes, const std::string* name);

  std::unique_lock<std::recursive_mutex> lock_;
  std::vector<Recording::Place> after_;  // where the memory that it uses was allocated
  SimDevice& device_;
  c10::StreamId stream_;
  Access access_;
  int64_t moved_ = 0;  // bytes, with shapes
  bool is_narrow_ = false;
  double arithmetic_ = 0;
  std::pair<int64_t, double> collective_{};  // bytes; seconds
};

/// Records the profiler's user scopes ("FSDP::all_gather (layers.0)"), so that findings can name the current unit.
void watch_unit_scopes();

/// Unit of the calling thread; empty: none.
const std::string& current_unit();

}  // namespace megashard::sim
