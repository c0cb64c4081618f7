#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "parallel/sim/sim_device.h"

namespace megashard::sim {

/// One operation on the current stream of a device, while it is enqueued and run; holds the
/// device's lock.
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
  /// For what is added to the recording by hand.
  const std::vector<Recording::Place>& after() const { return after_; }
  /// Runs `work` now, and again whenever the recording is run. Of an operation that touches
  /// something only.
  void run(std::function<void()> work);
  void recorded(std::function<void()> work);  ///< the same of work that has run already

  void is_collective(int64_t bytes, double seconds = 0) { collective_ = {bytes, seconds}; }
  /// Of shapes: what a kernel of ours computes with has so many bytes an element.
  void has_elements_of(int64_t bytes) { is_narrow_ = bytes == 2; }
  /// Of shapes: seconds besides those of the bytes that it reads and writes.
  void computes(double seconds) { arithmetic_ = seconds; }
  void end();  ///< all of it is known; its destructor says so, too

  SimDevice& device() { return device_; }
  c10::StreamId stream() const { return stream_; }

 private:
  void touch(const at::Tensor& tensor, bool writes);
  void touch(const void* begin, size_t bytes, bool writes, const std::string* name);
  void report(const Access& earlier, bool earlier_wrote, bool writes, const std::string* name);

  std::unique_lock<std::recursive_mutex> lock_;
  std::vector<Recording::Place> after_;  // where the memory that it uses was handed out
  SimDevice& device_;
  c10::StreamId stream_;
  Access access_;
  int64_t moved_ = 0;  // bytes, of shapes
  bool is_narrow_ = false;
  double arithmetic_ = 0;
  std::pair<int64_t, double> collective_{};  // bytes; seconds
};

}  // namespace megashard::sim
