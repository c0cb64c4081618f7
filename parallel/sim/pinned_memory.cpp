#include "parallel/sim/pinned_memory.h"

#include <c10/util/Exception.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "parallel/sim/arena.h"
#include "parallel/sim/findings.h"
#include "parallel/sim/settings.h"

namespace megashard::sim {
namespace {

struct Closed {
  int device;
  uintptr_t begin, end;  // whole pages
  bool copy_writes;
  int agent;
  uint64_t time;
  const std::string* operation;
};

struct PinnedBlocks {
  std::mutex mutex;
  std::vector<Closed> closed;
  std::map<char*, size_t> blocks;     // used, with rounded sizes
  std::multimap<size_t, char*> free;  // by rounded size
  at::HostStats stats;
};
PinnedBlocks& pinned_blocks() {
  static auto* each = new PinnedBlocks;
  return *each;
}

uintptr_t page() {
  static const auto size = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

/// Sets the protection that the remaining copies require. Call under the lock.
void protect(uintptr_t begin, uintptr_t end) {
  ::mprotect(reinterpret_cast<void*>(begin), end - begin, PROT_READ | PROT_WRITE);
  for (const Closed& each : pinned_blocks().closed) {
    const uintptr_t from = std::max(begin, each.begin), to = std::min(end, each.end);
    if (from < to && !each.copy_writes) ::mprotect(reinterpret_cast<void*>(from), to - from, PROT_READ);
  }
  for (const Closed& each : pinned_blocks().closed) {
    const uintptr_t from = std::max(begin, each.begin), to = std::min(end, each.end);
    if (from < to && each.copy_writes) ::mprotect(reinterpret_cast<void*>(from), to - from, PROT_NONE);
  }
}

struct sigaction former_handler;

/// Handles access to a protected page or to device memory. Runs at the faulting instruction, i.e. in ordinary code that
/// holds no lock of the simulator.
void on_fault(int signal, siginfo_t* info, void* context) {
  const Arena& arena = Arena::get();
  const int region = arena.region_of(info->si_addr);
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  if (region == Arena::kPinned) {
    const std::lock_guard lock(pinned_blocks().mutex);
    bool any = false;
    std::erase_if(pinned_blocks().closed, [&](const Closed& each) {
      if (at < each.begin || at >= each.end) return false;
      any = true;
      found("the host touches pinned memory (" + calling_place() + ") that " + *each.operation + " on stream " +
            std::to_string(each.agent - 1) + (each.copy_writes ? " may still write" : " may still read") +
            ": wait for its event first" + call_stack());
      return true;
    });
    protect(at / page() * page(), at / page() * page() + page());
    if (any) return;
    return;  // unprotected by another thread meanwhile
  }
  if (region >= 0) {
    const std::string text = "megashard: the host touched memory of the simulated GPU " + std::to_string(region) +
                             " in " + calling_place() + ", which a real one answers with a crash" + call_stack() + "\n";
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  }
  ::sigaction(signal, &former_handler, nullptr);
  static_cast<void>(context);  // the fault repeats, with the former handler
}

void install_handler() {
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  ::sigaction(SIGSEGV, &action, &former_handler);
}

void free_pinned(void* address) {
  if (address == nullptr) return;
  PinnedBlocks& all = pinned_blocks();
  const std::lock_guard lock(all.mutex);
  const auto found = all.blocks.find(static_cast<char*>(address));
  all.free.emplace(found->second, found->first);
  all.stats.active_requests.decrease(1);
  all.stats.active_bytes.decrease(found->second);
  all.blocks.erase(found);
}

template <class Visit>
void over_stats(const Visit& visit) {
  PinnedBlocks& all = pinned_blocks();
  const std::lock_guard lock(all.mutex);
  at::HostStats& stats = all.stats;
  for (auto* stat : {&stats.active_requests, &stats.active_bytes, &stats.allocations, &stats.allocated_bytes})
    visit(*stat);
}

/// Like cudaFreeHost, which waits for the device.
void free_exact(void* address) {
  if (address == nullptr) return;
  PinnedBlocks& all = pinned_blocks();
  const std::lock_guard lock(all.mutex);
  const auto found = all.blocks.find(static_cast<char*>(address));
  const size_t size = found->second;
  const auto begin = reinterpret_cast<uintptr_t>(address);
  std::erase_if(all.closed, [&](const Closed& each) { return each.begin < begin + size && begin < each.end; });
  protect(begin, begin + size);
  all.blocks.erase(found);
  Arena::get().give_back(static_cast<char*>(address), size);
}

}  // namespace

PinnedMemory& PinnedMemory::get() {
  static auto* each = [] {
    Arena::get();
    install_handler();
    return new PinnedMemory;
  }();
  return *each;
}

c10::DeleterFnPtr PinnedMemory::raw_deleter() const { return &free_pinned; }

void PinnedMemory::copy_data(void* to, const void* from, size_t bytes) const { std::memcpy(to, from, bytes); }

bool PinnedMemory::record_event(void*, void*, c10::Stream) { return true; }  // close() tracks this

bool PinnedMemory::holds(const void* address) const { return Arena::get().region_of(address) == Arena::kPinned; }

at::HostStats PinnedMemory::get_stats() {
  const std::lock_guard lock(pinned_blocks().mutex);
  return pinned_blocks().stats;
}

void PinnedMemory::reset_accumulated_stats() {
  over_stats([](auto& stat) { stat.reset_accumulated(); });
}

void PinnedMemory::reset_peak_stats() {
  over_stats([](auto& stat) { stat.reset_peak(); });
}

/// Rounds to a power of two, as c10 does, and to whole pages, so that blocks are protected separately.
c10::DataPtr PinnedMemory::allocate(size_t bytes) {
  if (bytes == 0) return {nullptr, nullptr, &free_pinned, c10::Device(c10::kCPU)};
  size_t size = page();
  while (size < bytes) size *= 2;
  PinnedBlocks& all = pinned_blocks();
  const std::lock_guard lock(all.mutex);
  char* address = nullptr;
  const auto [first, last] = all.free.equal_range(size);
  for (auto each = first; each != last; ++each) {
    const auto begin = reinterpret_cast<uintptr_t>(each->second);
    const bool busy = std::any_of(all.closed.begin(), all.closed.end(), [&](const Closed& closed) {
      return closed.begin < begin + size && begin < closed.end;
    });
    if (busy) continue;
    address = each->second;
    all.free.erase(each);
    break;
  }
  if (address == nullptr) {
    address = Arena::get().take(Arena::kPinned, size);
    TORCH_CHECK(address != nullptr, "no pinned memory is left on the simulated device");
    ++all.stats.num_host_alloc;
    all.stats.allocations.increase(1);
    all.stats.allocated_bytes.increase(size);
  }
  all.stats.active_requests.increase(1);
  all.stats.active_bytes.increase(size);
  if (!settings().shapes) std::memset(Arena::get().mirror(address), 0xFF, bytes);
  all.blocks.emplace(address, size);
  return {address, address, &free_pinned, c10::Device(c10::kCPU)};
}

c10::DataPtr PinnedMemory::allocate_exactly(size_t bytes) {
  const size_t size = (bytes + page() - 1) / page() * page();
  if (size == 0) return {nullptr, nullptr, &free_exact, c10::Device(c10::kCPU)};
  PinnedBlocks& all = pinned_blocks();
  const std::lock_guard lock(all.mutex);
  char* address = Arena::get().take(Arena::kPinned, size);
  TORCH_CHECK(address != nullptr, "no pinned memory is left on the simulated device");
  all.blocks.emplace(address, size);
  return {address, address, &free_exact, c10::Device(c10::kCPU)};
}

size_t PinnedMemory::bytes_in_use() const {
  const std::lock_guard lock(pinned_blocks().mutex);
  size_t bytes = 0;
  for (const auto& [address, size] : pinned_blocks().blocks) bytes += size;
  return bytes;
}

void PinnedMemory::close(int device, const void* begin, size_t bytes, bool copy_writes, int agent, uint64_t time,
                         const std::string& operation) {
  if (bytes == 0) return;
  const auto first = reinterpret_cast<uintptr_t>(begin) / page() * page();
  const auto last = (reinterpret_cast<uintptr_t>(begin) + bytes + page() - 1) / page() * page();
  const std::lock_guard lock(pinned_blocks().mutex);
  pinned_blocks().closed.push_back({device, first, last, copy_writes, agent, time, &operation});
  protect(first, last);
}

void PinnedMemory::open(int device, const VectorClock& seen) {
  const std::lock_guard lock(pinned_blocks().mutex);
  auto& closed = pinned_blocks().closed;
  if (closed.empty()) return;
  std::vector<std::pair<uintptr_t, uintptr_t>> opened;
  std::erase_if(closed, [&](const Closed& each) {
    if (each.device != device || each.time > seen.at(static_cast<size_t>(each.agent))) return false;
    opened.emplace_back(each.begin, each.end);
    return true;
  });
  for (const auto& [begin, end] : opened) protect(begin, end);
}

}  // namespace megashard::sim
