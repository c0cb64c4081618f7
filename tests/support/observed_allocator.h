#pragma once

#include <c10/core/CPUAllocator.h>

#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace megashard::testing {

/// Takes the CPU allocator's place and tells of each block. Leak it: it must outlive every tensor it made. oneDNN's
/// buffers have no other context than their begin and are freed by the allocator of that time, so a block may come from
/// before this one, and one of its own may be freed behind its back.
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
    (void)block.data.release_context();  // of one that was freed behind stop()
    block = {std::move(data), std::move(freed)};
    return {begin, begin, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const final { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const final { default_copy_data(to, from, bytes); }

 protected:
  /// What it returns is called when the block is freed.
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
