#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "parallel/collectives/process_group.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// A copy of a rank's shards in host memory, so that training may change them while they are written (torch's
/// DefaultStager). The memory is reused, so its pages are touched, and pinned for a GPU, only once.
class ShardSnapshot {
 public:
  /// Returns the tensors with `local` on the CPU, contiguous; valid until the next take(). CPU shards are copied on
  /// return, by as many threads as ATen has. GPU shards are copied on a separate stream after the work queued on the
  /// current stream; the host is not blocked. Later work on the current stream may read the shards; call
  /// before_changes() before it changes them. wait() blocks until the copies are complete.
  ShardedTensors take(const ShardedTensors& tensors);
  /// Makes the current stream wait for the copies. Does not block the host.
  void before_changes() const;
  void wait() const;  ///< blocks the host; callable from any thread

 private:
  void make_room(int64_t bytes, bool for_device);
  /// Returns the copy stream after it waits for the current stream.
  c10::Stream copying_stream(c10::Device device);

  at::Tensor buffer_;
  std::optional<c10::Stream> stream_;  // copy stream of a GPU
  std::optional<c10::Event> copied_;
};

struct AsyncSaverOptions {
  /// Time without progress after which waiting ranks give up.
  std::chrono::milliseconds deadline = std::chrono::minutes(10);
  std::function<void(const std::string& line)> say{};  ///< receives a line when training waits; null: none
  const char* what = "checkpoint";                     ///< for messages
  /// CPU shards are copied by the thread while training goes on; before_changes() waits for that.
  bool copies_beside = false;
};

/// Saves while training continues (torch's dcp.async_save): the caller blocks only for a copy of its shards; a thread
/// does the rest with the code of a synchronous save. It communicates over its own CPU group, so it never blocks in a
/// training collective. One save at a time. Calls are collective, from one thread; see docs/async_save.md.
class AsyncSaver {
 public:
  /// Writes `copies`, which are not changed until it returns. Its collectives use `group` (null if there is only one
  /// rank).
  using Write = std::function<void(const ShardedTensors& copies, const ProcessGroupPtr& group)>;

  /// Collective. `training` is the group of all ranks; throws if it has no CPU backend.
  explicit AsyncSaver(const ProcessGroupPtr& training, AsyncSaverOptions options = {});
  ~AsyncSaver();  ///< waits up to the deadline; ignores an error of the save
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  /// Waits for the previous save, copies the tensors (on a GPU: see before_changes()) and returns. `name` is used in
  /// messages: "iteration 10". The next start() or wait() first calls `afterwards` on its thread, once the save has
  /// ended, successfully or not, to report notices of `write`; then it throws its error, if any, on every rank.
  void start(const std::string& name, const ShardedTensors& tensors, Write write,
             std::function<void()> afterwards = {});
  /// Call before changing tensors of the current save on a GPU: the current stream waits for their copies, the host
  /// does not. With copies_beside call it on a CPU, too: it blocks the host until the thread has copied them.
  void before_changes() const;
  /// Blocks until no save is running. Throws its error once, the same on every rank. Throws c10::DistError if the ranks
  /// have lost each other or the thread is still writing.
  void wait();

  enum class State { kIdle, kWriting, kWritten, kFailed };
  /// This rank's view of the save, without blocking; kIdle after wait(). Ranks learn of a failure at different times:
  /// let them agree (the training step's reduction does) before all of them call wait().
  State state() const;

 private:
  struct Save;  // owned by the thread too, so that it may outlive a saver that gave up

  ProcessGroupPtr group_;
  AsyncSaverOptions options_;
  std::shared_ptr<ShardSnapshot> snapshot_;
  std::shared_ptr<Save> save_;  // null: no save since the last wait()
  std::thread thread_;
};

}  // namespace megashard
