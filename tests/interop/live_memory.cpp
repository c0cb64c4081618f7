#include "tests/interop/live_memory.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

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
    auto data = inner_->allocate(bytes);
    void* const begin = data.get();
    if (begin == nullptr) return data;
    account().add(static_cast<int64_t>(bytes));
    const std::scoped_lock lock(blocks().mutex);
    blocks().by_begin.emplace(begin, Block{std::move(data), static_cast<int64_t>(bytes), account()});
    return {begin, begin, &release, c10::kCPU};
  }
  /// oneDNN's buffers have no other context than their begin, and are freed by the allocator of that time.
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  struct Block {
    c10::DataPtr data;
    int64_t bytes;
    Account& account;
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
    if (block.empty()) return c10::GetDefaultCPUAllocator()->raw_deallocate(begin);  // from before the counting
    block.mapped().account.add(-block.mapped().bytes);
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
