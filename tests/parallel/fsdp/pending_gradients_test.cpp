// test_fully_shard_pending_grad.py, and conversions with pending gradients from test_fully_shard_conversion.py:
// unsharded gradients of backwards without communication can be read, changed, dropped and reduced explicitly.

#include <torch/csrc/autograd/autograd.h>

#include <map>

#include "parallel/device/torch_versions.h"
#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

/// A plain chain and a sharded one without gradient sync.
struct Accumulating {
  explicit Accumulating(const FullyShardOptions& options) {
    chain.shard(options);
    set_requires_gradient_sync(chain.root, false);
  }
  void backward(uint64_t seed) {
    plain.forward(seed).backward();
    chain.forward(seed).backward();
  }
  Chain plain, chain;
};

DeviceMeshPtr replicated_mesh(const ProcessGroupPtr& world) {
  return std::make_shared<DeviceMesh>(world, std::vector<int>{2, world->size() / 2},
                                      std::vector<std::string>{"replicate", "shard"});
}

TEST(FullyShardPendingGrad, test_native_accumulation_dtypes) {
  struct Case {
    std::optional<at::ScalarType> param, reduce;
    at::ScalarType expected;
  };
  for (const Case& given :
       {Case{{}, {}, at::kFloat}, Case{at::kBFloat16, {}, kReducesInStoredDtype ? at::kFloat : at::kBFloat16},
        Case{at::kBFloat16, at::kFloat, at::kFloat}, Case{{}, at::kBFloat16, at::kBFloat16}}) {
    run_ranks(2, [&](const ProcessGroupPtr& world) {
      FullyShardOptions options{.mesh = flat_mesh(world)};
      options.mixed_precision.param_dtype = given.param;
      options.mixed_precision.reduce_dtype = given.reduce;
      Twins twins({{7, 6}}, linear, options);
      set_requires_gradient_sync(twins.unit, false);
      at::Tensor sum;
      for (uint64_t micro = 0; micro < 3; ++micro) {
        twins.plain.zero_grad();
        const at::Tensor x = fixed({4, 6}, 10 * micro + static_cast<uint64_t>(world->rank()));
        twins.plain.forward(x.to(twins.plain.w[0].scalar_type())).sum().backward();
        twins.unit.forward(x).sum().backward();
        const at::Tensor one = twins.plain.w[0].grad();
        sum = sum.defined() ? sum.add_(one) : one.to(given.expected, false, /*copy=*/true);
        const auto pending = pending_gradients(twins.unit);
        ASSERT_EQ(pending.size(), 1);
        EXPECT_EQ(pending[0].second.scalar_type(), given.expected);
        EXPECT_TRUE(at::equal(pending[0].second, sum));
        EXPECT_FALSE(twins.unit.w[0].grad().defined());
      }
      synchronize_gradients(twins.unit);
      world->all_reduce(sum, ReduceOp::kAvg).wait();
      const at::Tensor mine = twins.unit.w[0].grad();
      EXPECT_EQ(mine.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(mine, part_like(sum.to(at::kFloat), twins.unit.w[0])));
      EXPECT_TRUE(pending_gradients(twins.unit).empty());
    });
  }
}

TEST(FullyShardPendingGrad, test_native_storage_and_mutations) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Accumulating models({.mesh = flat_mesh(world)});
    models.backward(1);
    std::map<const c10::TensorImpl*, const void*> memory;
    for (const auto& [parameter, gradient] : pending_gradients(models.chain.root)) {
      memory[parameter.unsafeGetTensorImpl()] = gradient.data_ptr();
      gradient.mul_(4);  // the value that is finally reduced
    }
    EXPECT_EQ(memory.size(), 4);
    for (const auto& w : models.plain.root.parameters()) w.mutable_grad().mul_(4);
    models.backward(2);
    for (const auto& [parameter, gradient] : pending_gradients(models.chain.root))
      EXPECT_EQ(gradient.data_ptr(), memory.at(parameter.unsafeGetTensorImpl())) << "summed in place";
    synchronize_gradients(models.chain.root);
    expect_gradients_of(models.plain.root, models.chain.root);
    synchronize_gradients(models.chain.root);  // nothing is pending
    expect_gradients_of(models.plain.root, models.chain.root);
  });
}

TEST(FullyShardPendingGrad, test_grouped_clear_after_forward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    torch::nn::Module* const list[] = {chain.units[0].get(), chain.units[2].get()};
    fully_shard(list, {.mesh = flat_mesh(world)});
    fully_shard(*chain.units[1], {.mesh = flat_mesh(world)});
    fully_shard(chain.root, {.mesh = flat_mesh(world)});
    set_requires_gradient_sync(chain.root, false);
    plain.forward(1).backward();
    chain.forward(1).backward();
    const at::Tensor loss = chain.forward(2), expected = plain.forward(2);
    clear_pending_gradients(*chain.units[2],
                            /*recurse=*/false);  // its group, which includes the first unit
    EXPECT_EQ(pending_gradients(chain.root).size(), 2);
    EXPECT_TRUE(pending_gradients(*chain.units[0]).empty());
    for (const int cleared : {0, 2}) plain.units[static_cast<size_t>(cleared)]->zero_grad();
    expected.backward();
    loss.backward();
    synchronize_gradients(chain.root);
    expect_gradients_of(plain.root, chain.root);
  });
}

/// A pipeline stage: forwards of two microbatches, then their backwards in turn, each split into the inputs' gradients,
/// which the previous stage waits for, and the weights'.
TEST(FullyShardPendingGrad, test_grouped_pipeline_split_backward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = false});
    set_requires_gradient_sync(chain.root, false);
    set_reshard_after_backward(chain.root, false);
    std::vector<at::Tensor> inputs, losses;
    for (uint64_t micro = 0; micro < 2; ++micro) {
      inputs.push_back(fixed({4, 6}, micro).requires_grad_());
      losses.push_back(chain.root.forward(inputs.back()).sum());
      plain.forward(micro).backward();
    }
    for (size_t micro = 0; micro < 2; ++micro) {
      set_is_last_backward(chain.root, micro == 1);
      const auto passed_on = torch::autograd::grad({losses[micro]}, {inputs[micro]}, {},
                                                   /*retain_graph=*/true);
      EXPECT_TRUE(passed_on[0].defined());
      EXPECT_EQ(pending_gradients(chain.root).size(), micro == 0 ? 0 : 4);
      losses[micro].backward();
    }
    EXPECT_EQ(pending_gradients(chain.root).size(), 4);
    synchronize_gradients(chain.root);
    reshard(chain.root);
    expect_gradients_of(plain.root, chain.root);
  });
}

/// Each pending gradient is listed with the module's own parameter and has the unsharded sizes.
TEST(FullyShardPendingGrad, test_dtensor_pending_owner) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Accumulating models({.mesh = flat_mesh(world)});
    models.backward(1);
    const auto pending = pending_gradients(models.chain.root);
    const auto parameters = models.chain.root.parameters();
    ASSERT_EQ(pending.size(), parameters.size());
    for (const auto& [owner, gradient] : pending) {
      EXPECT_TRUE(std::any_of(parameters.begin(), parameters.end(),
                              [&owner = owner](const auto& w) { return w.is_same(owner); }));
      EXPECT_EQ(gradient.sizes(), (at::IntArrayRef{6, 6}));
      EXPECT_EQ(owner.sizes(), (at::IntArrayRef{3, 6}));
    }
    EXPECT_EQ(pending_gradients(*models.chain.units[1]).size(), 1);
    EXPECT_TRUE(pending_gradients(*models.chain.units[1])[0].first.is_same(models.chain.units[1]->w[0]));
  });
}

TEST(FullyShardPendingGrad, test_explicit_sync_divide_factor) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Accumulating models({.mesh = flat_mesh(world)});
    set_gradient_divide_factor(*models.chain.units[1], 8);
    models.backward(1);
    models.backward(2);
    synchronize_gradients(models.chain.root);
    models.plain.units[1]->w[0].mutable_grad().mul_(2.0 / 8);  // the sum over 2 ranks, by 8
    expect_gradients_of(models.plain.root, models.chain.root);
  });
}

/// HSDP: this rank owns a part of each gradient, not yet summed over replicas.
void expect_partial_ownership(int64_t dim) {
  run_ranks(4, [dim](const ProcessGroupPtr& world) {
    Chain plain, chain;
    chain.shard({.mesh = replicated_mesh(world),
                 .shard_placement_fn = [dim](const at::Tensor&) { return ShardPlacement{.dim = dim}; }});
    set_requires_all_reduce(chain.root, false);
    const auto rank = static_cast<uint64_t>(world->rank());
    chain.forward(10 + rank).backward();
    clear_pending_gradients(chain.root);  // no effect on later steps
    for (uint64_t micro = 0; micro < 2; ++micro) {
      plain.forward(20 * micro + rank).backward();
      chain.forward(20 * micro + rank).backward();
      EXPECT_TRUE(pending_gradients(chain.root).empty()) << "reduce-scattered: none is whole";
      for (const auto& w : chain.root.parameters()) EXPECT_FALSE(w.grad().defined());
    }
    synchronize_gradients(chain.root);
    average_gradients(plain.root, *world);
    // Four terms in another order: a few units in the last place.
    expect_gradients_of(plain.root, chain.root, 1e-6);
  });
}

TEST(FullyShardPendingGrad, test_native_partial_ownership) { expect_partial_ownership(0); }

TEST(FullyShardPendingGrad, test_native_partial_ownership_shard1) { expect_partial_ownership(1); }

TEST(FullyShardPendingGrad, test_native_spmd_accumulation) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    Accumulating models({.mesh = replicated_mesh(world)});
    for (uint64_t micro = 0; micro < 3; ++micro) models.backward(10 * micro + static_cast<uint64_t>(world->rank()));
    EXPECT_EQ(pending_gradients(models.chain.root).size(), 4);
    synchronize_gradients(models.chain.root);
    average_gradients(models.plain.root, *world);
    // Four terms in another order: a few units in the last place.
    expect_gradients_of(models.plain.root, models.chain.root, 1e-6);
  });
}

/// Converts while gradients are pending: every next forward throws until they are cleared.
void expect_conversion_requires_clear(const std::function<void(Chain& chain)>& convert) {
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    Accumulating models({.mesh = flat_mesh(world)});
    models.backward(1);
    convert(models.plain);
    convert(models.chain);
    for (int time = 0; time < 2; ++time) {
      for (const auto& w : models.chain.root.parameters()) reshard_and_view(w);  // changes nothing
      contains(message_of([&] {
                 models.chain.root.forward(fixed({4, 6}, 2).to(at::kDouble));
               }),
               "gradients wait for their reduction: call synchronize_gradients or "
               "clear_pending_gradients before Module::to");
    }
    models.plain.root.to(at::kDouble);
    models.chain.root.to(at::kDouble);
    clear_pending_gradients(models.chain.root);
    models.plain.root.zero_grad();
    for (Chain* each : {&models.plain, &models.chain})
      each->root.forward(fixed({4, 6}, 2).to(at::kDouble)).sum().backward();
    synchronize_gradients(models.chain.root);
    expect_gradients_of(models.plain.root, models.chain.root);
  });
}

TEST(FullyShardConversion, test_pending_grad_conversion_requires_clear) {
  expect_conversion_requires_clear([](Chain& chain) { chain.root.to(at::kDouble); });
}

TEST(FullyShardConversion, test_nested_conversion_requires_clear) {
  expect_conversion_requires_clear([](Chain& chain) {
    chain.units[0]->to(at::kDouble);
    chain.root.w[0].set_data(chain.root.w[0].detach().to(at::kDouble));
  });
}

/// The mesh fixes the device: a move throws, pending gradients or not, and changes nothing.
TEST(FullyShardConversion, test_device_only_conversion_requires_clear) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Accumulating models({.mesh = flat_mesh(world)});
    models.backward(1);
    contains(message_of([&] { models.chain.root.to(at::kMeta); }), "incompatible tensor type");
    EXPECT_EQ(pending_gradients(models.chain.root).size(), 4);
    models.backward(2);
    synchronize_gradients(models.chain.root);
    expect_gradients_of(models.plain.root, models.chain.root);
  });
}

TEST(FullyShardConversion, test_shared_parameter_conversion_requires_clear) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Formula tied({{6, 6}}, [](const Weights& w, at::Tensor x) { return at::linear(at::linear(x, w[0]).relu(), w[0]); });
    tied.register_parameter("again", tied.w[0]);
    fully_shard(tied, {.mesh = flat_mesh(world)});
    set_requires_gradient_sync(tied, false);
    tied.forward(fixed({4, 6}, 1)).sum().backward();
    tied.to(at::kDouble);
    const auto forward = [&] { return tied.forward(fixed({4, 6}, 1).to(at::kDouble)); };
    contains(message_of(forward), "clear_pending_gradients before Module::to");
    clear_pending_gradients(tied);
    EXPECT_EQ(forward().scalar_type(), at::kDouble);
  });
}

TEST(FullyShardConversion, test_grad_dtype_policy_preserved_after_conversion_and_replacement) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    FullyShardOptions options{.mesh = flat_mesh(world)};
    options.mixed_precision.grad_dtype = at::kFloat;
    options.mixed_precision.reduce_dtype = at::kFloat;
    Formula unit({{7, 6}}, linear, at::kBFloat16);
    fully_shard(unit, options);
    for (const auto dtype : {at::kBFloat16, at::kHalf, at::kDouble, at::kHalf}) {
      unit.zero_grad();
      if (dtype == at::kDouble) {
        unit.w[0].set_data(fixed({7, 6}, 5).to(dtype));  // replaced by another whole weight
      } else {
        unit.to(dtype);
      }
      unit.forward(fixed({4, 6}, 1).to(dtype)).sum().backward();
      EXPECT_EQ(unit.w[0].grad().scalar_type(), at::kFloat) << "stored in " << dtype;
    }
  });
}

TEST(FullyShardConversion, test_grad_dtype_change_after_fully_shard_rejected) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    for (const bool by_policy : {false, true}) {
      FullyShardOptions options{.mesh = flat_mesh(world), .reshard_after_forward = true};
      if (by_policy) options.mixed_precision.grad_dtype = at::kFloat;
      Formula unit({{7, 6}}, linear, at::kBFloat16);
      fully_shard(unit, options);
      const at::Tensor x = fixed({4, 6}, 1).to(at::kBFloat16);
      unit.forward(x).sum().backward();
      unit.zero_grad();
      unit.w[0].set_grad_dtype(at::kDouble);
      contains(message_of([&] { unit.forward(x); }), "parameter 'w0' was given gradients in Double after fully_shard");
      unit.w[0].set_grad_dtype(by_policy ? at::kFloat : at::kBFloat16);
      unit.forward(x).sum().backward();
    }
  });
}

/// A conversion is noticed even if another reader, such as an optimizer, looked at the rows first.
TEST(FullyShardConversion, IsNotForgottenWhenTheRowsAreLookedAtFirst) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Twins twins({{7, 6}}, linear, {.mesh = flat_mesh(world)});
    twins.unit.forward(fixed({4, 6}, 1));
    twins.plain.to(at::kDouble);
    twins.unit.to(at::kDouble);
    EXPECT_EQ(reshard_and_view(twins.unit.w[0]).local.scalar_type(), at::kDouble);
    const at::Tensor x = fixed({4, 6}, 2).to(at::kDouble);
    EXPECT_TRUE(at::equal(twins.unit.forward(x), twins.plain.forward(x)));
  });
}

}  // namespace
}  // namespace megashard::testing
