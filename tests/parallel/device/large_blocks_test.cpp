#include "parallel/device/large_blocks.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>

#include "parallel/device/buffer_pool.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using ::testing::UnorderedElementsAre;

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
    const auto small = at::full({1000}, 1, at::kByte);  // the C library might split the hole for it
    EXPECT_EQ(begin_of(kLarge), first);
    EXPECT_EQ(from_pool, 2 * kLarge);  // and not the small one
  }
  begin_of(kLarge);
  EXPECT_EQ(from_pool, 2 * kLarge);
  observe_cpu_buffer_pool(nullptr);
}

TEST(PooledLargeTensors, LieWhereALargerOneWas) {
  MEGASHARD_NOT_ON_SIM("it is about the CPU's tensors");
  constexpr int64_t kHuge = int64_t{300} << 20;  // no other free part holds it
  const PooledLargeTensors pooled;
  const auto* begin = static_cast<const char*>(begin_of(kHuge));
  std::vector<at::Tensor> thirds;
  for (int i = 0; i < 3; ++i) thirds.push_back(at::full({kHuge / 3}, i, at::kByte));
  std::vector<const void*> begins;
  for (const auto& third : thirds) begins.push_back(third.const_data_ptr());
  EXPECT_THAT(begins, UnorderedElementsAre(begin, begin + kHuge / 3, begin + 2 * (kHuge / 3)));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(thirds[i].sum().item<int64_t>(), i * (kHuge / 3));
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
