#include "checkpoint/files/file_crc32.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "checkpoint/files/crc32.h"
#include "checkpoint/files/run_in_threads.h"

namespace megashard {
namespace {

constexpr int64_t kCheckedBytes = 4 << 20;

}  // namespace

uint32_t crc32_of(const InputFile& file, int64_t offset, int64_t bytes, LongWork* work) {
  std::atomic<uint32_t> sum = 0;
  const auto blocks = (bytes + kCheckedBytes - 1) / kCheckedBytes;
  run_in_threads(std::min(bytes / kCheckedBytes, kMaxReaders), blocks, [&](const NextItem& next) {
    std::vector<char> block(static_cast<size_t>(std::min(bytes, kCheckedBytes)));
    while (const auto number = next()) {
      const auto begin = *number * kCheckedBytes;
      const auto part = std::min(kCheckedBytes, bytes - begin);
      file.read_at(block.data(), part, offset + begin);
      sum ^= crc32_combine(crc32(0, block.data(), part), 0, bytes - begin - part);
      if (work != nullptr) work->add(part);
    }
  });
  return sum;
}

}  // namespace megashard
