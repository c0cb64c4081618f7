#include "parallel/device/buffer_pool.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/alloc_cpu.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "parallel/device/range_allocator.h"

namespace megashard {
namespace {

size_t size_class(size_t bytes) {
  const size_t step = std::max<size_t>(std::bit_floor(bytes) / 8, 64);
  return (bytes + step - 1) / step * step;
}

/// Same switch as the C library's heap (docs/launch.md).
bool wants_huge_pages() {
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  return tunables != nullptr && std::string_view(tunables).find("glibc.malloc.hugetlb=1") != std::string_view::npos;
}

/// Reserved address range as large as the machine's memory; made usable from the start as needed.
class Addresses {
 public:
  Addresses() {
    const auto memory = static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    // `ulimit -v` may allow less than the whole range.
    for (size_t bytes = memory; begin_ == nullptr && bytes >= kStep; bytes /= 2) reserve(bytes);
  }
  /// Null if there is no memory for [offset, end).
  char* at(size_t offset, size_t end) { return end <= usable_ || extend(end) ? begin_ + offset : nullptr; }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kStep = 32 * kHugePage;

  void reserve(size_t bytes) {
    void* given = ::mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (given == MAP_FAILED) return;
    begin_ = static_cast<char*>(given) + (kHugePage - reinterpret_cast<uintptr_t>(given) % kHugePage);
    size_ = bytes;
    if (wants_huge_pages()) ::madvise(begin_, size_, MADV_HUGEPAGE);
  }
  bool extend(size_t end) {
    if (end > size_) return false;
    end = std::min((end + kStep - 1) / kStep * kStep, size_);
    if (::mprotect(begin_, end, PROT_READ | PROT_WRITE) != 0) return false;
    usable_ = end;
    return true;
  }

  char* begin_ = nullptr;
  size_t size_ = 0, usable_ = 0;
};

class CpuBufferPool final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    Block* block = bytes < kPooledFrom ? take_small(bytes) : take_large(bytes);
    return {block->data, block, &give_back, c10::kCPU};
  }
  int64_t bytes() {
    const std::lock_guard lock(mutex_);
    return handed_out_;
  }
  void observe(std::function<void(int64_t)> observer) {
    const std::lock_guard lock(mutex_);
    observer_ = std::move(observer);
  }
  void copy_data(void* destination, const void* source, size_t count) const override {
    default_copy_data(destination, source, count);
  }

 private:
  enum class Kind { kSmall, kPart, kAlone };  // kAlone: allocated and freed by the C library
  struct Block {
    CpuBufferPool* pool;
    Kind kind;
    size_t asked;
    void* data;
    size_t place;  // small: its size class; part: its offset
  };

  Block* take_small(size_t bytes) {
    const size_t of_class = size_class(bytes);
    {
      const std::lock_guard lock(mutex_);
      note(static_cast<int64_t>(bytes));
      auto& free = free_[of_class];
      if (!free.empty()) {
        Block* block = free.back();
        free.pop_back();
        block->asked = bytes;
        return block;
      }
    }
    return new Block{this, Kind::kSmall, bytes, c10::alloc_cpu(of_class), of_class};
  }

  Block* take_large(size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      note(static_cast<int64_t>(bytes));
      const size_t offset = parts_.take(bytes);
      if (char* data = addresses_.at(offset, offset + bytes); data != nullptr)
        return new Block{this, Kind::kPart, bytes, data, offset};
      parts_.give_back(offset, bytes);
    }
    return new Block{this, Kind::kAlone, bytes, c10::alloc_cpu(bytes), 0};
  }

  static void give_back(void* context) {
    auto* block = static_cast<Block*>(context);
    CpuBufferPool& pool = *block->pool;
    const std::lock_guard lock(pool.mutex_);
    pool.note(-static_cast<int64_t>(block->asked));
    if (block->kind == Kind::kSmall) return pool.free_[block->place].push_back(block);
    if (block->kind == Kind::kPart) {
      pool.parts_.give_back(block->place, block->asked);
    } else {
      c10::free_cpu(block->data);
    }
    delete block;
  }

  void note(int64_t bytes) {
    handed_out_ += bytes;
    if (observer_) observer_(bytes);
  }

  std::mutex mutex_;
  int64_t handed_out_ = 0;
  std::function<void(int64_t)> observer_;
  std::unordered_map<size_t, std::vector<Block*>> free_;  // small blocks, by class
  RangeAllocator parts_;
  Addresses addresses_;
};

CpuBufferPool& the_pool() {
  static auto* pool = new CpuBufferPool;  // leaked: tensors may outlive static destruction
  return *pool;
}

}  // namespace

c10::Allocator* cpu_buffer_pool() { return &the_pool(); }

int64_t cpu_buffer_pool_bytes() { return the_pool().bytes(); }

void observe_cpu_buffer_pool(std::function<void(int64_t bytes)> observer) { the_pool().observe(std::move(observer)); }

at::Tensor pooled_empty(int64_t numel, at::ScalarType dtype, c10::Device device) {
  if (!device.is_cpu()) return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
  return at::detail::empty_generic({numel}, cpu_buffer_pool(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype,
                                   std::nullopt);
}

}  // namespace megashard
