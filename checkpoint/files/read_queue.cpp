#include "checkpoint/files/read_queue.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace megashard {
namespace {

constexpr int64_t kMostBytesARead = 8 << 20;
constexpr int64_t kLeastBytesAReader = 2 << 20;
constexpr int64_t kMostReaders = 4;

}  // namespace

void ReadQueue::add(const InputFile& file, void* into, int64_t bytes, int64_t offset) {
  auto* target = static_cast<char*>(into);
  for (int64_t begin = 0; begin < bytes; begin += kMostBytesARead) {
    const auto part = std::min(kMostBytesARead, bytes - begin);
    reads_.push_back({&file, target + begin, part, offset + begin});
  }
}

void ReadQueue::run() {
  const auto reads = std::exchange(reads_, {});
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      for (size_t i = next++; i < reads.size(); i = next++) {
        reads[i].file->read_at(reads[i].into, reads[i].bytes, reads[i].offset);
      }
    } catch (...) {
      next = reads.size();
      const std::lock_guard lock(mutex);
      if (failure == nullptr) failure = std::current_exception();
    }
  };
  int64_t bytes = 0;
  for (const auto& read : reads) bytes += read.bytes;
  std::vector<std::thread> others;
  for (int64_t i = 1; i < std::min(kMostReaders, bytes / kLeastBytesAReader); ++i)
    others.emplace_back(work);
  work();
  for (auto& thread : others) thread.join();
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace megashard
