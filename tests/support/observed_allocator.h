#pragma once

#include <c10/core/CPUAllocator.h>

#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace megashard::testing {

/// Replaces the CPU allocator and reports each block. Leak it: it must outlive every tensor that it allocated. oneDNN
/// identifies its buffers by their address only and frees them with the allocator that is current then. So this
/// allocator may free an older block, and another may free one of its blocks without notice.
class ObservedAllocator : public c10::Allocator {
 public:
  using Freed = std::function<void()>;

  ObservedAllocator() : before_(c10::GetAllocator(c10::kCPU)) { c10::SetAllocator(c10::kCPU, this, 255); }
  void stop() { c10::SetAllocator(c10::kCPU, before_, 255); }

  c10::DataPtr allocate(size_t bytes) final {
    auto freed = allocated(bytes);
    auto data = before_->allocate(bytes);
    void* const begin = data.get();
    if (begin == nullptr) return data;
    const std::scoped_lock lock(blocks().mutex);
    Block& block = blocks().by_begin[begin];
    (void)block.data.release_context();  // stale: another allocator freed this block after stop()
    block = {std::move(data), std::move(freed)};
    return {begin, begin, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const final { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const final { default_copy_data(to, from, bytes); }

 protected:
  /// Returns the function to call when the block is freed.
  virtual Freed allocated(size_t bytes) = 0;

 private:
  struct Block {
    c10::DataPtr data;
    Freed freed;
  };
  struct Blocks {
    std::mutex mutex;
    std::unordered_map<void*, Block> by_begin;
  };
  static Blocks& blocks() {
    static auto* of_all = new Blocks;
    return *of_all;
  }
  static void release(void* begin) {
    const std::scoped_lock lock(blocks().mutex);
    const auto block = blocks().by_begin.extract(begin);
    if (block.empty()) return c10::GetDefaultCPUAllocator()->raw_deallocate(begin);
    block.mapped().freed();
  }

  c10::Allocator* before_;
};

}  // namespace megashard::testing
