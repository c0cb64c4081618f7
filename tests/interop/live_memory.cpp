#include "tests/interop/live_memory.h"

#include <algorithm>
#include <mutex>

#include "tests/support/observed_allocator.h"

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
  static auto* of_process = new Account;  // leaked, like all accounts: tensors outlive threads
  return of_this_thread == nullptr ? *of_process : *of_this_thread;
}

class AccountingAllocator final : public megashard::testing::ObservedAllocator {
  Freed allocated(size_t bytes) override {
    Account& of_block = account();
    const auto count = static_cast<int64_t>(bytes);
    of_block.add(count);
    return [&of_block, count] { of_block.add(-count); };
  }
};

}  // namespace

void live_memory_start() { new AccountingAllocator; }

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
