#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "parallel/sim/recording.h"
#include "parallel/sim/resident_blocks.h"

namespace megashard::sim {

class SimDevice;

/// The memory of one device, handed out as c10's CUDACachingAllocator does: sizes rounded to 512
/// bytes; up to 1 MiB from segments of 2 MiB, above from segments of 20 MiB or, from 10 MiB on, of
/// the size rounded to 2 MiB; a block belongs to the stream that was current when its segment was
/// made; neighbours that are free are merged. Under the lock of the device.
class BlockPools {
 public:
  explicit BlockPools(int device) : device_(device) {}
  BlockPools(const BlockPools&) = delete;
  BlockPools& operator=(const BlockPools&) = delete;

  /// Bytes that are NaN in every floating dtype. Throws c10::OutOfMemoryError past the capacity.
  char* allocate(size_t bytes, c10::StreamId stream);
  void free(char* address);
  /// A free block of this address waits until the stream has done what is enqueued at its free().
  void record_stream(const void* address, c10::StreamId stream);
  void empty_cache();  ///< gives back the segments that are free as a whole

  /// Until the next call, segments are made for, and blocks taken from, this pool alone. 0: the
  /// ordinary one.
  void take_from_pool(uint64_t pool) { pool_ = pool; }
  void release_pool(uint64_t pool);

  c10::CachingDeviceAllocator::DeviceStats& stats() { return stats_; }
  /// Of shapes: called with DevicePlan::observe_peak's bytes.
  void on_peak(std::function<void(int64_t bytes)> observer) {
    on_peak_ = std::move(observer);
    told_peak_ = 0;
  }
  /// Before a plan: what the one before kept is gone.
  void forget_resident() { resident_ = {}; }
  size_t reserved() const { return reserved_; }
  void over_blocks(const std::function<void(char* address, size_t bytes)>& visit) const;  ///< in use
  /// Where the recording makes the block undefined that holds an address.
  Recording::Place handed_out(const void* address) const;

 private:
  struct Block;
  using Key = std::tuple<uint64_t, bool, c10::StreamId>;  // pool, small, stream
  struct Segment {
    char* address;
    size_t mapped;     // bytes that the device has given
    size_t addresses;  // expandable segments may grow to so many
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
  std::map<const char*, Block*> blocks_;  // in use, by address
  std::vector<Block*> waiting_;           // freed, but other streams used them
  c10::CachingDeviceAllocator::DeviceStats stats_;
  int64_t told_peak_ = 0;
  std::function<void(int64_t bytes)> on_peak_;
  ResidentBlocks resident_;  // of a plan of a CPU
};

}  // namespace megashard::sim
