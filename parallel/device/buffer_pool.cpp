#include "parallel/device/buffer_pool.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
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

struct KeptBuffers::Free {
  using Place = std::pair<c10::StreamId, int64_t>;  // stream, bytes

  std::mutex mutex;
  std::map<Place, std::vector<at::Tensor>> blocks;
};

KeptBuffers::KeptBuffers() : free_(std::make_shared<Free>()) {}

at::Tensor KeptBuffers::take(int64_t numel, at::ScalarType dtype, const c10::Stream& stream,
                             const std::function<at::Tensor(int64_t bytes)>& make) {
  const Free::Place place(stream.id(), numel * static_cast<int64_t>(c10::elementSize(dtype)));
  at::Tensor block;
  {
    const std::lock_guard lock(free_->mutex);
    auto& blocks = free_->blocks[place];
    if (!blocks.empty()) {
      block = std::move(blocks.back());
      blocks.pop_back();
    }
  }
  if (!block.defined()) block = make(place.second);
  void* memory = block.mutable_data_ptr();
  const auto give_back = [free = std::weak_ptr(free_), place, block](void*) {
    if (const auto there = free.lock()) {
      const std::lock_guard lock(there->mutex);
      there->blocks[place].push_back(block);
    }
  };
  const auto options = block.options().dtype(dtype);
  return at::for_blob(memory, {numel}).deleter(give_back).options(options).target_device(block.device()).make_tensor();
}

namespace {

constexpr uint8_t kPriority = 255;

class LargeBlocks final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kPooledFrom) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    auto block = cpu_buffer_pool()->allocate(bytes);
    void* const begin = block.get();
    const std::scoped_lock lock(mutex_);
    blocks_.insert_or_assign(begin, std::move(block));
    return {begin, begin, &release, c10::kCPU};
  }
  // oneDNN keeps only a block's address, and may free blocks of the previous allocator here.
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release(void* begin);

  std::mutex mutex_;
  std::unordered_map<void*, c10::DataPtr> blocks_;
};

LargeBlocks& large_blocks() {
  static auto* blocks = new LargeBlocks;  // leaked: tensors may outlive static destruction
  return *blocks;
}

void LargeBlocks::release(void* begin) {
  auto& own = large_blocks();
  {
    const std::scoped_lock lock(own.mutex_);
    if (own.blocks_.erase(begin) != 0) return;
  }
  c10::GetDefaultCPUAllocator()->raw_deallocate(begin);
}

}  // namespace

PooledLargeTensors::PooledLargeTensors() : before_(c10::GetAllocator(c10::kCPU)) {
  c10::SetAllocator(c10::kCPU, &large_blocks(), kPriority);
}

PooledLargeTensors::~PooledLargeTensors() { c10::SetAllocator(c10::kCPU, before_, kPriority); }

}  // namespace megashard
