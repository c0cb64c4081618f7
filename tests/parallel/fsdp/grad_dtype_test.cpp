// Tensor::set_grad_dtype before fully_shard: test_fully_shard_mixed_precision.py of PyTorch 2.15.

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "parallel/device/torch_versions.h"
#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

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

/// Argument of set_grad_dtype.
enum class Given { kNothing, kAny, kHalf, kFloat };

/// Returns the dtype of gradients that are reduced in fp32, of a weight stored in bf16.
at::ScalarType give(const at::Tensor& w, Given given) {
  if (given == Given::kNothing) return at::kBFloat16;
  if (given == Given::kAny) {
    w.set_grad_dtype(std::nullopt);
    return at::kFloat;
  }
  const auto dtype = given == Given::kHalf ? at::kHalf : at::kFloat;
  w.set_grad_dtype(dtype);
  return dtype;
}

/// All ranks in one dimension, or 2 x 2 with replicas.
DeviceMeshPtr mesh_of(const ProcessGroupPtr& world, bool replicas, std::vector<CollectiveCall>& calls) {
  return replicas ? recording_mesh(world, {2, 2}, {"replicate", "shard"}, calls)
                  : recording_mesh(world, {world->size()}, {"shard"}, calls);
}

TEST(FullyShardMixedPrecision, test_grad_dtype_copy_in) {
  for (const bool replicas : {false, true}) {
    run_ranks(4, [=](const ProcessGroupPtr& world) {
      std::vector<CollectiveCall> calls;
      FullyShardOptions options{.mesh = mesh_of(world, replicas, calls)};
      options.mixed_precision.param_dtype = at::kBFloat16;
      options.mixed_precision.reduce_dtype = at::kFloat;
      bool uses_both = true;
      Formula unit({{4, 6}, {4, 6}},
                   [&](const Weights& w, at::Tensor x) { return sum_of_linears(uses_both ? w : Weights{w[0]}, x); });
      fully_shard(unit, options);
      const at::Tensor x = fixed({4, 6}, data_seed(0, *world)), one = gradient_of(x, at::kBFloat16).to(at::kFloat);
      const auto backward = [&](bool reduces) {
        set_requires_gradient_sync(unit, reduces || replicas);
        if (replicas) set_requires_all_reduce(unit, reduces);
        calls.clear();
        unit.forward(x).backward();
        EXPECT_EQ(count(calls, "reduce_scatter"), reduces || replicas ? 1 : 0);
        EXPECT_EQ(count(calls, "all_reduce"), reduces && replicas ? 1 : 0);
        for (const auto& call : calls) EXPECT_EQ(call.dtype, call.operation == "all_gather" ? at::kByte : at::kFloat);
      };
      const auto expect_times = [&](double first, double second) {
        EXPECT_TRUE(at::equal(unit.w[0].grad(), part_like(mean(one * first, *world), unit.w[0])));
        EXPECT_TRUE(at::equal(unit.w[1].grad(), part_like(mean(one * second, *world), unit.w[1])));
        unit.zero_grad();
      };
      for (int fresh = 0; fresh < 2; ++fresh) {
        backward(true);
        expect_times(1, 1);
      }
      uses_both = false;
      backward(false);
      EXPECT_FALSE(unit.w[0].grad().defined());
      uses_both = true;
      backward(true);
      expect_times(2, 1);
      backward(true);
      expect_times(1, 1);
    });
  }
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
  for (const Case& given :
       {Case{at::kBFloat16, at::kFloat, {}}, Case{at::kBFloat16, at::kFloat, at::kBFloat16},
        Case{at::kBFloat16, at::kFloat, at::kFloat}, Case{at::kFloat, at::kBFloat16, {}},
        Case{at::kFloat, at::kBFloat16, at::kBFloat16}, Case{at::kFloat, at::kBFloat16, at::kFloat}}) {
    run_ranks(2, [&](const ProcessGroupPtr& world) {
      FullyShardOptions options{.mesh = flat_mesh(world)};
      options.mixed_precision.reduce_dtype = given.reduce;
      Formula unit({{4, 6}}, sum_of_linears, given.stored);
      unit.w[0].set_grad_dtype(given.gradient);
      fully_shard(unit, options);
      set_reshard_after_backward(unit, given.reduce.has_value());
      const auto pending_dtype = given.reduce.value_or(given.gradient);
      at::Tensor sum;
      for (uint64_t micro = 0; micro < 3; ++micro) {
        const bool last = micro == 2;
        set_requires_gradient_sync(unit, last);
        // Large, then small: a gradient that is rounded on its way shows.
        const at::Tensor x = (fixed({4, 6}, data_seed(micro, *world)) * (micro == 0 ? 128 : 0.0625)).to(given.stored);
        unit.forward(x).backward();
        const at::Tensor one = gradient_of(x, given.stored).to(pending_dtype);
        sum = sum.defined() ? sum.add_(one) : one.clone();
        if (last) continue;
        const auto pending = pending_gradients(unit);
        ASSERT_EQ(pending.size(), 1);
        EXPECT_EQ(pending[0].second.scalar_type(), pending_dtype);
        EXPECT_TRUE(at::equal(pending[0].second, sum));
        EXPECT_FALSE(unit.w[0].grad().defined());
        reshard(unit);
        unit.zero_grad();  // clears reduced gradients alone
      }
      EXPECT_EQ(unit.w[0].grad_dtype(), given.gradient);
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

/// Gradients without a dtype of their own have the dtype of the reduction, in which those of all ranks are uniform.
TEST(FullyShardMixedPrecision, test_grad_dtype_none_requires_uniform_gradients) {
  for (const bool replicas : {false, true}) {
    run_ranks(4, [=](const ProcessGroupPtr& world) {
      std::vector<CollectiveCall> calls;
      FullyShardOptions options{.mesh = mesh_of(world, replicas, calls)};
      // The first weight's gradient is computed in fp32, the second one's in bf16.
      const Body body = [](const Weights& w, at::Tensor x) {
        return (w[0] * x).sum() + (w[1] * x.to(w[1].scalar_type())).sum().to(at::kFloat);
      };
      Formula unit({{8}, {8}}, body, at::kBFloat16);
      for (const auto& w : unit.w) w.set_grad_dtype(std::nullopt);
      contains(message_of([&] { fully_shard(unit, options); }),
               "parameter 'w0' takes gradients of any dtype (set_grad_dtype without one)");
      options.mixed_precision.reduce_dtype = at::kFloat;
      fully_shard(unit, options);
      std::vector<at::Tensor> sums(2);
      for (uint64_t micro = 0; micro < 2; ++micro) {
        set_requires_gradient_sync(unit, micro == 1);
        const at::Tensor x = fixed({8}, data_seed(micro, *world));
        calls.clear();
        unit.forward(x).backward();
        const at::Tensor seen[] = {x, x.to(at::kBFloat16).to(at::kFloat)};
        for (size_t i = 0; i < 2; ++i) sums[i] = sums[i].defined() ? sums[i] + seen[i] : seen[i];
      }
      EXPECT_EQ(count(calls, "reduce_scatter"), 1);
      EXPECT_EQ(count(calls, "all_reduce"), replicas ? 1 : 0);
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(unit.w[i].grad().scalar_type(), at::kFloat);
        EXPECT_LE((unit.w[i].grad() - part_like(mean(sums[i], *world), unit.w[i])).abs().max().item<double>(), 1e-6);
      }
    });
  }
}

/// PyTorch's zero_grad drops what waits for its reduction if it is called between forward and backward; here
/// clear_pending_gradients does, at any time.
TEST(FullyShardMixedPrecision, test_grad_dtype_zero_grad_after_forward) {
  for (const bool set_to_none : {true, false}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      FullyShardOptions options{.mesh = flat_mesh(world)};
      options.mixed_precision.reduce_dtype = at::kFloat;
      Formula unit({{4, 6}}, sum_of_linears, at::kBFloat16);
      unit.w[0].set_grad_dtype(at::kFloat);
      fully_shard(unit, options);
      set_requires_gradient_sync(unit, false);
      const auto input = [&](uint64_t micro) { return fixed({4, 6}, data_seed(micro, *world)).to(at::kBFloat16); };
      for (uint64_t micro = 0; micro < 2; ++micro) unit.forward(input(micro)).backward();
      const at::Tensor loss = unit.forward(input(2));
      unit.zero_grad(set_to_none);
      EXPECT_EQ(pending_gradients(unit).size(), 1);
      clear_pending_gradients(unit);
      loss.backward();
      EXPECT_FALSE(unit.w[0].grad().defined());
      const auto pending = pending_gradients(unit);
      ASSERT_EQ(pending.size(), 1);
      EXPECT_EQ(pending[0].second.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(pending[0].second, gradient_of(input(2), at::kBFloat16).to(at::kFloat)));
    });
  }
}

TEST(FullyShardMixedPrecision, test_grad_dtype_after_device_conversion) {
  for (const auto given : {Given::kNothing, Given::kFloat, Given::kAny}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      FullyShardOptions options{.mesh = flat_mesh(world)};
      options.mixed_precision.param_dtype = at::kBFloat16;
      options.mixed_precision.reduce_dtype = at::kFloat;
      FormulaImpl plain({{4, 6}}, sum_of_linears, at::kBFloat16);
      Formula unit({{4, 6}}, sum_of_linears, at::kBFloat16);
      const auto dtype = give(unit.w[0], given);
      fully_shard(unit, options);
      unit.to(device_of_tests());
      for (const bool sync : {false, true}) {
        set_requires_gradient_sync(unit, sync);
        unit.forward(at::ones({2, 6})).backward();
      }
      EXPECT_EQ(unit.w[0].grad_dtype(), dtype);
      EXPECT_EQ(unit.w[0].grad().scalar_type(), dtype);
      EXPECT_TRUE((unit.w[0].grad() == 4).all().item<bool>());
      if (given != Given::kNothing) return;
      plain.w[0].mutable_grad() = at::full({4, 6}, 4, plain.w[0].options());
      torch::optim::Adam(plain.w, 0.1).step();
      torch::optim::Adam(unit.w, 0.1).step();
      expect_weights_of(plain, unit);
    });
  }
}

TEST(FullyShardMixedPrecision, test_grad_dtype_device_conversion_with_existing_grad) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    FormulaImpl plain({{4, 6}}, sum_of_linears, at::kBFloat16);
    Formula unit({{4, 6}}, sum_of_linears, at::kBFloat16);
    for (const auto& w : {plain.w[0], unit.w[0]}) w.set_grad_dtype(at::kFloat);
    fully_shard(unit, {.mesh = flat_mesh(world)});
    unit.w[0].mutable_grad() = at::ones({2, 6});
    unit.to(device_of_tests());
    EXPECT_EQ(unit.w[0].grad().scalar_type(), at::kFloat);
    unit.forward(at::ones({2, 6}).to(at::kBFloat16)).backward();
    EXPECT_EQ(unit.w[0].grad().scalar_type(), at::kFloat);
    EXPECT_TRUE((unit.w[0].grad() == 3).all().item<bool>());
    plain.w[0].mutable_grad() = at::full({4, 6}, 3, at::kFloat);
    torch::optim::SGD(plain.w, 0.1).step();
    torch::optim::SGD(unit.w, 0.1).step();
    expect_weights_of(plain, unit);
  });
}

/// Weights are loaded into the parameter, or replace its rows.
TEST(FullyShardMixedPrecision, test_grad_dtype_preserved_across_load_state_dict) {
  for (const bool replaces : {false, true}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      Chain plain, chain;
      for (Chain* each : {&plain, &chain}) {
        each->root.to(at::kBFloat16);
        for (const auto& w : each->root.parameters()) w.set_grad_dtype(at::kFloat);
      }
      chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
      const auto whole = plain.root.named_parameters();
      for (const auto& item : whole) item.value().set_data(item.value().detach() * 2);
      for (const auto& item : chain.root.named_parameters()) {
        const at::Tensor& given = whole[item.key()];
        replaces ? item.value().set_data(given.detach()) : assign_full_parameter(item.value(), given);
      }
      const at::Tensor x = fixed({4, 6}, data_seed(0, *world)).to(at::kBFloat16);
      plain.root.forward(x).sum().backward();
      chain.root.forward(x).sum().backward();
      average_gradients(plain.root, *world);
      for (const auto& item : chain.root.named_parameters()) {
        const at::Tensor& w = item.value();
        EXPECT_EQ(w.grad_dtype(), at::kFloat) << item.key();
        EXPECT_EQ(w.grad().scalar_type(), at::kFloat) << item.key();
        EXPECT_TRUE(at::equal(w.grad(), part_like(whole[item.key()].grad(), w))) << item.key();
      }
    });
  }
}

// Many gradient dtypes in one reduction. Inputs are small integers: sums and means are exact in every dtype.

struct MixedGradients {
  MixedGradients(const ProcessGroupPtr& group, const FullyShardOptions& options, const Sizes& sizes,
                 const std::vector<Given>& given)
      : world(*group),
        unit(sizes, [this](const Weights& w, at::Tensor x) { return sum_of_used(w, x); }),
        sums(sizes.size()) {
    for (size_t i = 0; i < sizes.size(); ++i) dtypes.push_back(give(unit.w[i], given[i % given.size()]));
    fully_shard(unit, options);
    unit.to(at::kBFloat16);
  }
  MixedGradients(const MixedGradients&) = delete;  // the body refers to this

  at::Tensor sum_of_used(const Weights& w, const at::Tensor& x) const {
    at::Tensor y = x.sum() * 0;
    for (const size_t i : used) y = y + at::linear(x, w[i]).sum();
    return y;
  }
  void backward(uint64_t seed, const std::vector<size_t>& uses) {
    used = uses;
    const at::Tensor x = fixed({2, 8}, data_seed(seed, world)).round();
    unit.forward(x.to(at::kBFloat16).requires_grad_()).backward();
    for (const size_t i : used) sums[i] = sums[i].defined() ? sums[i] + x.sum(0) : x.sum(0);  // every row of w has it
  }
  void expect_means_and_clear() {
    for (size_t i = 0; i < sums.size(); ++i) {
      const at::Tensor gradient = unit.w[i].grad(), sum = std::exchange(sums[i], {});
      ASSERT_EQ(gradient.defined(), sum.defined()) << "w" << i;
      if (!sum.defined()) continue;
      EXPECT_EQ(gradient.scalar_type(), dtypes[i]) << "w" << i;
      const at::Tensor whole = mean(sum, world).to(dtypes[i]).expand(global_sizes(unit.w[i]));
      EXPECT_TRUE(at::equal(gradient, part_like(whole, unit.w[i]))) << "w" << i;
    }
    unit.zero_grad();
  }

  ProcessGroup& world;
  std::vector<size_t> used;  // weights that the next forward uses
  Formula unit;
  std::vector<at::ScalarType> dtypes;
  std::vector<at::Tensor> sums;  // gradients of this rank, by weight; undefined: unused
};

FullyShardOptions reducing_in_fp32(DeviceMeshPtr mesh, int64_t dim) {
  FullyShardOptions options{.mesh = std::move(mesh)};
  options.shard_placement_fn = [dim](const at::Tensor&) { return ShardPlacement{.dim = dim}; };
  options.mixed_precision.reduce_dtype = at::kFloat;
  return options;
}

TEST(FullyShardMixedPrecision, test_grad_pending_all_reduce_buffer) {
  for (const int64_t dim : {0, 1}) {
    run_ranks(4, [=](const ProcessGroupPtr& world) {
      std::vector<CollectiveCall> calls;
      MixedGradients models(world, reducing_in_fp32(mesh_of(world, true, calls), dim), {{3, 8}, {5, 8}, {7, 8}, {9, 8}},
                            {Given::kFloat, Given::kHalf, Given::kAny, Given::kFloat});
      const std::vector<std::vector<size_t>> uses = {{0, 1}, {0, 1}, {1, 2}, {3}, {}, {0, 1, 2, 3}, {2}};
      for (size_t step = 0; step < uses.size(); ++step) {
        const bool last = step + 1 == uses.size();
        set_requires_all_reduce(models.unit, last);
        calls.clear();
        models.backward(step, uses[step]);
        EXPECT_EQ(count(calls, "all_gather"), 1);
        EXPECT_EQ(count(calls, "reduce_scatter"), 1);
        EXPECT_EQ(count(calls, "all_reduce"), last ? 1 : 0);
        for (const auto& w : models.unit.w) EXPECT_EQ(w.grad().defined(), last);
      }
      models.expect_means_and_clear();

      set_requires_all_reduce(models.unit, false);
      models.backward(10, {0, 1});
      reset_iter_state(models.unit);
      models.sums.assign(4, {});
      set_requires_all_reduce(models.unit, true);
      models.backward(11, {1, 3});
      models.expect_means_and_clear();
    });
  }
}

TEST(FullyShardMixedPrecision, test_packed_grad_dtypes) {
  Sizes sizes;
  for (int64_t rows = 1; rows <= 17; rows += 2) sizes.push_back({rows, 8});
  for (const bool replicas : {false, true}) {
    for (const int64_t dim : {0, 1}) {
      run_ranks(4, [&](const ProcessGroupPtr& world) {
        std::vector<CollectiveCall> calls;
        MixedGradients models(world, reducing_in_fp32(mesh_of(world, replicas, calls), dim), sizes,
                              {Given::kHalf, Given::kAny, Given::kNothing, Given::kFloat});
        uint64_t seed = 0;
        for (const auto& uses :
             std::vector<std::vector<size_t>>{{0, 1, 2, 3, 4, 5, 6, 7, 8}, {0, 2, 4, 6, 8}, {1, 7}}) {
          for (int time = 0; time < 2; ++time) {
            calls.clear();
            models.backward(seed++, uses);
            EXPECT_EQ(count(calls, "all_gather"), 1);
            EXPECT_EQ(count(calls, "reduce_scatter"), 1);
            EXPECT_EQ(count(calls, "all_reduce"), replicas ? 1 : 0);
            EXPECT_EQ(calls.back().dtype, at::kFloat);
          }
          models.expect_means_and_clear();
        }
      });
    }
  }
}

}  // namespace
}  // namespace megashard::testing
