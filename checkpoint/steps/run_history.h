#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace megashard {

/// The run that wrote a step, from its manifest. A folder may hold steps of several runs: of a run and of one that was
/// fine-tuned from it there, or that resumed from an earlier step.
struct RunHistory {
  struct Part {
    std::string id;
    int64_t last = 0;  ///< iteration of the step that the next run resumed from
  };
  std::string id{};            ///< empty: unknown, as in steps of converters and other programs
  std::vector<Part> before{};  ///< runs that it descends from, the first one first
};

/// Relation of a step to a run.
enum class Kinship {
  kOwn,   ///< of this run, or a step that it descends from
  kLeft,  ///< of a run that it descends from, after the step that it resumed from
  kOther  ///< of another run
};

RunHistory new_run();  ///< with a unique id
/// A new run that resumes from a step of `run`.
RunHistory gone_on_from(RunHistory run, int64_t iteration);
/// `id` is the run that wrote the step of that iteration.
Kinship kinship(const RunHistory& run, const std::string& id, int64_t iteration);

}  // namespace megashard
