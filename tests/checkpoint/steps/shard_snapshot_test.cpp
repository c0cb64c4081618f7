#include "checkpoint/steps/shard_snapshot.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>

#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

ShardedTensors on_simulated_gpu(std::vector<int64_t> sizes) {
  ShardedTensors tensors;
  for (const int64_t size : sizes) {
    tensors.emplace_back("model." + std::to_string(size),
                         ShardedTensor::replicated(at::full({size}, 7.0, at::TensorOptions(at::kCUDA))));
  }
  return tensors;
}

TEST(ShardSnapshot, AGpuTrainsOnWhileItCopiesAndChangesNothingBefore) {
  if (!on_simulated_device()) GTEST_SKIP() << "without a GPU the host copies";
  const auto tensors = on_simulated_gpu({1000, 3});
  const at::Tensor weight = tensors[0].second.local;
  ShardSnapshot snapshot;
  simulated_cuda().take_host_syncs();
  const auto copies = snapshot.take(tensors);
  const at::Tensor read = weight + 1;  // a forward that overlaps with the copies
  snapshot.before_changes();
  weight.fill_(-1);
  EXPECT_THAT(simulated_cuda().take_host_syncs(), IsEmpty());
  EXPECT_THAT(simulated_cuda().take_findings(), IsEmpty());
  snapshot.wait();
  EXPECT_EQ(copies[0].second.local[999].item<float>(), 7);

  snapshot.take(tensors);
  weight.fill_(-2);  // without before_changes(), nothing waits for the copies
  const auto found = simulated_cuda().take_findings();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0], HasSubstr("race: aten::fill_ on the default stream writes"));
  snapshot.wait();
}

TEST(ShardSnapshot, ShardsThatAreDroppedAreCopiedFirst) {
  if (!on_simulated_device()) GTEST_SKIP() << "without a GPU the host copies";
  ShardSnapshot snapshot;
  auto tensors = on_simulated_gpu({1 << 20});
  const auto copies = snapshot.take(tensors);
  tensors.clear();
  const at::Tensor other = at::full({1 << 20}, 3.0, at::TensorOptions(at::kCUDA));
  snapshot.wait();
  EXPECT_EQ(copies[0].second.local[0].item<float>(), 7);
}

TEST(ShardSnapshot, PinsWhatItHoldsAndNoMore) {
  if (!on_simulated_device()) GTEST_SKIP() << "without a GPU nothing is pinned";
  const auto pinned = [] { return simulated_device().counts().pinned_bytes; };
  const int64_t before = pinned(), floats = (1 << 20) + (1 << 18);  // 5 MiB: not a power of two
  {
    ShardSnapshot snapshot;
    snapshot.take(on_simulated_gpu({floats}));
    snapshot.wait();
    EXPECT_LE(pinned() - before, floats * 4 + (64 << 10));
  }
  EXPECT_EQ(pinned(), before);
}

}  // namespace
}  // namespace megashard::testing
