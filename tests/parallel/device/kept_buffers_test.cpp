// Memory that is created once: the same sizes in the same order create it at the same times.

#include "parallel/device/kept_buffers.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

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

}  // namespace
}  // namespace megashard
