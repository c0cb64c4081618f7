#pragma once

#include <cstdint>

namespace megashard {

/// CRC-32 of zip and gzip, continued from `crc` (initially 0). Uses carry-less multiplication if the CPU supports it,
/// else tables.
uint32_t crc32(uint32_t crc, const void* data, int64_t bytes);
/// Table-only version, the reference in tests.
uint32_t crc32_by_tables(uint32_t crc, const void* data, int64_t bytes);
/// Copies `bytes` and updates their checksum while they are in the cache.
uint32_t copy_with_crc32(void* to, const void* from, int64_t bytes, uint32_t crc);

/// Checksum of two concatenated parts from the checksums of both.
uint32_t crc32_combine(uint32_t first, uint32_t second, int64_t second_bytes);

}  // namespace megashard
