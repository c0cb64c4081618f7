#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/checkpoint.h"
#include "checkpoint/steps/async_saver.h"
#include "checkpoint/steps/find_step.h"

namespace megashard::testing {

/// Identifies a save: a step that is saved again has other bytes. Every fifth iteration has 17 MiB: more than two
/// blocks of output_file.h from one rank, and more than one from each of two.
struct Mark {
  int64_t iteration = 0;
  int64_t generation = 0;

  friend auto operator<=>(const Mark&, const Mark&) = default;
};

/// Saves tensors and values whose bytes all follow from the mark. With a saver: saves while training changes the
/// tensors, and returns when the step is complete.
void save_known_step(const std::string& directory, Mark mark, const ProcessGroupPtr& group,
                     const SaveOptions& options = {}, AsyncSaver* saver = nullptr);
/// Loads the step that find_step finds and compares every byte with the expected one. Throws if a byte differs. nullopt
/// if there is no step.
std::optional<Mark> load_known_step(const std::string& directory, const ProcessGroupPtr& group,
                                    const FindOptions& options = {});

}  // namespace megashard::testing
