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
constexpr int64_t kMostThreads = 4;  // requests in flight

}  // namespace

void run_in_threads(int64_t threads, int64_t items,
                    const std::function<void(const NextItem& next)>& work) {
  std::atomic<int64_t> following = 0;
  std::mutex mutex;
  std::exception_ptr failure;
  const NextItem next = [&]() -> std::optional<int64_t> {
    const auto item = following++;
    return item < items ? std::optional(item) : std::nullopt;
  };
  const auto guarded = [&] {
    try {
      work(next);
    } catch (...) {
      following = items;
      const std::lock_guard lock(mutex);
      if (failure == nullptr) failure = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  others.reserve(kMostThreads);
  try {
    for (int64_t i = 1; i < std::min(threads, kMostThreads); ++i) others.emplace_back(guarded);
  } catch (const std::exception&) {  // there can be no more: fewer do the work
  }
  guarded();
  for (auto& thread : others) thread.join();
  if (failure != nullptr) std::rethrow_exception(failure);
}

void ReadQueue::add(const InputFile& file, void* into, int64_t bytes, int64_t offset) {
  auto* target = static_cast<char*>(into);
  for (int64_t begin = 0; begin < bytes; begin += kMostBytesARead) {
    const auto part = std::min(kMostBytesARead, bytes - begin);
    reads_.push_back({&file, target + begin, part, offset + begin});
  }
}

void ReadQueue::run() {
  const auto reads = std::exchange(reads_, {});
  int64_t bytes = 0;
  for (const auto& read : reads) bytes += read.bytes;
  const auto items = static_cast<int64_t>(reads.size());
  run_in_threads(bytes / kLeastBytesAReader, items, [&](const NextItem& next) {
    while (const auto number = next()) {
      const auto& read = reads[static_cast<size_t>(*number)];
      read.file->read_at(read.into, read.bytes, read.offset);
    }
  });
}

}  // namespace megashard
