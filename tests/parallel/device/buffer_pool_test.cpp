// Memory that is created once: the same sizes in the same order create it at the same times.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "parallel/device/buffer_pool.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

const c10::Stream kFirst(c10::Stream::UNSAFE, at::kCPU, 1), kSecond(c10::Stream::UNSAFE, at::kCPU, 2);

struct Source {
  std::vector<int64_t> made;
  at::Tensor operator()(int64_t bytes) {
    made.push_back(bytes);
    return at::empty({bytes}, at::TensorOptions(at::kByte).device(at::kCPU));
  }
};

TEST(KeptBuffers, WhatComesBackIsHandedOutForAsManyBytesOnTheSameStream) {
  KeptBuffers buffers;
  Source source;
  const auto take = [&](int64_t numel, at::ScalarType dtype, const c10::Stream& stream) {
    return buffers.take(numel, dtype, stream, std::ref(source));
  };
  const void* memory = nullptr;
  {
    const at::Tensor one = take(6, at::kFloat, kFirst), view = one.narrow(0, 2, 2);
    EXPECT_EQ(one.sizes(), at::IntArrayRef({6}));
    EXPECT_EQ(one.scalar_type(), at::kFloat);
    memory = one.const_data_ptr();
    EXPECT_NE(take(6, at::kFloat, kFirst).const_data_ptr(), memory);  // that one is in use
  }
  EXPECT_EQ(source.made, (std::vector<int64_t>{24, 24}));
  EXPECT_EQ(take(12, at::kBFloat16, kFirst).numel(), 12);
  EXPECT_EQ(source.made.size(), 2U);
  std::optional<at::Tensor> view = take(6, at::kFloat, kFirst).narrow(0, 0, 1);
  const at::Tensor beside = take(6, at::kFloat, kFirst);  // a view holds the first one
  EXPECT_NE(view->const_data_ptr(), beside.const_data_ptr());
  EXPECT_EQ(source.made.size(), 2U);
  take(6, at::kFloat, kSecond);
  take(7, at::kFloat, kFirst);
  EXPECT_EQ(source.made, (std::vector<int64_t>{24, 24, 24, 28}));
}

TEST(KeptBuffers, ABufferOutlivesWhatMadeIt) {
  at::Tensor late;
  {
    KeptBuffers buffers;
    Source source;
    late = buffers.take(3, at::kFloat, kFirst, std::ref(source));
  }
  EXPECT_EQ(late.fill_(2).sum().item<float>(), 6);
}

TEST(KeptBuffers, MemoryThatIsNotThereLeavesNothingBehind) {
  KeptBuffers buffers;
  const auto fail = [](int64_t) -> at::Tensor { throw std::runtime_error("none"); };
  EXPECT_THROW(buffers.take(3, at::kFloat, kFirst, fail), std::runtime_error);
  Source source;
  EXPECT_EQ(buffers.take(3, at::kFloat, kFirst, std::ref(source)).numel(), 3);
}

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
