#pragma once

#include <cstdint>

namespace megashard {

/// CRC-32 of zip and gzip, continued from `crc` (0 at first). By carry-less multiplication where
/// the processor has it, else by tables.
uint32_t crc32(uint32_t crc, const void* data, int64_t bytes);
/// The same by tables alone; what the fast way is tested against.
uint32_t crc32_by_tables(uint32_t crc, const void* data, int64_t bytes);
/// Copies `bytes` and continues their checksum while they are in the cache.
uint32_t copy_with_crc32(void* to, const void* from, int64_t bytes, uint32_t crc);

/// The checksum of two parts behind each other, from those of the parts.
uint32_t crc32_combine(uint32_t first, uint32_t second, int64_t second_bytes);

}  // namespace megashard
