#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "parallel/device/range_allocator.h"
#include "parallel/sim/recording.h"

namespace megashard::sim {

/// Resident memory of tensors in a plan of a CPU: allocates like PooledLargeTensors and cpu_buffer_pool(), but without
/// memory. A page becomes resident when first touched and stays.
class ResidentBlocks {
 public:
  void take(const void* address, size_t bytes);
  void give_back(const void* address);
  int64_t bytes() const { return static_cast<int64_t>(large_.end()) + most_small_; }

 private:
  struct Block {
    size_t bytes, offset;
  };
  std::unordered_map<const void*, Block> held_;
  RangeAllocator large_;
  int64_t small_ = 0, most_small_ = 0;  // in the C library's heap
};

class SimDevice;

/// Memory of one device, allocated as in c10's CUDACachingAllocator: sizes are rounded to 512 bytes; up to 1 MiB come
/// from 2 MiB segments, larger ones from 20 MiB segments or, from 10 MiB on, from segments of the size rounded to 2
/// MiB. A block belongs to the stream that was current when its segment was created; free neighbours merge. Call under
/// the device's lock.
class BlockPools {
 public:
  explicit BlockPools(int device) : device_(device) {}
  BlockPools(const BlockPools&) = delete;
  BlockPools& operator=(const BlockPools&) = delete;

  /// The bytes are NaN in every floating dtype. Throws c10::OutOfMemoryError beyond the capacity.
  char* allocate(size_t bytes, c10::StreamId stream);
  void free(char* address);
  /// Delays the reuse of this block after free() until the stream has finished all work enqueued by then.
  void record_stream(const void* address, c10::StreamId stream);
  void empty_cache();  ///< frees segments without used blocks

  /// Until the next call, segments and blocks belong to this pool only. 0: the default pool.
  void take_from_pool(uint64_t pool) { pool_ = pool; }
  void release_pool(uint64_t pool);

  c10::CachingDeviceAllocator::DeviceStats& stats() { return stats_; }
  /// With shapes: called with DevicePlan::observe_peak's bytes.
  void on_peak(std::function<void(int64_t bytes)> observer) {
    on_peak_ = std::move(observer);
    told_peak_ = 0;
  }
  /// Call before a plan: drops what the previous one kept.
  void forget_resident() { resident_ = {}; }
  size_t reserved() const { return reserved_; }
  void over_blocks(const std::function<void(char* address, size_t bytes)>& visit) const;  ///< used blocks
  /// Place in the recording at which the block of an address becomes undefined.
  Recording::Place handed_out(const void* address) const;

 private:
  struct Block;
  using Key = std::tuple<uint64_t, bool, c10::StreamId>;  // pool, small, stream
  struct Segment {
    char* address;
    size_t mapped;     // bytes mapped by the device
    size_t addresses;  // maximum size of an expandable segment
    Key key;
    Block* first;
  };
  struct SmallerFirst {
    bool operator()(const Block* a, const Block* b) const;
  };

  Block* free_block(const Key& key, size_t size);
  Block* new_block(const Key& key, size_t size);
  Block* grow_expandable(const Key& key, size_t size);
  void split(Block* block, size_t size);
  void give_back(Block* block);
  Block* merge(Block* block);
  void return_waiting(bool after_waiting_for_all);
  static bool is_free(const Segment& segment);
  void release_segments(const std::function<bool(const Segment&)>& which);
  [[noreturn]] void out_of_memory(size_t bytes);
  void count(bool small, int64_t allocations, int64_t bytes, int64_t requested);

  SimDevice& device() const;

  int device_;
  uint64_t pool_ = 0;
  size_t reserved_ = 0;
  std::map<Key, std::set<Block*, SmallerFirst>> free_;
  std::list<Segment> segments_;
  std::map<const char*, Block*> blocks_;  // used, by address
  std::vector<Block*> waiting_;           // freed, but other streams may still use them
  c10::CachingDeviceAllocator::DeviceStats stats_;
  int64_t told_peak_ = 0;
  std::function<void(int64_t bytes)> on_peak_;
  ResidentBlocks resident_;  // for a plan of a CPU
};

}  // namespace megashard::sim
