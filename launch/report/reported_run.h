#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace megashard {

/// Content of a run's files: its metrics, their events, and the checkpoints of its --save.
struct ReportedRun {
  struct Start {
    std::string time{};
    int64_t step = 0;  ///< steps done before; 0: a new run
    int64_t world_size = 0;
    std::string end{};  ///< "done", "exited", "interrupted"; empty: running, killed or failed
    int64_t last = 0;   ///< last step known to be done
  };
  struct FailedSave {
    std::string time{};
    int64_t step = 0;
    std::string why{};
  };
  struct Checkpoint {
    std::string name{};  ///< "iter_0000010"
    int64_t bytes = 0;
    std::string time{};
    bool is_latest = false;  ///< used by --load
    bool is_best = false;    ///< by --save-best
  };
  struct Memory {
    int64_t step = 0, bytes = 0;  ///< at the peak
    std::vector<std::pair<std::string, int64_t>> parts{};
  };

  std::string name{};          ///< as given by the user
  std::string metrics_file{};  ///< source of the steps
  std::vector<double> steps{};
  /// One value per step, by key; NaN: absent or not finite.
  std::map<std::string, std::vector<double>> numbers{};
  std::vector<Start> starts{};                     ///< empty: no events
  std::vector<FailedSave> failed_saves{};          ///< in order of the events
  std::map<std::string, std::string> arguments{};  ///< of the last start, if not default
  std::optional<Memory> memory{};                  ///< at the largest peak; nullopt: no --log-memory
  std::vector<std::string> traces{};               ///< from --profile
  std::string save{};                              ///< folder of `checkpoints`; empty: none found
  std::vector<Checkpoint> checkpoints{};           ///< existing ones, the newest first
};

/// Reads a metrics file, or a folder with metrics.jsonl or one other .jsonl. An incomplete last line is skipped;
/// repeated steps use the last values. Throws UsageError with file and line.
ReportedRun read_run(const std::string& path);

}  // namespace megashard
