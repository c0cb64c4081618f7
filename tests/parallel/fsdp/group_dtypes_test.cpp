// dtypes of all communication under a MixedPrecisionPolicy.

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "parallel/fsdp/detail/comm_options.h"
#include "tests/support/formula.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

constexpr auto kHalfPrecision = at::kBFloat16;

TEST(FsdpMixedPrecision, GathersInParamDtypeReducesInReduceDtypeKeepsTheStoredDtype) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    FullyShardOptions options{.mesh = recording_mesh(world, {2}, {"shard"}, calls)};
    options.reshard_after_forward = true;
    options.mixed_precision.param_dtype = kHalfPrecision;
    options.mixed_precision.reduce_dtype = at::kFloat;
    at::ScalarType seen_weight{}, seen_input{}, seen_gradient{};
    Twins twins(
        {{5, 6}},
        [&](const Weights& w, at::Tensor x) {
          seen_weight = w[0].scalar_type();
          seen_input = x.scalar_type();
          return at::linear(x, w[0]);
        },
        options);
    twins.unit.w[0].register_hook([&](const at::Tensor& g) { seen_gradient = g.scalar_type(); });
    const at::Tensor output = twins.unit.forward(fixed({4, 6}, 1));  // fp32 input, cast before forward
    EXPECT_EQ(output.scalar_type(), kHalfPrecision);
    output.sum().backward();
    EXPECT_EQ(seen_weight, kHalfPrecision);
    EXPECT_EQ(seen_input, kHalfPrecision);
    EXPECT_EQ(seen_gradient, kHalfPrecision);

    ASSERT_EQ(calls.size(), 3U);  // gather, gather again, reduce
    for (size_t i : {0, 1}) {
      EXPECT_EQ(calls[i].operation, "all_gather");
      EXPECT_EQ(calls[i].dtype, at::kByte);  // packed: 3 rows of 6 in 2 bytes, rounded up to 16
      EXPECT_EQ(calls[i].numel, 48);
    }
    EXPECT_EQ(calls[2].operation, "reduce_scatter");
    EXPECT_EQ(calls[2].dtype, at::kFloat);
    EXPECT_EQ(calls[2].numel, 2 * 32);  // 3 rows of 6 and a gradient flag, rounded up to 128 bytes

    const at::Tensor& w = twins.unit.w[0];
    EXPECT_EQ(w.scalar_type(), at::kFloat);
    EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
    EXPECT_EQ(at::zeros_like(w).scalar_type(), at::kFloat);  // optimizers' state
    twins.plain.forward(fixed({4, 6}, 1).to(kHalfPrecision)).sum().backward();
    twins.expect_equal_gradients();
  });
}

TEST(FsdpMixedPrecision, LargeGradientsTravelInTheirOwnDtypeAndAreAddedInTheReduceDtype) {
  MEGASHARD_NOT_ON_SIM("NCCL adds numbers of one dtype");
  run_ranks(2, [](const ProcessGroupPtr& world) {
    constexpr int64_t kRows = 2 * kMinInPlaceBytes / 64;  // of 64 bytes in fp32
    std::vector<CollectiveCall> calls;
    FullyShardOptions options{.mesh = recording_mesh(world, {2}, {"shard"}, calls)};
    options.mixed_precision.param_dtype = kHalfPrecision;
    options.mixed_precision.reduce_dtype = at::kFloat;
    Formula unit({{kRows, 16}}, linear);
    fully_shard(unit, options);
    const auto gradient = [&](uint64_t step) {  // of this rank, as from backward
      const auto weight = at::zeros({kRows, 16}, kHalfPrecision).requires_grad_();
      linear({weight}, fixed({4, 16}, data_seed(step, *world)).to(kHalfPrecision)).sum().backward();
      return weight.grad().to(at::kFloat);
    };
    const auto backward = [&](uint64_t step) {
      unit.forward(fixed({4, 16}, data_seed(step, *world))).sum().backward();
    };
    const auto expect_mean = [&](const at::Tensor& of_rank) {
      at::Tensor sum = of_rank.clone();
      world->all_reduce(sum, ReduceOp::kAvg).wait();
      EXPECT_TRUE(at::equal(unit.w[0].grad(), sum.narrow(0, world->rank() * kRows / 2, kRows / 2)));
    };
    const auto dtype_on_the_wire = [&] {  // without the gradient flags
      const auto is_large = [](const CollectiveCall& call) {
        return call.operation == "reduce_scatter" && call.numel >= kRows * 16;
      };
      return std::ranges::find_if(calls.rbegin(), calls.rend(), is_large)->dtype;
    };
    backward(1);
    EXPECT_EQ(dtype_on_the_wire(), kHalfPrecision);
    expect_mean(gradient(1));

    unit.w[0].mutable_grad() = at::Tensor();
    set_requires_gradient_sync(unit, false);
    backward(1);
    set_requires_gradient_sync(unit, true);
    backward(2);
    EXPECT_EQ(dtype_on_the_wire(), at::kFloat);  // the sum of two does not fit in 16 bits
    expect_mean(gradient(1) + gradient(2));
  });
}

TEST(FsdpMixedPrecision, StoredHalfPrecisionMayReduceInSinglePrecision) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    FullyShardOptions options{.mesh = recording_mesh(world, {2}, {"shard"}, calls)};
    options.mixed_precision.reduce_dtype = at::kFloat;
    Formula unit({{5, 6}}, linear, kHalfPrecision);
    fully_shard(unit, options);
    unit.forward(fixed({4, 6}, 1).to(kHalfPrecision)).sum().backward();
    EXPECT_EQ(calls.back().dtype, at::kFloat);
    EXPECT_EQ(unit.w[0].grad().scalar_type(), kHalfPrecision);
  });
}

TEST(FsdpMixedPrecision, CastsInputsAndOutputsOnlyAsAskedAndNeverIntegers) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    at::ScalarType seen{};
    const Body look = [&](const Weights& w, at::Tensor x) {
      seen = x.scalar_type();
      return x.to(w[0].scalar_type()) * w[0];
    };
    FullyShardOptions options{.mesh = flat_mesh(world)};
    options.mixed_precision.param_dtype = kHalfPrecision;
    options.mixed_precision.output_dtype = at::kFloat;
    Twins casting({{6}}, look, options);
    const at::Tensor x = fixed({4, 6}, 1).requires_grad_();
    const at::Tensor output = casting.unit.forward(x);
    EXPECT_EQ(seen, kHalfPrecision);
    EXPECT_EQ(output.scalar_type(), at::kFloat);
    output.sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
    casting.unit.forward(x.detach().to(at::kLong));
    EXPECT_EQ(seen, at::kLong);

    options.mixed_precision.cast_forward_inputs = false;
    Twins plain({{6}}, look, options);
    plain.unit.forward(x);
    EXPECT_EQ(seen, at::kFloat);
  });
}

TEST(FsdpMixedPrecision, GradientsOfTwoDtypesInOneGroupAreReducedInTheWiderOne) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    const Body sum = [](const Weights& w, at::Tensor x) { return x * w[0] + x * w[1].to(at::kFloat); };
    Formula unit({{6}, {6}}, sum);
    unit.w[1].set_data(unit.w[1].detach().to(kHalfPrecision));
    fully_shard(unit, {.mesh = recording_mesh(world, {2}, {"shard"}, calls)});
    unit.forward(fixed({4, 6}, 1)).sum().backward();
    EXPECT_EQ(calls.back().dtype, at::kFloat);
    EXPECT_EQ(unit.w[0].grad().scalar_type(), at::kFloat);
    EXPECT_EQ(unit.w[1].grad().scalar_type(), kHalfPrecision);
  });
}

}  // namespace
}  // namespace megashard::testing
