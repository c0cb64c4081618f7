#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace megashard {

/// The run that wrote a step, as its manifest says it. A folder may hold steps of several: of a
/// run and of one that was tuned from it there, or of one that went on from an earlier step.
struct RunHistory {
  struct Part {
    std::string id;
    int64_t last = 0;  ///< iteration of the step that was gone on from
  };
  std::string id{};            ///< empty: not said, as in steps of converters and of other programs
  std::vector<Part> before{};  ///< what it went on from, the first run first
};

/// How a step stands to a run.
enum class Kinship {
  kOwn,   ///< a step of it, or one that it went on from
  kLeft,  ///< later than the step that it went on from, of the same run as that
  kOther  ///< of another run
};

RunHistory new_run();  ///< with an id that no other has
/// A new run from a step of another.
RunHistory gone_on_from(RunHistory run, int64_t iteration);
/// `id`: of the run that wrote the step of that iteration.
Kinship kinship(const RunHistory& run, const std::string& id, int64_t iteration);

}  // namespace megashard
