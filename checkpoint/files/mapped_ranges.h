#pragma once

#include <cstdint>

namespace megashard {

/// Bytes of a file that are mapped into memory. `path` and the mapping must stay until forget_mapped_range().
void note_mapped_range(const char* path, const void* begin, int64_t bytes);
void forget_mapped_range(const void* begin);

/// From now on, who touches noted bytes that the file has no more (somebody has made it shorter), or that its disk does
/// not give, ends by `end`, instead of by SIGBUS without a word. It gets one line, which names the file, and must not
/// return; it runs in a signal handler, on the thread that touched them: async-signal-safe functions only. Other causes
/// of SIGBUS do what they did before.
void end_at_lost_bytes(void (*end)(const char* message));

}  // namespace megashard
