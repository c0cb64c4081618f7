#include "tests/interop/live_memory.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <memory>
#include <mutex>

namespace {

struct Account {
  std::mutex mutex;
  int64_t now = 0, peak = 0;
  void add(int64_t bytes) {
    const std::scoped_lock lock(mutex);
    peak = std::max(peak, now += bytes);
  }
};

thread_local Account* of_this_thread = nullptr;
Account& account() {
  static auto* of_process = new Account;  // leaked, as all of them: tensors outlive threads
  return of_this_thread == nullptr ? *of_process : *of_this_thread;
}

class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() : inner_(c10::GetAllocator(c10::kCPU)) {}
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{inner_->allocate(bytes), static_cast<int64_t>(bytes), account()};
    block->account.add(block->bytes);
    return {block->data.get(), block, &release, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  struct Block {
    c10::DataPtr data;
    int64_t bytes;
    Account& account;
  };
  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->account.add(-block->bytes);
  }
  c10::Allocator* inner_;
};

}  // namespace

void live_memory_start() { c10::SetAllocator(c10::kCPU, new CountingAllocator, 255); }

void live_memory_of_this_thread() { of_this_thread = new Account; }

void live_memory_add(int64_t bytes) { account().add(bytes); }

void live_memory_restart_peak() {
  Account& counted = account();
  const std::scoped_lock lock(counted.mutex);
  counted.peak = counted.now;
}

int64_t live_memory_now() {
  Account& counted = account();
  const std::scoped_lock lock(counted.mutex);
  return counted.now;
}

int64_t live_memory_peak() {
  Account& counted = account();
  const std::scoped_lock lock(counted.mutex);
  return counted.peak;
}
