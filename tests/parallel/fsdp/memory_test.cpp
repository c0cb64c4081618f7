// test_fully_shard_memory.py, to the byte: buffers that a step takes from the pool, by purpose. One rank of a fake
// group; cuda_test.cpp checks a GPU's allocator.

#include <c10/util/ScopeExit.h>

#include <cstdlib>
#include <map>

#include "parallel/collectives/fake_process_group.h"
#include "parallel/device/buffer_pool.h"
#include "parallel/device/memory_use.h"
#include "tests/support/chain.h"
#include "tests/support/counting_allocator.h"
#include "tests/support/parity.h"

namespace megashard::testing {
namespace {

constexpr int kRanks = 2, kDepth = 4, kGroups = kDepth + 1;  // each of one weight [7, 7]
// Seven rows over two ranks are padded to eight, and one gradient flag is added, so that each kind of buffer has its
// own size: 116 bytes per rank, rounded up to 128.
constexpr int64_t kFull = 7 * 7 * 4;             // unsharded parameter
constexpr int64_t kPacked = kRanks * 4 * 7 * 4;  // packed all-gather
constexpr int64_t kInput = kRanks * 128;         // packed gradients
constexpr int64_t kReduced = 128;                // reduced, and the sharded gradient in place

/// Pool buffers in use and their peak, per size and in bytes.
class BufferCounts {
 public:
  struct Count {
    int64_t now = 0, most = 0;
    void add(int64_t n) { most = std::max(most, now += n); }
  };
  BufferCounts() {
    observe_cpu_buffer_pool([this](int64_t bytes) {
      bytes_.add(bytes);
      sizes_[std::abs(bytes)].add(bytes > 0 ? 1 : -1);
    });
  }
  ~BufferCounts() { observe_cpu_buffer_pool(nullptr); }
  BufferCounts(const BufferCounts&) = delete;

  void restart() {
    bytes_.most = bytes_.now;
    for (auto& [size, count] : sizes_) count.most = count.now;
  }
  const Count& bytes() const { return bytes_; }
  const Count& of(int64_t size) { return sizes_[size]; }

 private:
  Count bytes_;
  std::map<int64_t, Count> sizes_;
};

DeviceMeshPtr fake_mesh(const std::vector<int>& shape = {kRanks}, const std::vector<std::string>& names = {"shard"}) {
  int ranks = 1;
  for (const int size : shape) ranks *= size;
  return std::make_shared<DeviceMesh>(make_fake_group({.rank = 0, .world_size = ranks}), shape, names);
}

TEST(FullyShardMemory, test_fully_shard_training_memory) {
  for (const bool reshard : {true, false}) {
    BufferCounts counts;
    Chain chain(kDepth, 7);
    chain.shard({.mesh = fake_mesh(), .reshard_after_forward = reshard});
    EXPECT_EQ(counts.bytes().most, 0) << "construction";
    for (int step = 0; step < 3; ++step) {
      counts.restart();
      const at::Tensor loss = chain.forward();
      // The root, one unit, and the buffer from which the unit is copied out; or all units.
      EXPECT_EQ(counts.of(kFull).most, reshard ? 2 : kGroups);
      EXPECT_EQ(counts.of(kPacked).most, 1);
      EXPECT_EQ(counts.of(kInput).most, 0);
      EXPECT_EQ(counts.of(kReduced).most, 0);
      EXPECT_EQ(counts.bytes().most, (reshard ? 2 : kGroups) * kFull + kPacked);
      EXPECT_EQ(counts.of(kFull).now, reshard ? 0 : kGroups);
      EXPECT_LE(counts.bytes().most, reshard ? 3 * kPacked + kFull : kGroups * kFull + kPacked * 3 / 2)
          << "upstream's bound of a forward";

      counts.restart();
      loss.backward();
      EXPECT_EQ(counts.of(kFull).most, reshard ? 1 : kGroups) << "each goes with its gradient";
      EXPECT_EQ(counts.of(kPacked).most, reshard ? 1 : 0);
      EXPECT_EQ(counts.of(kInput).most, 1);
      EXPECT_EQ(counts.of(kReduced).most, kGroups);
      // The first unit's all-gather during the reduction of the second one's gradient; or all units, before the root's
      // weight is freed.
      const int64_t most = reshard ? kFull + kPacked + kInput + (kDepth - 1) * kReduced : kGroups * kFull;
      EXPECT_EQ(counts.bytes().most, most);
      EXPECT_LE(most, (reshard ? 4 * kPacked + kFull : kGroups * kFull + kPacked * 3 / 2) + kGroups * kReduced)
          << "upstream's bound of a backward";
      EXPECT_EQ(counts.bytes().now, kGroups * kReduced) << "sharded gradients alone stay";
      chain.root.zero_grad();
      EXPECT_EQ(counts.bytes().now, 0) << "after zero_grad";
    }
  }
}

TEST(FullyShardMemory, WhatIsObservedByClassIsAllOfIt) {
  BufferCounts counts;
  MemoryUse most;
  int64_t calls = 0;
  const auto stop = c10::make_scope_exit([] { observe_memory_use(nullptr); });
  observe_memory_use([&](const MemoryUse& use) {
    EXPECT_EQ(use.unsharded + use.communication, counts.bytes().now) << "call " << calls;
    most.unsharded = std::max(most.unsharded, use.unsharded);
    most.communication = std::max(most.communication, use.communication);
    ++calls;
  });
  {
    Chain chain(kDepth, 7);
    chain.shard({.mesh = fake_mesh()});
    for (int step = 0; step < 2; ++step) chain.forward().backward();
    EXPECT_EQ(most.unsharded, 2 * kFull);
    EXPECT_GE(most.communication, kInput + kGroups * kReduced) << "gradients stay where they were reduced";
    for (const auto& weight : chain.root.parameters()) {
      EXPECT_TRUE(is_counted_communication(weight.grad()));
      EXPECT_FALSE(is_counted_communication(weight));
    }
    chain.forward();  // the model is destroyed while unsharded
  }
  EXPECT_GT(calls, 0);
  EXPECT_EQ(counts.bytes().now, 0);
}

TEST(FullyShardMemory, AnOptimizerInBackwardNeedsOneGradient) {
  BufferCounts counts;
  Chain chain(kDepth, 7);
  chain.shard({.mesh = fake_mesh()});
  for (const auto& w : chain.root.parameters()) {
    register_post_accumulate_grad_hook(w, [](const at::Tensor& parameter) {
      reshard_and_view(parameter).local.sub_(parameter.grad(), 0.01);
      parameter.mutable_grad() = at::Tensor();
    });
  }
  for (int step = 0; step < 2; ++step) chain.forward().backward();
  EXPECT_EQ(counts.of(kReduced).most, 1);
  EXPECT_EQ(counts.bytes().now, 0);
}

/// Gradients with another dtype than their reduction are copies: the buffers are freed at once, not at the end of
/// backward as in PyTorch 2.11.
TEST(FullyShardMemory, ReplicasKeepNoReducedBufferALayer) {
  BufferCounts counts;
  Chain chain(kDepth, 9);  // a rank's 5 x 9 values and a flag: 184 bytes, by 128; gathered: 90, by 16
  chain.root.to(at::kBFloat16);
  FullyShardOptions options{.mesh = fake_mesh({2, kRanks}, {"replicate", "shard"})};
  options.mixed_precision.reduce_dtype = at::kFloat;
  chain.shard(options);
  for (int step = 0; step < 2; ++step) {
    chain.root.forward(fixed({4, 9}, 1).to(at::kBFloat16).requires_grad_()).sum().backward();
    EXPECT_EQ(counts.of(kRanks * 256).most, 1);
    EXPECT_EQ(counts.of(256).most, 2);  // one in an all-reduce, one in a reduce-scatter
    EXPECT_EQ(counts.bytes().now, 0);
  }
}

/// Fresh gradients, then sums with existing ones: buffers of two reductions and two unsharded units at most, however
/// many units there are.
TEST(FullyShardMemory, test_hsdp_backward_no_buffer_accumulation) {
  constexpr int64_t kUnits = 8, kWhole = 9 * 9 * 2, kGathered = kRanks * 96;
  for (const auto reduce : {at::kFloat, at::kBFloat16}) {
    BufferCounts counts;
    Chain chain(kUnits, 9);
    chain.root.to(at::kBFloat16);
    FullyShardOptions options{.mesh = fake_mesh({2, kRanks}, {"replicate", "shard"}), .reshard_after_forward = true};
    options.mixed_precision.reduce_dtype = reduce;
    chain.shard(options);
    const int64_t reduced = reduce == at::kFloat ? 256 : 128, input = kRanks * reduced;
    const bool are_views = reduce == at::kBFloat16;  // gradients of reduced buffers, which stay
    for (const bool fresh : {true, false}) {
      const at::Tensor loss = chain.root.forward(fixed({4, 9}, 1).to(at::kBFloat16).requires_grad_()).sum();
      const int64_t before = counts.bytes().now;
      counts.restart();
      loss.backward();
      const int64_t gradients = fresh && are_views ? (kUnits + 1) * reduced : 0;
      EXPECT_LE(counts.bytes().most - before, 2 * kWhole + kGathered + 2 * input + 2 * reduced + gradients);
      EXPECT_EQ(counts.bytes().now, are_views ? (kUnits + 1) * reduced : 0);
    }
  }
}

TEST(FullyShardMemory, AccumulationKeepsWholeGradientsAndNoBuffers) {
  BufferCounts counts;
  Chain chain(kDepth, 7);
  chain.shard({.mesh = fake_mesh()});
  const auto pending_bytes = [&] {
    int64_t bytes = 0;
    for (const auto& [parameter, gradient] : pending_gradients(chain.root))
      bytes += static_cast<int64_t>(gradient.nbytes());
    return bytes;
  };
  set_requires_gradient_sync(chain.root, false);
  for (int micro = 0; micro < 3; ++micro) {
    chain.forward().backward();
    EXPECT_EQ(counts.of(kInput).most + counts.of(kReduced).most, 0);
    EXPECT_EQ(counts.bytes().now, 0);
    EXPECT_EQ(pending_bytes(), kGroups * kFull);  // for any number of microbatches
  }
  set_requires_gradient_sync(chain.root, true);
  chain.forward().backward();
  EXPECT_EQ(counts.of(kInput).most, 1);
  EXPECT_EQ(counts.bytes().now, kGroups * kReduced);
  EXPECT_EQ(pending_bytes(), 0);
}

TEST(FullyShardMemory, LargeParametersAreGatheredWithoutASecondBuffer) {
  constexpr int64_t kWidth = 512, kWhole = kWidth * kWidth * 4;
  BufferCounts counts;
  Chain chain(kDepth, kWidth);
  chain.shard({.mesh = fake_mesh(), .reshard_after_forward = true});
  const at::Tensor loss = chain.forward();
  EXPECT_EQ(counts.bytes().most, 2 * kWhole);  // the root and one unit
  counts.restart();
  loss.backward();
  // A unit and the prefetched one; the root's weight was freed first.
  EXPECT_EQ(counts.of(kWhole).most, 2);
  EXPECT_EQ(counts.of(kWhole / kRanks).now, kGroups);
}

TEST(FullyShardMemory, test_fully_shard_training_memory_no_gc) {
  auto* allocator = new CountingAllocator;
  {
    BufferCounts counts;
    Chain chain(2, 7);
    chain.shard({.mesh = fake_mesh()});
    size_t live = 0;
    for (int step = 0; step < 1000; ++step) {
      chain.root.zero_grad();
      if (step % 4 < 2) set_requires_gradient_sync(chain.root, step % 4 == 1);
      chain.forward().backward();
      if (step == 1) live = allocator->live();
      if (step % 4 != 1) continue;
      ASSERT_EQ(allocator->live(), live) << "step " << step;
      ASSERT_EQ(counts.bytes().now, 3 * kReduced) << "step " << step;
    }
  }
  allocator->stop();
}

/// Units of two weights on two meshes.
TEST(FullyShardMemory, test_per_param_mesh_training_memory_no_gc) {
  auto* allocator = new CountingAllocator;
  {
    BufferCounts counts;
    FullyShardOptions options{.mesh = fake_mesh(), .reshard_after_forward = true};
    options.shard_placement_fn = [other = fake_mesh({4})](const at::Tensor& parameter) {
      return ShardPlacement{.mesh = parameter.size(0) == 8 ? other : nullptr};
    };
    Formula root({}, Body());
    std::vector<std::shared_ptr<Formula>> units;
    for (int i = 0; i < 2; ++i) {
      units.push_back(std::make_shared<Formula>(
          Sizes{{8, 7}, {7, 8}}, [](const Weights& w, at::Tensor x) { return at::linear(at::linear(x, w[0]), w[1]); }));
      root.register_module("unit" + std::to_string(i), units.back());
      fully_shard(*units.back(), options);
    }
    root.body = [&](const Weights&, at::Tensor x) {
      for (auto& unit : units) x = unit->forward(x);
      return x;
    };
    fully_shard(root, options);
    size_t live = 0;
    int64_t buffers = 0;
    for (int step = 0; step < 1000; ++step) {
      root.zero_grad();
      root.forward(fixed({4, 7}, 1)).sum().backward();
      if (step == 1) live = allocator->live(), buffers = counts.bytes().now;
      if (step < 1) continue;
      ASSERT_EQ(allocator->live(), live) << "step " << step;
      ASSERT_EQ(counts.bytes().now, buffers) << "step " << step;
    }
  }
  allocator->stop();
}

TEST(FullyShardMemory, test_fully_shard_del_memory) {
  auto* allocator = new CountingAllocator;
  BufferCounts counts;
  size_t before = 0;
  for (int time = 0; time < 2; ++time) {  // the first creates what the process keeps
    before = allocator->live();
    Chain chain(kDepth, 7);
    chain.shard({.mesh = fake_mesh(), .reshard_after_forward = false});
    chain.forward().backward();
    chain.forward();  // a model that is still unsharded
    EXPECT_GE(counts.bytes().now, kGroups * kFull);
    EXPECT_GE(allocator->live(), before + kGroups * 4 * 7 * 4);  // the local rows
  }
  EXPECT_EQ(counts.bytes().now, 0);
  EXPECT_EQ(allocator->live(), before);
  allocator->stop();
}

}  // namespace
}  // namespace megashard::testing
