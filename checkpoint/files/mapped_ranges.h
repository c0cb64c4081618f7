#pragma once

#include <cstdint>

namespace megashard {

/// Registers bytes of a file that are mapped into memory. `path` and the mapping must outlive forget_mapped_range().
void note_mapped_range(const char* path, const void* begin, int64_t bytes);
void forget_mapped_range(const void* begin);

/// Installs a SIGBUS handler. Access to registered bytes that the file has lost (it was truncated) or that its disk
/// cannot read calls `end` with one line that names the file. `end` must not return; it runs in the signal handler on
/// the accessing thread, so it may call async-signal-safe functions only. Other causes of SIGBUS keep their previous
/// handler.
void end_at_lost_bytes(void (*end)(const char* message));

}  // namespace megashard
