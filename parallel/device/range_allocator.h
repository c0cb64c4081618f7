#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace megashard {

/// Hands out parts of a range that grows at its end. A part is the one of the same size that came back last, if that
/// was not long ago: a CPU's caches have it. Else it is the beginning of the smallest free part that holds it, or of
/// the lowest of these. What came back longer ago has joined its free neighbours, and before the range grows, all has.
/// It counts bytes and has no memory: where the range lies is its owner's affair (buffer_pool.h,
/// sim/resident_blocks.h). Not thread safe.
class RangeAllocator {
 public:
  /// Where a part of so many bytes, rounded up to 64, begins.
  size_t take(size_t bytes);
  /// As it was taken.
  void give_back(size_t offset, size_t bytes);
  /// The most that was ever in use, with the holes in it.
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

  std::vector<Part> recent_;  // came back last, the latest at the end
  size_t recent_bytes_ = 0;
  Free free_;
  std::set<std::pair<size_t, size_t>> by_size_;  // the same: bytes, offset
  size_t end_ = 0;
};

}  // namespace megashard
