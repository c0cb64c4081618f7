#pragma once

#include <cstdint>
#include <functional>
#include <optional>

namespace megashard {

/// Gives each of 0, 1, ..., items - 1 to one of the threads; nothing when there are no more.
using NextItem = std::function<std::optional<int64_t>()>;
/// Runs `work` in that many threads, of which this one is the first, or in as many as the system
/// grants. A failure ends the others after the item that they are at, and the first is thrown when
/// all have ended.
void run_in_threads(int64_t threads, int64_t items,
                    const std::function<void(const NextItem& next)>& work);

/// For files: requests in flight beyond these make no disk faster.
inline constexpr int64_t kMostReaders = 4;

}  // namespace megashard
