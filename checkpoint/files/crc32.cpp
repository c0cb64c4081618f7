#include "checkpoint/files/crc32.h"

#include <libdeflate.h>
#include <zlib.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "checkpoint/files/run_in_threads.h"

namespace megashard {
namespace {

constexpr int64_t kCopiedBytes = 32 << 10;  // fits the L1 cache
constexpr int64_t kCheckedBytes = 4 << 20;

}  // namespace

// libdeflate computes a checksum at twice the speed of zlib or more, but cannot join two.
uint32_t crc32(uint32_t crc, const void* data, int64_t bytes) {
  return bytes == 0 ? crc : libdeflate_crc32(crc, data, static_cast<size_t>(bytes));  // it resets crc for a null `data`
}

uint32_t copy_with_crc32(void* to, const void* from, int64_t bytes, uint32_t crc) {
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  while (bytes > 0) {
    const auto part = std::min(bytes, kCopiedBytes);
    std::memcpy(target, source, static_cast<size_t>(part));
    crc = crc32(crc, target, part);
    target += part;
    source += part;
    bytes -= part;
  }
  return crc;
}

uint32_t join_crc32(uint32_t first, uint32_t second, int64_t second_bytes) {
  return static_cast<uint32_t>(::crc32_combine(first, second, second_bytes));
}

uint32_t crc32_of(const InputFile& file, int64_t offset, int64_t bytes, LongWork* work) {
  std::atomic<uint32_t> sum = 0;
  const auto blocks = (bytes + kCheckedBytes - 1) / kCheckedBytes;
  run_in_threads(std::min(bytes / kCheckedBytes, kMaxReaders), blocks, [&](const NextItem& next) {
    std::vector<char> block(static_cast<size_t>(std::min(bytes, kCheckedBytes)));
    while (const auto number = next()) {
      const auto begin = *number * kCheckedBytes;
      const auto part = std::min(kCheckedBytes, bytes - begin);
      file.read_at(block.data(), part, offset + begin);
      sum ^= join_crc32(crc32(0, block.data(), part), 0, bytes - begin - part);
      if (work != nullptr) work->add(part);
    }
  });
  return sum;
}

}  // namespace megashard
