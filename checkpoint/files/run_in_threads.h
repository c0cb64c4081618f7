#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

namespace megashard {

/// Threads that run `work`: as many as that, or as the system grants, maybe none. Whoever starts
/// them does the work itself where there is none.
std::vector<std::thread> start_threads(int64_t count, const std::function<void()>& work);

/// Gives each of 0, 1, ..., items - 1 to one of the threads; nothing when there are no more.
using NextItem = std::function<std::optional<int64_t>()>;
/// Runs `work` in that many threads, of which this one is the first, or in as many as the system
/// grants. A failure ends the others after the item that they are at, and the first is thrown when
/// all have ended.
void run_in_threads(int64_t threads, int64_t items, const std::function<void(const NextItem& next)>& work);

/// For files: requests in flight beyond these make no disk faster.
inline constexpr int64_t kMaxReaders = 4;

}  // namespace megashard
