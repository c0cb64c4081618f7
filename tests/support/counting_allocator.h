#pragma once

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <memory>

namespace megashard::testing {

/// Counts the bytes that tensors hold, in the CPU allocator's place until stop. Leak it: it must
/// outlive every tensor it made. For tests of one thread.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() : inner_(c10::GetAllocator(c10::kCPU)) { c10::SetAllocator(c10::kCPU, this, 255); }
  c10::DataPtr allocate(size_t bytes) override {
    live_ += bytes;
    peak_ = std::max(peak_, live_);
    auto* block = new Block{inner_->allocate(bytes), bytes, this};
    return {block->data.get(), block, &release, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  void stop() { c10::SetAllocator(c10::kCPU, inner_, 255); }
  void reset_peak() { peak_ = live_; }
  size_t live() const { return live_; }
  size_t peak() const { return peak_; }

 private:
  struct Block {
    c10::DataPtr data;
    size_t bytes;
    CountingAllocator* owner;
  };
  static void release(void* context) {
    std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->owner->live_ -= block->bytes;
  }
  c10::Allocator* inner_;
  size_t live_ = 0, peak_ = 0;
};

}  // namespace megashard::testing
