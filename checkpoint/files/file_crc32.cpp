#include "checkpoint/files/file_crc32.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "checkpoint/files/crc32.h"

namespace megashard {
namespace {

constexpr int64_t kCheckedBytes = 4 << 20;
constexpr int64_t kMostCheckers = 4;  // requests in flight, as of read_queue.h

}  // namespace

uint32_t crc32_of(const InputFile& file, int64_t offset, int64_t bytes) {
  std::atomic<int64_t> next = 0;
  std::atomic<uint32_t> sum = 0;
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      std::vector<char> block(static_cast<size_t>(std::min(bytes, kCheckedBytes)));
      for (int64_t begin = next.fetch_add(kCheckedBytes); begin < bytes;
           begin = next.fetch_add(kCheckedBytes)) {
        const auto part = std::min(kCheckedBytes, bytes - begin);
        file.read_at(block.data(), part, offset + begin);
        sum ^= crc32_combine(crc32(0, block.data(), part), 0, bytes - begin - part);
      }
    } catch (...) {
      next = bytes;
      const std::lock_guard lock(mutex);
      if (failure == nullptr) failure = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < std::min(kMostCheckers, bytes / kCheckedBytes); ++i)
    others.emplace_back(work);
  work();
  for (auto& thread : others) thread.join();
  if (failure != nullptr) std::rethrow_exception(failure);
  return sum;
}

}  // namespace megashard
