#pragma once

#include <cstdint>

#include "checkpoint/files/file_io.h"
#include "checkpoint/files/work_progress.h"

namespace megashard {

/// CRC-32 of a stretch of a file, which a few threads read in large blocks. Where they are part of a work, they
/// are added to it.
uint32_t crc32_of(const InputFile& file, int64_t offset, int64_t bytes, LongWork* work = nullptr);

}  // namespace megashard
