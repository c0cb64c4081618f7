#pragma once

#include <cstdint>

namespace megashard {

/// Called by works that take long, after each part, from any thread: counts for all works of this process. Ranks that
/// wait for this one's work (gather_or_throw) hear whether it moves.
void note_progress();
/// Parts that this process has done.
int64_t parts_done();

/// Another rank has answered that it works.
void note_answer();
/// Parts and answers: unchanged while nothing moves.
int64_t progress_seen();

}  // namespace megashard
