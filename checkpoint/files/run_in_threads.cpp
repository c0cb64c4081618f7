#include "checkpoint/files/run_in_threads.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <utility>

namespace megashard {

std::vector<std::thread> start_threads(int64_t count, const std::function<void()>& work) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(std::max<int64_t>(count, 0)));
  try {
    for (int64_t i = 0; i < count; ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads available
  }
  return threads;
}

void run_in_threads(int64_t threads, int64_t items, const std::function<void(const NextItem& next)>& work) {
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
  auto others = start_threads(threads - 1, guarded);
  guarded();
  for (auto& thread : others) thread.join();
  if (failure != nullptr) std::rethrow_exception(failure);
}

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
