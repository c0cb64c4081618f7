#include "parallel/sim/block_pools.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <tuple>

#include "parallel/device/buffer_pool.h"
#include "parallel/device/device_plan.h"
#include "parallel/sim/arena.h"
#include "parallel/sim/settings.h"
#include "parallel/sim/sim_device.h"

namespace megashard::sim {

void ResidentBlocks::take(const void* address, size_t bytes) {
  Block block{.bytes = bytes, .offset = 0};
  if (bytes < kPooledFrom) {
    small_ += static_cast<int64_t>(bytes);
    most_small_ = std::max(most_small_, small_);
  } else {
    block.offset = large_.take(bytes);
  }
  held_.insert_or_assign(address, block);
}

void ResidentBlocks::give_back(const void* address) {
  const auto found = held_.find(address);
  if (found == held_.end()) return;
  const auto [bytes, offset] = found->second;
  held_.erase(found);
  if (bytes < kPooledFrom) {
    small_ -= static_cast<int64_t>(bytes);
  } else {
    large_.give_back(offset, bytes);
  }
}

namespace {

// From c10/cuda/CUDACachingAllocator.cpp.
constexpr size_t kMinBlock = 512;
constexpr size_t kSmall = size_t{1} << 20;
constexpr size_t kSmallSegment = size_t{2} << 20;
constexpr size_t kLargeSegment = size_t{20} << 20;
constexpr size_t kOwnSegment = size_t{10} << 20;
constexpr size_t kSegmentStep = size_t{2} << 20;

constexpr size_t kExpandableAddresses = size_t{64} << 30;

size_t rounded(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

size_t segment_size(size_t size) {
  if (size <= kSmall) return kSmallSegment;
  return size < kOwnSegment ? kLargeSegment : rounded(size, kSegmentStep);
}

constexpr int kUndefinedByte = 0xFF;  // all ones: a NaN in every floating dtype

}  // namespace

struct BlockPools::Block {
  char* address;
  size_t size;
  std::list<Segment>::iterator segment;
  Block* before = nullptr;  // neighbours in the segment
  Block* after = nullptr;
  bool in_use = false;
  size_t requested = 0;
  std::set<c10::StreamId> streams;  // other streams that used it
  std::vector<Event> events;        // it is free after these
  Recording::Place handed_out;
};

bool BlockPools::SmallerFirst::operator()(const Block* a, const Block* b) const {
  return std::tie(a->size, a->address) < std::tie(b->size, b->address);
}

SimDevice& BlockPools::device() const { return SimDevice::at(device_); }

void BlockPools::count(bool small, int64_t allocations, int64_t bytes, int64_t requested) {
  const auto add = [](c10::CachingAllocator::Stat& stat, int64_t amount) {
    amount >= 0 ? stat.increase(static_cast<size_t>(amount)) : stat.decrease(static_cast<size_t>(-amount));
  };
  for (const size_t kind : {size_t{0}, small ? size_t{1} : size_t{2}}) {
    add(stats_.allocation[kind], allocations);
    add(stats_.active[kind], allocations);
    add(stats_.allocated_bytes[kind], bytes);
    add(stats_.active_bytes[kind], bytes);
    add(stats_.requested_bytes[kind], requested);
  }
}

char* BlockPools::allocate(size_t bytes, c10::StreamId stream) {
  if (bytes == 0) return nullptr;
  return_waiting(false);
  const size_t size = rounded(bytes, kMinBlock);
  const Key key{pool_, size <= kSmall, stream};
  Block* block = free_block(key, size);
  if (block == nullptr) block = new_block(key, size);
  if (block == nullptr) {
    ++stats_.num_alloc_retries;
    empty_cache();
    block = free_block(key, size);
    if (block == nullptr) block = new_block(key, size);
  }
  if (block == nullptr) out_of_memory(bytes);
  split(block, size);
  block->in_use = true;
  block->requested = bytes;
  blocks_[block->address] = block;
  count(std::get<1>(key), 1, static_cast<int64_t>(block->size), static_cast<int64_t>(bytes));
  if (settings().shapes) {
    int64_t taken = stats_.allocated_bytes[0].current;
    if (acts_as_cpu({c10::kCUDA})) {
      resident_.take(block->address, bytes);
      taken = resident_.bytes();
    }
    if (taken > told_peak_ && on_peak_) {
      told_peak_ = taken;
      on_peak_(taken);
    }
    return block->address;
  }
  char* mirror = Arena::get().mirror(block->address);
  std::memset(mirror, kUndefinedByte, block->size);
  block->handed_out =
      device().recording.add(agent_of(stream), *interned("allocation"), {},
                             [mirror, size = block->size] { std::memset(mirror, kUndefinedByte, size); });
  device().log.hand_out(reinterpret_cast<uintptr_t>(block->address), block->size, device().recording.window());
  return block->address;
}

BlockPools::Block* BlockPools::free_block(const Key& key, size_t size) {
  auto& pool = free_[key];
  Block wanted{};
  wanted.size = size;
  wanted.address = nullptr;
  const auto found = pool.lower_bound(&wanted);
  if (found == pool.end()) return nullptr;
  Block* block = *found;
  pool.erase(found);
  return block;
}

BlockPools::Block* BlockPools::new_block(const Key& key, size_t size) {
  if (settings().expandable_segments && std::get<0>(key) == 0) return grow_expandable(key, size);
  const size_t bytes = segment_size(size);
  if (reserved_ + bytes > settings().capacity) return nullptr;
  char* address = Arena::get().take(device_, bytes);
  if (address == nullptr) return nullptr;
  reserved_ += bytes;
  const auto segment = segments_.insert(segments_.end(), Segment{address, bytes, bytes, key, nullptr});
  segment->first =
      new Block{.address = address, .size = bytes, .segment = segment, .streams = {}, .events = {}, .handed_out = {}};
  for (const size_t kind : {size_t{0}, std::get<1>(key) ? size_t{1} : size_t{2}}) {
    stats_.segment[kind].increase(1);
    stats_.reserved_bytes[kind].increase(bytes);
  }
  ++stats_.num_device_alloc;
  return segment->first;
}

/// One segment per stream and pool, which grows at its end.
BlockPools::Block* BlockPools::grow_expandable(const Key& key, size_t size) {
  const size_t step = std::get<1>(key) ? kSmallSegment : kLargeSegment;
  auto segment = std::find_if(segments_.begin(), segments_.end(),
                              [&](const Segment& each) { return each.key == key && each.addresses > each.mapped; });
  if (segment == segments_.end()) {
    char* address = Arena::get().take(device_, kExpandableAddresses);
    if (address == nullptr) return nullptr;
    segment = segments_.insert(segments_.end(), Segment{address, 0, kExpandableAddresses, key, nullptr});
    stats_.segment[0].increase(1);
  }
  Block* last = segment->first;
  while (last != nullptr && last->after != nullptr) last = last->after;
  const bool grows_last = last != nullptr && !last->in_use && last->events.empty();
  const size_t bytes = rounded(size - (grows_last ? last->size : 0), step);
  if (reserved_ + bytes > settings().capacity || segment->mapped + bytes > segment->addresses) return nullptr;
  auto* block = new Block{.address = segment->address + segment->mapped,
                          .size = bytes,
                          .segment = segment,
                          .streams = {},
                          .events = {},
                          .handed_out = {}};
  block->before = last;
  (last == nullptr ? segment->first : last->after) = block;
  segment->mapped += bytes;
  reserved_ += bytes;
  for (const size_t kind : {size_t{0}, std::get<1>(key) ? size_t{1} : size_t{2}})
    stats_.reserved_bytes[kind].increase(bytes);
  block = merge(block);
  free_[key].erase(block);
  return block;
}

void BlockPools::split(Block* block, size_t size) {
  const Key& key = block->segment->key;
  const size_t left = block->size - size;
  const bool small_steps = std::get<1>(key) || settings().expandable_segments;
  if (small_steps ? left < kMinBlock : left <= kSmall) return;
  auto* rest = new Block{.address = block->address + size,
                         .size = left,
                         .segment = block->segment,
                         .streams = {},
                         .events = {},
                         .handed_out = {}};
  rest->before = block;
  rest->after = block->after;
  if (rest->after != nullptr) rest->after->before = rest;
  block->after = rest;
  block->size = size;
  free_[key].insert(rest);
}

void BlockPools::free(char* address) {
  const auto found = blocks_.find(static_cast<const char*>(address));
  TORCH_INTERNAL_ASSERT(found != blocks_.end());
  Block* block = found->second;
  blocks_.erase(found);
  if (acts_as_cpu({c10::kCUDA})) resident_.give_back(address);
  count(std::get<1>(block->segment->key), -1, -static_cast<int64_t>(block->size),
        -static_cast<int64_t>(block->requested));
  for (const c10::StreamId stream : block->streams) device().record(block->events.emplace_back(), stream);
  block->streams.clear();
  block->events.empty() ? give_back(block) : waiting_.push_back(block);
}

void BlockPools::record_stream(const void* address, c10::StreamId stream) {
  const auto found = blocks_.find(static_cast<const char*>(address));
  TORCH_CHECK(found != blocks_.end(), "record_stream of memory that the device's allocator did not hand out");
  if (stream != std::get<2>(found->second->segment->key)) found->second->streams.insert(stream);
}

/// Frees waiting blocks whose events are complete. A GPU would report completion at some time; here an event is
/// complete when the host must know it.
void BlockPools::return_waiting(bool after_waiting_for_all) {
  std::erase_if(waiting_, [&](Block* block) {
    std::erase_if(block->events,
                  [&](const Event& event) { return after_waiting_for_all || device().host_has_seen(event); });
    if (!block->events.empty()) return false;
    give_back(block);
    return true;
  });
}

void BlockPools::give_back(Block* block) {
  block->in_use = false;
  if (!settings().shapes) {
    std::memset(Arena::get().mirror(block->address), kUndefinedByte, block->size);
    device().log.hand_out(reinterpret_cast<uintptr_t>(block->address), block->size, device().recording.window());
  }
  merge(block);
}

/// Merges a block with its free neighbours and adds the result to the free blocks.
BlockPools::Block* BlockPools::merge(Block* block) {
  auto& pool = free_[block->segment->key];
  const auto swallows = [&](Block* first, Block* second) {
    first->size += second->size;
    first->after = second->after;
    if (first->after != nullptr) first->after->before = first;
  };
  const auto is_free = [](const Block* other) { return other != nullptr && !other->in_use && other->events.empty(); };
  if (Block* before = block->before; is_free(before)) {
    pool.erase(before);
    swallows(before, block);
    delete block;
    block = before;
  }
  if (Block* after = block->after; is_free(after)) {
    pool.erase(after);
    swallows(block, after);
    delete after;
  }
  pool.insert(block);
  return block;
}

/// Frees unused segments; only then does a device wait for all running work.
void BlockPools::empty_cache() {
  for (const Block* block : waiting_) {
    for (const Event& event : block->events) device().host_waits_for_event(event, "cudaEventSynchronize");
  }
  return_waiting(true);
  const auto cached = [](const Segment& segment) { return std::get<0>(segment.key) == 0; };
  if (std::any_of(segments_.begin(), segments_.end(),
                  [&](const Segment& each) { return cached(each) && is_free(each); }))
    device().host_waits_for_all("cudaFree");
  release_segments(cached);
}

bool BlockPools::is_free(const Segment& segment) {
  const Block* first = segment.first;
  return first != nullptr && !first->in_use && first->events.empty() && first->after == nullptr;
}

void BlockPools::release_pool(uint64_t pool) {
  release_segments([pool](const Segment& segment) { return std::get<0>(segment.key) == pool; });
}

void BlockPools::release_segments(const std::function<bool(const Segment&)>& which) {
  for (auto segment = segments_.begin(); segment != segments_.end();) {
    Block* first = segment->first;
    if (!which(*segment) || !is_free(*segment)) {
      ++segment;
      continue;
    }
    free_[segment->key].erase(first);
    device().log.forget(reinterpret_cast<uintptr_t>(segment->address), segment->mapped);
    Arena::get().give_back(segment->address, segment->addresses);
    reserved_ -= segment->mapped;
    for (const size_t kind : {size_t{0}, std::get<1>(segment->key) ? size_t{1} : size_t{2}}) {
      stats_.segment[kind].decrease(1);
      stats_.reserved_bytes[kind].decrease(segment->mapped);
    }
    ++stats_.num_device_free;
    delete first;
    segment = segments_.erase(segment);
  }
}

void BlockPools::out_of_memory(size_t bytes) {
  ++stats_.num_ooms;
  const auto mib = [](size_t amount) { return c10::str(amount >> 20, " MiB"); };
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", mib(bytes), ". Simulated GPU ",
                   device_, " has a total capacity of ", mib(settings().capacity), " of which ",
                   mib(settings().capacity - reserved_), " is free; ",
                   mib(static_cast<size_t>(stats_.allocated_bytes[0].current)), " is allocated");
}

void BlockPools::over_blocks(const std::function<void(char*, size_t)>& visit) const {
  for (const auto& [address, block] : blocks_) visit(block->address, block->size);
  for (const Block* block : waiting_) visit(block->address, block->size);
}

Recording::Place BlockPools::handed_out(const void* address) const {
  const auto* wanted = static_cast<const char*>(address);
  auto after = blocks_.upper_bound(wanted);
  if (after == blocks_.begin()) return {};
  const Block* block = std::prev(after)->second;
  return wanted < block->address + block->size ? block->handed_out : Recording::Place{};
}

}  // namespace megashard::sim
