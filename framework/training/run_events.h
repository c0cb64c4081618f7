#pragma once

#include <cstdint>
#include <string>

#include "framework/arguments/arguments.h"
#include "framework/training/appended_file.h"
#include "framework/training/memory_log.h"
#include "framework/training/progress.h"

namespace megashard {

/// Where the events of a run with that --metrics-file are: "metrics.jsonl.events".
std::string events_path(const std::string& metrics_file);

/// What happens to a run besides its steps, for `megashard report`: one JSON object a line, each with "event" and the
/// "time", as the log shows it. For rank 0. A run goes on without them where they cannot be written.
///   {"event": "start", "step": 0, "folder": "/where/it/ran", "world_size": 8, "arguments": {"lr": "0.001", ...}}
///   {"event": "memory", "step": 1, "peak": 1024, "parts": {"gradients": 512, ...}}   bytes
///   {"event": "profile", "step": 12, "path": "/traces/rank_0.pt.trace.json"}
///   {"event": "save_failed", "step": 20, "why": "the checkpoint of iteration 20 was not saved: ..."}
///   {"event": "end", "step": 100, "how": "done"}   or "exited", "interrupted"; none: it was killed
class RunEvents {
 public:
  /// Opens the file beside a metrics file, if that exists and is a regular file; appends if a run goes on after
  /// `loaded_step`. Without it events are dropped.
  void open(const std::string& metrics_file, int64_t loaded_step);
  bool is_open() const { return file_.is_open(); }
  /// "arguments" are those that differ from their defaults.
  void start(const Arguments& arguments, const Progress& progress);
  void memory(const MemoryPeak& peak);
  void save_failed(const std::string& why, int64_t step);
  void profile(const std::string& path, int64_t step);
  void end(const std::string& how, int64_t step);

 private:
  AppendedFile file_;
};

}  // namespace megashard
