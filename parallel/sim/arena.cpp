#include "parallel/sim/arena.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

namespace megashard::sim {
namespace {

constexpr size_t kAll = kRegionBytes * (kDevices + 1);
constexpr size_t kStep = size_t{2} << 20;

std::mutex& mutex() {
  static std::mutex each;
  return each;
}

/// Freed address ranges, by region and size.
std::multimap<std::pair<int, size_t>, char*>& spare() {
  static auto* each = new std::multimap<std::pair<int, size_t>, char*>;
  return *each;
}

size_t in_steps(size_t bytes) { return (bytes + kStep - 1) / kStep * kStep; }

}  // namespace

Arena& Arena::get() {
  static auto* arena = new Arena;  // leaked: tensors may outlive static destruction
  return *arena;
}

Arena::Arena() {
  file_ = ::memfd_create("megashard_sim", MFD_CLOEXEC);
  TORCH_CHECK(file_ >= 0 && ::ftruncate(file_, static_cast<off_t>(kAll)) == 0,
              "the simulated device got no addresses: ", std::strerror(errno));
  const auto map = [&](int protection) {
    void* at = ::mmap(nullptr, kAll, protection, MAP_SHARED | MAP_NORESERVE, file_, 0);
    TORCH_CHECK(at != MAP_FAILED, "the simulated device got no addresses: ", std::strerror(errno),
                "; allow more virtual memory (ulimit -v)");
    return static_cast<char*>(at);
  };
  begin_ = map(PROT_NONE);
  to_mirror_ = map(PROT_READ | PROT_WRITE) - begin_;
  TORCH_CHECK(::mprotect(begin_ + kRegionBytes * kPinned, kRegionBytes, PROT_READ | PROT_WRITE) == 0,
              "the simulated device cannot open its pinned memory: ", std::strerror(errno));
}

int Arena::region_of(const void* address) const {
  const auto distance = static_cast<const char*>(address) - begin_;
  if (distance < 0 || static_cast<size_t>(distance) >= kAll) return -1;
  return static_cast<int>(static_cast<size_t>(distance) / kRegionBytes);
}

char* Arena::take(int region, size_t bytes) {
  bytes = in_steps(bytes);
  const std::lock_guard lock(mutex());
  if (const auto found = spare().find({region, bytes}); found != spare().end()) {
    char* address = found->second;
    spare().erase(found);
    return address;
  }
  size_t& used = used_[region];
  if (bytes > kRegionBytes - used) return nullptr;
  char* address = begin_ + kRegionBytes * static_cast<size_t>(region) + used;
  used += bytes;
  return address;
}

void Arena::give_back(char* address, size_t bytes) {
  bytes = in_steps(bytes);
  const std::lock_guard lock(mutex());
  ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, address - begin_, static_cast<off_t>(bytes));
  spare().emplace(std::pair{region_of(address), bytes}, address);
}

}  // namespace megashard::sim
