#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace megashard {

/// Allocates parts of a range that grows at its end. Reuses the most recently freed part of the same size if it was
/// freed recently (it is in the CPU's caches), else the start of the smallest (then lowest) free part that is large
/// enough. Parts freed longer ago merge with free neighbours; before the range grows, all do. Only counts bytes: its
/// owner has the memory (buffer_pool.h, sim/block_pools.h). Not thread safe.
class RangeAllocator {
 public:
  /// Returns the offset of a part of `bytes` bytes, rounded up to 64.
  size_t take(size_t bytes);
  /// Frees a part; same `bytes` as in take().
  void give_back(size_t offset, size_t bytes);
  /// Peak extent of the range, holes included.
  size_t end() const { return end_; }

 private:
  struct Part {
    size_t offset, bytes;
  };
  using Free = std::map<size_t, size_t>;  // bytes by offset
  size_t grow(size_t bytes);
  void join(const Part& part);
  void add(const Part& part);
  Free::iterator remove(Free::iterator part);

  std::vector<Part> recent_;  // freed recently, the latest at the end
  size_t recent_bytes_ = 0;
  Free free_;
  std::set<std::pair<size_t, size_t>> by_size_;  // free_ as (bytes, offset)
  size_t end_ = 0;
};

}  // namespace megashard
