#include "checkpoint/files/run_in_threads.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace megashard {

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
  others.reserve(static_cast<size_t>(std::max<int64_t>(threads, 1)));
  try {
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(guarded);
  } catch (const std::exception&) {  // there can be no more: fewer do the work
  }
  guarded();
  for (auto& thread : others) thread.join();
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace megashard
