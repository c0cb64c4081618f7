#pragma once

#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "framework/training/optimizers/optimizer.h"
#include "parallel/device/memory_use.h"

namespace megashard {

/// Calls `after` behind each operator of the thread that makes it, and of autograd's, which works for that one while it
/// waits: not of threads that load data. One in a process; who makes it destroys it.
class OperatorWatch {
 public:
  explicit OperatorWatch(std::function<void()> after);
  ~OperatorWatch();
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;

 private:
  at::CallbackHandle handle_;
};

/// Bytes by what holds them: "sharded parameters", ... The last part is "activations and the rest".
using MemoryParts = std::vector<std::pair<std::string, int64_t>>;

/// A peak of this rank's memory, in bytes, and what it was made of; on a CPU the rest holds the program and its
/// libraries too.
struct MemoryPeak {
  int64_t iteration = 0;
  int64_t bytes = 0;
  MemoryParts parts{};
};

/// "[Rank 0] (after 1 iterations) memory (MiB) | peak: 712.0 | sharded parameters: 32.0 | ..."
std::string memory_line(const MemoryPeak& peak);

/// What this rank's memory was made of when it was fullest, for --log-memory. Looks whenever a unit's parameters are
/// gathered or a communication buffer is taken, which is where a step's peaks are. One in a process.
class MemoryLog {
 public:
  struct Sources {
    std::function<int64_t()> live_bytes;  ///< of this rank, now; of a CPU those of cpu_buffer_pool()
    std::function<int64_t()> peak_bytes;  ///< the most that it had
  };
  /// Counts what lies on `device`. `model` and `optimizer` outlive it.
  MemoryLog(const torch::nn::Module& model, Optimizer& optimizer, c10::Device device, Sources sources);
  ~MemoryLog();
  MemoryLog(const MemoryLog&) = delete;
  MemoryLog& operator=(const MemoryLog&) = delete;

  /// After a step, where the peak has grown by more than 1 % since the last one that was logged.
  std::optional<MemoryPeak> grown(int64_t iteration);
  /// What is in use. Of a CPU without the program and tensors that are less than kPooledFrom.
  MemoryParts now() const;

 private:
  struct Held {
    MemoryUse use{};
    int64_t gradients = 0, optimizer = 0;
  };
  void look(const MemoryUse& use);
  Held held_now(const MemoryUse& use) const;
  MemoryParts parts_of(const Held& held, int64_t bytes) const;
  int64_t parameter_bytes() const;
  int64_t optimizer_bytes() const;

  const torch::nn::Module& model_;
  Optimizer& optimizer_;
  c10::Device device_;
  Sources sources_;
  int64_t parameters_;
  int64_t state_bytes_;  // of the optimizer, since the last step
  int64_t fullest_ = 0;  // of live_bytes, when `held_` was there
  Held held_;
  int64_t logged_ = 0;  // the last peak that was logged
};

/// Memory by class while steps are profiled: looks behind each operator. The thread that makes it trains.
class MemoryCounters {
 public:
  /// `log` outlives it.
  explicit MemoryCounters(const MemoryLog& log);

  /// Adds what it saw to a trace of LibTorch's profiler, as counters "memory" of the Chrome trace format.
  void add_to(const std::string& trace_path) const;

 private:
  struct Sample {
    int64_t at = 0;  // nanoseconds of the system's clock
    MemoryParts parts{};
  };
  void look();

  const MemoryLog& log_;
  std::vector<Sample> samples_;  // each differs from the one before
  OperatorWatch watch_;
};

}  // namespace megashard
