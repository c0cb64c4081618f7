#pragma once

#include <c10/core/Device.h>
#include <torch/version.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "framework/arguments/argument_view.h"
#include "framework/callbacks/callbacks.h"
#include "framework/training/metrics.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

class MultiModalModule;
class Optimizer;

/// Requests of the user to a running training. If ranks disagree, the highest value wins.
enum class StopRequest {
  kNone,
  kExit,       ///< --exit-signal: save, and end
  kInterrupt,  ///< Ctrl-C: end
};

enum class TrainingEnd { kDone, kExited, kInterrupted };

/// Requests of a listener. Those of all listeners on all ranks are OR-ed and sent with the statistics of a step; the
/// loop acts on them at the end of the first step whose statistics are read.
struct Requests {
  bool save = false;
  bool evaluate = false;
  bool exit = false;         ///< evaluate if that is due, save, and end
  bool save_failed = false;  ///< the save in progress has failed on this rank

  Requests& operator|=(const Requests& other) {
    save |= other.save;
    evaluate |= other.evaluate;
    exit |= other.exit;
    save_failed |= other.save_failed;
    return *this;
  }
};

/// The training that a listener is called by.
struct TrainingRun {
  MultiModalModule& model;
  Optimizer& optimizer;
  ProcessGroupPtr world;
  c10::Device device;
  int64_t step = 0;                               ///< completed steps; more than 0 after a resume
  std::function<void(const std::string&)> print;  ///< a line of the log; on the first rank only
  ArgumentView arguments;                         ///< the flags, by name
};

/// Part of a training loop besides its steps: log line, files, saves, a user's callback. All ranks call all functions
/// in the same order, so they may use collectives. Steps are counted from 1. Functions do not block the host for the
/// device unless reads() says so for that step.
class Listener {
 public:
  virtual ~Listener() = default;

  /// True if the listener needs the statistics of this step (StepReport::step) when it ends, which blocks the host for
  /// the device. Must be the same on all ranks. Without it they are those of the last step that was read.
  virtual bool reads(int64_t /*step*/) const { return false; }
  /// Asked once a step, while the device computes.
  virtual Requests requests(int64_t /*step*/) { return {}; }

  virtual void training_starts(const TrainingRun& /*run*/) {}
  virtual void step_starts(int64_t /*step*/) {}
  /// The gradients are enqueued, and the weights are still those before the step.
  virtual void gradients_ready(int64_t /*step*/) {}
  virtual void weights_updated(int64_t /*step*/) {}
  /// Before an evaluation.
  virtual void step_ended(const StepReport& /*step*/) {}
  /// After the evaluation, if one was due. `merged`: the requests of all ranks.
  virtual void step_complete(const StepReport& /*step*/, const Requests& /*merged*/) {}
  /// After the last step, before the last evaluations and save.
  virtual void steps_ended(int64_t /*step*/) {}
  virtual void training_ended(TrainingEnd /*how*/, int64_t /*step*/) {}
};

/// Versions that a callback is compiled against. The program ignores a callback whose stamp differs from its own.
struct CallbackStamp {
  uint32_t version = 1;  ///< changes with Listener and CallbackKind
  const char* libtorch = TORCH_VERSION;
  size_t report_bytes = sizeof(StepReport);
  size_t run_bytes = sizeof(TrainingRun);
};

/// A static object in a callback's file, which is part of the program or a library of --callback-plugin: makes
/// --callback and --help know it. Leave the default stamp.
struct RegisterCallback {
  explicit RegisterCallback(const CallbackKind& kind, const CallbackStamp& stamp = {});
};

/// Number of callbacks that were ignored.
int64_t ignored_callbacks();

}  // namespace megashard
