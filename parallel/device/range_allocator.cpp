#include "parallel/device/range_allocator.h"

#include <algorithm>
#include <iterator>

namespace megashard {
namespace {

constexpr size_t kUnit = 64;                  // LibTorch's alignment
constexpr size_t kRecent = size_t{16} << 20;  // bytes kept for reuse at the same size: about a cache

size_t in_units(size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

}  // namespace

size_t RangeAllocator::take(size_t bytes) {
  bytes = in_units(bytes);
  const auto latest =
      std::find_if(recent_.rbegin(), recent_.rend(), [bytes](const Part& part) { return part.bytes == bytes; });
  if (latest != recent_.rend()) {
    const size_t offset = latest->offset;
    recent_.erase(std::next(latest).base());
    recent_bytes_ -= bytes;
    return offset;
  }
  auto smallest = by_size_.lower_bound({bytes, 0});
  if (smallest == by_size_.end()) {
    for (const Part& part : std::exchange(recent_, {})) join(part);
    recent_bytes_ = 0;
    smallest = by_size_.lower_bound({bytes, 0});
  }
  if (smallest == by_size_.end()) return grow(bytes);
  const auto [size, offset] = *smallest;
  remove(free_.find(offset));
  if (size > bytes) add({offset + bytes, size - bytes});
  return offset;
}

void RangeAllocator::give_back(size_t offset, size_t bytes) {
  bytes = in_units(bytes);
  recent_.push_back({offset, bytes});
  recent_bytes_ += bytes;
  auto kept = recent_.begin();
  for (; recent_bytes_ > kRecent; ++kept) {
    join(*kept);
    recent_bytes_ -= kept->bytes;
  }
  recent_.erase(recent_.begin(), kept);
}

size_t RangeAllocator::grow(size_t bytes) {
  size_t begin = end_;
  if (!free_.empty()) {
    const auto last = std::prev(free_.end());
    if (last->first + last->second == end_) {
      begin = last->first;
      remove(last);
    }
  }
  end_ = begin + bytes;
  return begin;
}

/// Merges a part with adjacent free parts.
void RangeAllocator::join(const Part& part) {
  auto [offset, bytes] = part;
  auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      next = remove(before);
    }
  }
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    remove(next);
  }
  add({offset, bytes});
}

void RangeAllocator::add(const Part& part) {
  free_.emplace(part.offset, part.bytes);
  by_size_.emplace(part.bytes, part.offset);
}

RangeAllocator::Free::iterator RangeAllocator::remove(Free::iterator part) {
  by_size_.erase({part->second, part->first});
  return free_.erase(part);
}

}  // namespace megashard
