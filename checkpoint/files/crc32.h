#pragma once

#include <cstdint>

#include "checkpoint/files/file_io.h"
#include "checkpoint/files/work_progress.h"

namespace megashard {

/// CRC-32 of zip and gzip, continued from `crc` (initially 0).
uint32_t crc32(uint32_t crc, const void* data, int64_t bytes);
/// Copies `bytes` and updates their checksum while they are in the cache.
uint32_t copy_with_crc32(void* to, const void* from, int64_t bytes, uint32_t crc);
/// Checksum of two concatenated parts from the checksums of both.
uint32_t join_crc32(uint32_t first, uint32_t second, int64_t second_bytes);
/// CRC-32 of a range of a file, which several threads read in large blocks. Adds the bytes read to `work`.
uint32_t crc32_of(const InputFile& file, int64_t offset, int64_t bytes, LongWork* work = nullptr);

}  // namespace megashard
