#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace megashard {

/// What the files of a run tell of it: its metrics, the events beside them, and the checkpoints of its --save.
struct ReportedRun {
  struct Start {
    std::string time{};
    int64_t step = 0;  ///< done before; 0: a fresh run
    int64_t world_size = 0;
    std::string end{};  ///< "done", "exited", "interrupted"; empty: it goes on, was killed, or ended with an error
    int64_t last = 0;   ///< the last step that is known to be done
  };
  struct Checkpoint {
    std::string name{};  ///< "iter_0000010"
    int64_t bytes = 0;
    std::string time{};
    bool is_latest = false;  ///< which --load takes
    bool is_best = false;    ///< of --save-best
  };
  struct Memory {
    int64_t step = 0, bytes = 0;  ///< the peak
    std::vector<std::pair<std::string, int64_t>> parts{};
  };

  std::string name{};          ///< as the user wrote it
  std::string metrics_file{};  ///< where the steps are from
  std::vector<double> steps{};
  /// By key, one for each step; NaN: it has none, or what is no number.
  std::map<std::string, std::vector<double>> numbers{};
  std::vector<Start> starts{};                     ///< empty: there are no events
  std::map<std::string, std::string> arguments{};  ///< of the last start, those that differ from their defaults
  std::optional<Memory> memory{};                  ///< of the largest peak; none: no --log-memory
  std::vector<std::string> traces{};               ///< of --profile
  std::string save{};                              ///< the folder of `checkpoints`; empty: none was found
  std::vector<Checkpoint> checkpoints{};           ///< those that are there, the newest first
};

/// `path`: a metrics file, or a folder with metrics.jsonl or one other .jsonl. A last line that is not whole yet is
/// left out; of steps that were done again the last ones count. Throws UsageError, naming the file and the line.
ReportedRun read_run(const std::string& path);

}  // namespace megashard
