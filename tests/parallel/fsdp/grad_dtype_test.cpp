// Tensor::set_grad_dtype before fully_shard: test_fully_shard_mixed_precision.py of PyTorch 2.15.

#include <ATen/ops/full.h>

#include "parallel/device/torch_versions.h"
#include "tests/support/parity.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

at::Tensor sum_of_linears(const Weights& w, at::Tensor x) {
  at::Tensor y = at::linear(x, w[0]).sum();
  for (size_t i = 1; i < w.size(); ++i) y = y + at::linear(x, w[i]).sum();
  return y;
}

/// This rank's gradient of the weights, in the dtype of computation.
at::Tensor gradient_of(const at::Tensor& x, at::ScalarType compute) {
  const at::Tensor w = fixed({4, 6}, 1).to(compute).requires_grad_();
  at::linear(x.to(compute), w).sum().backward();
  return w.grad();
}

at::Tensor mean(at::Tensor of_rank, ProcessGroup& world) {
  world.all_reduce(of_rank, ReduceOp::kAvg).wait();
  return of_rank;
}

TEST(FullyShardMixedPrecision, test_grad_dtype_per_parameter) {
  for (const bool reduces_in_fp32 : {false, true}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      std::vector<CollectiveCall> calls;
      FullyShardOptions options{.mesh = recording_mesh(world, {2}, {"shard"}, calls)};
      options.mixed_precision.param_dtype = at::kBFloat16;
      if (reduces_in_fp32) options.mixed_precision.reduce_dtype = at::kFloat;
      Formula unit({{4, 6}, {4, 6}}, sum_of_linears);
      unit.w[0].set_grad_dtype(at::kBFloat16);
      fully_shard(unit, options);
      const at::Tensor x = fixed({4, 6}, data_seed(0, *world));
      unit.forward(x).backward();
      const auto reduced = reduces_in_fp32 || kReducesInStoredDtype ? at::kFloat : at::kBFloat16;
      EXPECT_EQ(count(calls, "reduce_scatter"), 1);
      EXPECT_EQ(calls.back().dtype, reduced);
      const at::Tensor whole = mean(gradient_of(x, at::kBFloat16).to(reduced), *world);
      for (size_t i = 0; i < 2; ++i) {
        const auto stored = i == 0 ? at::kBFloat16 : at::kFloat;
        EXPECT_EQ(unit.w[i].grad().scalar_type(), stored);
        EXPECT_TRUE(at::equal(unit.w[i].grad(), part_like(whole.to(stored), unit.w[i]))) << "w" << i;
      }
    });
  }
}

TEST(FullyShardMixedPrecision, test_grad_dtype_preserved) {
  struct Case {
    at::ScalarType stored, gradient;
    std::optional<at::ScalarType> reduce;
  };
  for (const Case& given : {Case{at::kBFloat16, at::kFloat, {}}, Case{at::kBFloat16, at::kFloat, at::kBFloat16},
                            Case{at::kFloat, at::kBFloat16, {}}, Case{at::kFloat, at::kBFloat16, at::kFloat}}) {
    run_ranks(2, [&](const ProcessGroupPtr& world) {
      FullyShardOptions options{.mesh = flat_mesh(world)};
      options.mixed_precision.reduce_dtype = given.reduce;
      Formula unit({{4, 6}}, sum_of_linears, given.stored);
      unit.w[0].set_grad_dtype(given.gradient);
      fully_shard(unit, options);
      const auto pending_dtype = given.reduce.value_or(given.gradient);
      at::Tensor sum;
      for (uint64_t micro = 0; micro < 3; ++micro) {
        const bool last = micro == 2;
        set_requires_gradient_sync(unit, last);
        const at::Tensor x = fixed({4, 6}, data_seed(micro, *world)).to(given.stored);
        unit.forward(x).backward();
        const at::Tensor one = gradient_of(x, given.stored).to(given.gradient);
        sum = sum.defined() ? sum.add_(one) : one.to(pending_dtype, false, /*copy=*/true);
        if (last) continue;
        const auto pending = pending_gradients(unit);
        ASSERT_EQ(pending.size(), 1);
        EXPECT_EQ(pending[0].second.scalar_type(), pending_dtype);
        EXPECT_TRUE(at::equal(pending[0].second, sum));
        EXPECT_FALSE(unit.w[0].grad().defined());
      }
      EXPECT_EQ(unit.w[0].grad().scalar_type(), given.gradient);
      const at::Tensor whole = mean(sum, *world).to(given.gradient);
      EXPECT_TRUE(at::equal(unit.w[0].grad(), part_like(whole, unit.w[0])));
    });
  }
}

TEST(FullyShardMixedPrecision, test_grad_dtype_unused_last_microbatch) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    bool uses_both = true;
    Formula root({}, {});
    std::vector<std::shared_ptr<Formula>> units;
    FullyShardOptions options{.mesh = flat_mesh(world)};
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.reduce_dtype = at::kFloat;
    for (const char* name : {"a", "b"}) {
      units.push_back(std::make_shared<Formula>(Sizes{{4, 6}}, sum_of_linears));
      units.back()->w[0].set_grad_dtype(at::kBFloat16);
      root.register_module(name, units.back());
      fully_shard(*units.back(), options);
    }
    root.body = [&](const Weights&, at::Tensor x) {
      const at::Tensor y = units[0]->forward(x);
      return uses_both ? y + units[1]->forward(x) : y;
    };
    fully_shard(root, options);
    const at::Tensor x = fixed({4, 6}, data_seed(0, *world));
    set_requires_gradient_sync(root, false);
    root.forward(x).backward();
    for (const auto& unit : units) EXPECT_FALSE(unit->w[0].grad().defined());
    uses_both = false;
    set_requires_gradient_sync(root, true);
    root.forward(x).backward();
    const at::Tensor one = gradient_of(x, at::kBFloat16).to(at::kFloat);
    for (size_t i = 0; i < 2; ++i) {
      const at::Tensor whole = mean(one * (i == 0 ? 2 : 1), *world).to(at::kBFloat16);
      EXPECT_EQ(units[i]->w[0].grad().scalar_type(), at::kBFloat16);
      EXPECT_TRUE(at::equal(units[i]->w[0].grad(), part_like(whole, units[i]->w[0]))) << i;
    }
  });
}

TEST(FullyShardMixedPrecision, test_grad_dtype_fp16_existing_reduced_grad) {
  for (const bool cleared : {false, true}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      FullyShardOptions options{.mesh = flat_mesh(world)};
      options.mixed_precision.param_dtype = at::kHalf;
      options.mixed_precision.reduce_dtype = at::kHalf;
      Formula unit({{2, 1}}, sum_of_linears);
      unit.w[0].set_grad_dtype(at::kFloat);
      fully_shard(unit, options);
      const auto backward = [&](double value) { unit.forward(at::full({1, 1}, value, at::kFloat)).backward(); };
      backward(40000);
      EXPECT_EQ(unit.w[0].grad().item<float>(), 40000);
      if (cleared) unit.zero_grad();
      set_requires_gradient_sync(unit, false);
      backward(0);
      EXPECT_EQ(unit.w[0].grad().defined(), !cleared) << "earlier gradients do not enter the sum in fp16";
      set_requires_gradient_sync(unit, true);
      backward(40000);
      EXPECT_EQ(unit.w[0].grad().item<float>(), cleared ? 40000 : 80000);
    });
  }
}

}  // namespace
}  // namespace megashard::testing
