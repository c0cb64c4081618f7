#pragma once

#include <cstdint>

namespace megashard {

/// Counts one finished part of long work, for the whole process; call from any thread. Ranks that wait in
/// gather_or_throw see whether this rank makes progress.
void note_progress();
/// Number of parts finished by this process.
int64_t parts_done();

/// Records that another rank has answered that it is working.
void note_answer();
/// Number of parts and answers; constant while nothing makes progress.
int64_t progress_seen();

}  // namespace megashard
