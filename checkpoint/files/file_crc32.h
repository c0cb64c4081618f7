#pragma once

#include <cstdint>

#include "checkpoint/files/file_io.h"
#include "checkpoint/files/work_progress.h"

namespace megashard {

/// CRC-32 of a range of a file, which several threads read in large blocks. Adds the bytes read to `work`.
uint32_t crc32_of(const InputFile& file, int64_t offset, int64_t bytes, LongWork* work = nullptr);

}  // namespace megashard
