#pragma once

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace megashard::testing {

/// Counts the bytes that tensors hold, in the CPU allocator's place until stop. Leak it: it must
/// outlive every tensor it made. For tests of one thread.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() : inner_(c10::GetAllocator(c10::kCPU)) { c10::SetAllocator(c10::kCPU, this, 255); }
  c10::DataPtr allocate(size_t bytes) override {
    live_ += bytes;
    peak_ = std::max(peak_, live_);
    auto data = inner_->allocate(bytes);
    void* const begin = data.get();
    if (begin == nullptr) return data;
    const std::scoped_lock lock(blocks().mutex);
    Block& block = blocks().by_begin[begin];
    (void)block.data.release_context();  // of one that was freed behind stop()
    block = {std::move(data), bytes, this};
    return {begin, begin, &release, c10::kCPU};
  }
  /// oneDNN's buffers have no other context than their begin, and are freed by the allocator of that time.
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  void stop() { c10::SetAllocator(c10::kCPU, inner_, 255); }
  void reset_peak() { peak_ = live_; }
  size_t live() const { return live_; }
  size_t peak() const { return peak_; }

 private:
  struct Block {
    c10::DataPtr data;
    size_t bytes = 0;
    CountingAllocator* owner = nullptr;
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
    if (block.empty()) return c10::GetDefaultCPUAllocator()->raw_deallocate(begin);  // of one before this
    block.mapped().owner->live_ -= block.mapped().bytes;
  }
  c10::Allocator* inner_;
  size_t live_ = 0, peak_ = 0;
};

}  // namespace megashard::testing
