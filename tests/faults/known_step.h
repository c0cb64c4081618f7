#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/checkpoint.h"
#include "checkpoint/steps/async_saver.h"
#include "checkpoint/steps/find_step.h"

namespace megashard::testing {

/// Which save it was: steps are saved again, with other bytes. Every fifth iteration has 17 MiB:
/// more than two blocks of block_writer.h from one rank, and more than one from each of two.
struct Mark {
  int64_t iteration = 0;
  int64_t generation = 0;

  friend auto operator<=>(const Mark&, const Mark&) = default;
};

/// Saves tensors and values all of whose bytes follow from the mark. With a saver, beside a
/// training that changes the tensors meanwhile; returns when the step is there all the same.
void save_known_step(const std::string& directory, Mark mark, const ProcessGroupPtr& group,
                     const SaveOptions& options = {}, AsyncSaver* saver = nullptr);
/// Loads what find_step finds and compares every byte with what its mark says; throws when one
/// differs. Nothing: there is no step.
std::optional<Mark> load_known_step(const std::string& directory, const ProcessGroupPtr& group,
                                    const FindOptions& options = {});

}  // namespace megashard::testing
