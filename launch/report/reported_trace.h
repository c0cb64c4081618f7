#pragma once

#include <string>
#include <vector>

namespace megashard {

/// A Chrome trace of steps, and how they spent their time. Seconds from the first span on.
struct ReportedTrace {
  struct Span {
    double begin = 0, end = 0;
    bool communicates = false;
    std::string name{};
  };
  struct Row {  ///< a stream of the device, or a thread of the host
    std::string name{};
    std::vector<Span> spans{};  ///< by their begin
  };

  /// Bytes by class from a time on.
  struct Memory {
    double at = 0;
    std::vector<double> bytes{};  ///< as many as memory_classes
  };

  std::string path{};
  std::vector<std::string> memory_classes{};
  std::vector<Memory> memory{};  ///< in the order of time
  std::vector<Row> rows{};
  double seconds = 0;        ///< from the first span to the last one's end
  double compute = 0;        ///< of the row that computes most
  double communication = 0;  ///< of all rows, what overlaps counted once
  double exposed = 0;        ///< of this, while that row does not compute
  double idle = 0;           ///< while no row does anything
};

/// Of `--profile` or `plan --trace`. Where there are kernels of a GPU, only what the device did counts. Spans that hold
/// others are told as communication when they communicate themselves ("FSDP::all_gather (...)"). Throws UsageError for
/// a file that is no such trace.
ReportedTrace read_trace(const std::string& path);

}  // namespace megashard
