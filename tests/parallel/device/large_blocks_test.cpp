#include "parallel/device/large_blocks.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "parallel/device/buffer_pool.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

constexpr int64_t kLarge = 10 << 20;

const void* begin_of(int64_t bytes) { return at::empty({bytes}, at::kByte).const_data_ptr(); }

TEST(PooledLargeTensors, AreHandedOutAgainAtTheSameAddress) {
  MEGASHARD_NOT_ON_SIM("it is about the CPU's tensors");
  int64_t from_pool = 0;
  observe_cpu_buffer_pool([&](int64_t bytes) { from_pool += bytes > 0 ? bytes : 0; });
  {
    const PooledLargeTensors pooled;
    const void* first = begin_of(kLarge);
    EXPECT_EQ(from_pool, kLarge);
    const auto small = at::full({1000}, 1, at::kByte);  // where the C library might have cut the hole
    EXPECT_EQ(begin_of(kLarge), first);
    EXPECT_EQ(begin_of(kLarge - 1000), first);
    EXPECT_EQ(from_pool, 3 * kLarge - 1000);  // and not the small one
  }
  begin_of(kLarge);
  EXPECT_EQ(from_pool, 3 * kLarge - 1000);
  observe_cpu_buffer_pool(nullptr);
}

TEST(PooledLargeTensors, AndOthersMayBeFreedWhenItHasComeOrGone) {
  at::Tensor before = at::full({kLarge}, 1, at::kByte), inside;
  void* raw = nullptr;
  {
    const PooledLargeTensors pooled;
    before.reset();
    inside = at::full({kLarge}, 7, at::kByte);
    raw = c10::GetAllocator(c10::kCPU)->raw_allocate(kLarge);  // as oneDNN does
    c10::GetAllocator(c10::kCPU)->raw_deallocate(raw);
    c10::GetAllocator(c10::kCPU)->raw_deallocate(c10::GetAllocator(c10::kCPU)->raw_allocate(64));
  }
  EXPECT_EQ(inside.sum().item<int64_t>(), 7 * kLarge);
  inside.reset();
}

}  // namespace
}  // namespace megashard
