#pragma once

#include <cstdint>

#include "checkpoint/files/file_io.h"

namespace megashard {

/// CRC-32 of a stretch of a file, which a few threads read in large blocks.
uint32_t crc32_of(const InputFile& file, int64_t offset, int64_t bytes);

}  // namespace megashard
