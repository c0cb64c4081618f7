#pragma once

#include <string>
#include <vector>

namespace megashard {

/// A Chrome trace of steps, with the use of their time. Seconds since the first span.
struct ReportedTrace {
  struct Span {
    double begin = 0, end = 0;
    bool communicates = false;
    std::string name{};
  };
  struct Row {  ///< a stream of the device, or a thread of the host
    std::string name{};
    std::vector<Span> spans{};  ///< sorted by begin
  };

  /// Bytes by class from a time on.
  struct Memory {
    double at = 0;
    std::vector<double> bytes{};  ///< one per memory class
  };

  std::string path{};
  std::vector<std::string> memory_classes{};
  std::vector<Memory> memory{};  ///< sorted by time
  std::vector<Row> rows{};
  double seconds = 0;        ///< from the first span to the end of the last
  double compute = 0;        ///< of the row with the most computation
  double communication = 0;  ///< over all rows, overlaps counted once
  double exposed = 0;        ///< part of it during which that row does not compute
  double idle = 0;           ///< time in which all rows are idle
};

/// Reads a trace of `--profile` or `plan --trace`. If it has GPU kernels, only device activity is used. Spans that
/// contain others count as communication if they communicate themselves ("FSDP::all_gather (...)"). Throws UsageError
/// if the file is not such a trace.
ReportedTrace read_trace(const std::string& path);

}  // namespace megashard
