#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "checkpoint/steps/shard_snapshot.h"
#include "parallel/collectives/process_group.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

struct AsyncSaverOptions {
  /// How long a save may do nothing before whoever waits for it gives up.
  std::chrono::milliseconds deadline = std::chrono::minutes(10);
  std::function<void(const std::string& line)> say{};  ///< when training waits; null: nobody
};

/// Saves while training goes on (torch's dcp.async_save): the caller waits for a copy of its
/// shards, a thread does the rest, by the same code as a save without it. Its ranks agree over a
/// group of their own on the CPU, so it never waits inside a collective of the training. One save
/// at a time. Calls are collective, from one thread; see docs/async_save.md.
class AsyncSaver {
 public:
  /// Writes `copies`, which stay as they are until it returns; its collectives go over `group`
  /// (null when there is only one rank).
  using Write = std::function<void(const ShardedTensors& copies, const ProcessGroupPtr& group)>;

  /// Collective. `training`: the ranks; throws when it has no backend for the CPU.
  explicit AsyncSaver(const ProcessGroupPtr& training, AsyncSaverOptions options = {});
  ~AsyncSaver();  ///< waits, up to the deadline, and swallows what the save failed with
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  /// Waits for the previous save, copies the tensors (on a GPU: see before_changes()) and returns.
  /// `name` is for messages: "iteration 10". What goes wrong from here on is thrown by the next
  /// start() or wait(), on every rank. Before that throws or returns it calls `afterwards`, on its
  /// own thread, once the save has ended, well or not: to say what `write` has noticed.
  void start(const std::string& name, const ShardedTensors& tensors, Write write,
             std::function<void()> afterwards = {});
  /// To be called before the tensors of the save under way are changed on a GPU: the current stream
  /// waits until they are copied. The host does not wait.
  void before_changes() const;
  /// Returns when no save is under way. Throws what it failed with, once: the same message on
  /// every rank. c10::DistError: the ranks have lost each other, or its thread still writes.
  void wait();

  enum class State { kIdle, kWriting, kWritten, kFailed };
  /// What this rank knows of the save under way, without waiting; kIdle after wait(). Ranks learn
  /// of a failure at different moments: let them agree (the training step's own reduction does)
  /// before all of them call wait().
  State state() const;

 private:
  struct Save;  // what the thread holds, so that it may outlive a saver that gave up

  ProcessGroupPtr group_;
  AsyncSaverOptions options_;
  std::shared_ptr<ShardSnapshot> snapshot_;
  std::shared_ptr<Save> save_;  // null: none since the last wait()
  std::thread thread_;
};

}  // namespace megashard
