#pragma once

#include <cstdint>

namespace megashard {

/// CRC-32 of zip and gzip, continued from `crc` (0 at first).
uint32_t crc32(uint32_t crc, const void* data, int64_t bytes);

}  // namespace megashard
