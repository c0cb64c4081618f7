#include "checkpoint/files/read_queue.h"

#include <algorithm>
#include <utility>

#include "checkpoint/files/run_in_threads.h"

namespace megashard {
namespace {

constexpr int64_t kMaxReadBytes = 8 << 20;
constexpr int64_t kMinBytesPerReader = 2 << 20;

}  // namespace

void ReadQueue::add(const InputFile& file, void* into, int64_t bytes, int64_t offset) {
  bytes_ += bytes;
  auto* target = static_cast<char*>(into);
  for (int64_t begin = 0; begin < bytes; begin += kMaxReadBytes) {
    const auto part = std::min(kMaxReadBytes, bytes - begin);
    reads_.push_back({&file, target + begin, part, offset + begin});
  }
}

void ReadQueue::run(LongWork* work) {
  const auto reads = std::exchange(reads_, {});
  const auto bytes = std::exchange(bytes_, 0);
  const auto items = static_cast<int64_t>(reads.size());
  run_in_threads(std::min(bytes / kMinBytesPerReader, kMaxReaders), items, [&](const NextItem& next) {
    while (const auto number = next()) {
      const auto& read = reads[static_cast<size_t>(*number)];
      read.file->read_at(read.into, read.bytes, read.offset);
      if (work != nullptr) work->add(read.bytes);
    }
  });
}

}  // namespace megashard
