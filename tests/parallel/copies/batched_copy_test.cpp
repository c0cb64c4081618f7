#include "parallel/copies/batched_copy.h"

#include <gtest/gtest.h>

#include "parallel/copies/copy_table.h"
#include "tests/parallel/copies/copy_cases.h"

namespace megashard::testing {
namespace {

/// The kernel, its threads run sequentially.
void run_threads(const std::vector<RowsCopy>& copies) {
  make_copy_tables(copies, [](const CopyTable& table) {
    for (int64_t tile = 0; tile < table.tiles; ++tile) {
      for (int thread = 0; thread < CopyTable::kThreads; ++thread) copy_tile(table, tile, thread);
    }
  });
}

void expect_kernel_does_as_its_twin(const std::vector<CopyCase>& cases) {
  CopyBuffers by_loops(cases), by_threads(cases);
  copy_batch(by_loops.copies(), c10::kCPU);
  run_threads(by_threads.copies());
  for (size_t i = 0; i < cases.size(); ++i) ASSERT_EQ(by_threads.to_bytes(i), by_loops.to_bytes(i)) << cases[i];
}

TEST(BatchedCopy, TheKernelDoesAsItsTwinBitForBit) { expect_kernel_does_as_its_twin(copy_cases()); }

TEST(BatchedCopy, RoundsAndPlacesRows) {
  const std::vector<float> from{1, 1.00390625F, 2, 3, 5};  // the second is half way between two bf16
  std::vector<uint16_t> to(9, 0xffff);
  const RowsCopy copy{.from = from.data(),
                      .to = to.data(),
                      .from_dtype = at::kFloat,
                      .to_dtype = at::kBFloat16,
                      .rows = 3,
                      .row_numel = 2,
                      .numel = 5,
                      .from_stride = 2,
                      .to_stride = 3,
                      .zero_rest = true};
  copy_batch({&copy, 1}, c10::kCPU);
  EXPECT_EQ(to, (std::vector<uint16_t>{0x3f80, 0x3f80, 0xffff, 0x4000, 0x4040, 0xffff, 0x40a0, 0, 0xffff}));
}

int launches_of(size_t count) {
  std::vector<uint8_t> bytes(count);
  std::vector<RowsCopy> copies;
  for (uint8_t& byte : bytes) copies.push_back({.from = &byte, .to = &byte, .row_numel = 1, .numel = 1});
  int launches = 0;
  make_copy_tables(copies, [&](const CopyTable&) { ++launches; });
  return launches;
}

TEST(BatchedCopy, OneLaunchForAGroup) {
  EXPECT_EQ(launches_of(0), 0);
  EXPECT_EQ(launches_of(CopyTable::kCapacity), 1);
  EXPECT_EQ(launches_of(CopyTable::kCapacity + 1), 2);
}

TEST(BatchedCopy, AlignedBuffersMoveBySixteenBytes) {
  const auto vector_of = [](const RowsCopy& copy) {
    int vector = 0;
    make_copy_tables({&copy, 1}, [&](const CopyTable& table) { vector = table.pieces[0].vector; });
    return vector;
  };
  alignas(16) static char from[256], to[256];
  RowsCopy copy{.from = from,
                .to = to,
                .from_dtype = at::kFloat,
                .to_dtype = at::kFloat,
                .rows = 2,
                .row_numel = 7,
                .numel = 14,
                .from_stride = 8,
                .to_stride = 8};
  EXPECT_EQ(vector_of(copy), 16);
  copy.to_stride = 7;
  EXPECT_EQ(vector_of(copy), 4);
  copy.to_stride = 8;
  copy.to_dtype = at::kBFloat16;
  EXPECT_EQ(vector_of(copy), 8);
  copy.from = from + 4;
  EXPECT_EQ(vector_of(copy), 1);
}

}  // namespace
}  // namespace megashard::testing
