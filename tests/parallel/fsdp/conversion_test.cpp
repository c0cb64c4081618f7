// Module::to after fully_shard: test_fully_shard_mixed_precision.py and _grad_dtype.py.

#include <ATen/ops/ones.h>
#include <ATen/ops/quantize_per_tensor.h>

#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

TEST(FullyShardTraining, test_to_float64_after_init) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
    plain.root.to(at::kDouble);
    chain.root.to(at::kDouble);
    for (uint64_t step = 0; step < 3; ++step) {
      const at::Tensor x = fixed({4, 6}, 10 * step + static_cast<uint64_t>(world->rank())).to(at::kDouble);
      plain.root.zero_grad();
      chain.root.zero_grad();
      const at::Tensor expected = plain.root.forward(x).sum();
      const at::Tensor loss = chain.root.forward(x).sum();
      ASSERT_TRUE(at::equal(loss, expected));
      expected.backward();
      loss.backward();
      average_gradients(plain.root, *world);
      expect_gradients_of(plain.root, chain.root);
      for (const auto& w : chain.root.parameters()) {
        EXPECT_EQ(w.scalar_type(), at::kDouble);
        EXPECT_EQ(w.grad().scalar_type(), at::kDouble);
      }
      descend(plain.root, 1e-3);
      descend(chain.root, 1e-3);
    }
    expect_weights_of(plain.root, chain.root);
  });
}

TEST(FullyShardInit, test_move_states_to_device_ignored_param_device) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const Body both = [](const Weights& w, at::Tensor x) { return at::linear(x, w[0]) * w[1]; };
    Formula unit({{6, 6}, {6}}, both);
    const void* const memory = unit.w[1].data_ptr();
    fully_shard(unit, {.mesh = flat_mesh(world), .ignored_parameters = {unit.w[1]}});
    EXPECT_EQ(unit.w[1].data_ptr(), memory);  // neither copied nor resharded
    EXPECT_EQ(unit.w[1].sizes(), at::IntArrayRef({6}));
    unit.to(at::kDouble);  // a later Module::to converts it normally
    EXPECT_EQ(unit.w[1].scalar_type(), at::kDouble);
    unit.forward(fixed({4, 6}, 1).to(at::kDouble)).sum().backward();
    EXPECT_EQ(unit.w[1].grad().scalar_type(), at::kDouble);
    EXPECT_EQ(unit.w[0].grad().scalar_type(), at::kDouble);
  });
}

/// A plain and a sharded chain after the same backward, for conversions.
struct Converted {
  explicit Converted(const ProcessGroupPtr& world) {
    chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
    plain.forward().backward();
    chain.forward().backward();
  }
  void expect_equal() {
    const auto expected = plain.root.named_parameters();
    for (const auto& item : chain.root.named_parameters()) {
      const at::Tensor whole = expected[item.key()];
      EXPECT_EQ(item.value().scalar_type(), whole.scalar_type());
      ASSERT_TRUE(item.value().grad().defined());
      EXPECT_TRUE(at::equal(item.value().grad().to(whole.scalar_type()),
                            part_like(whole.grad().to(whole.scalar_type()), item.value())))
          << item.key();
    }
    expect_weights_of(plain.root, chain.root);
  }
  Chain plain, chain;
};

TEST(FullyShardGradDtype, test_parameter_dtype_conversion_preserves_gradient) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    for (const auto dtype : {at::kDouble, at::kBFloat16}) {
      Converted models(world);
      models.plain.root.to(dtype);
      models.chain.root.to(dtype);
      models.expect_equal();
    }
  });
}

/// A sharded chain with fp32 gradients of bf16 arithmetic, and those gradients after one backward.
struct WithGradients {
  explicit WithGradients(const ProcessGroupPtr& world) {
    FullyShardOptions options{.mesh = flat_mesh(world), .reshard_after_forward = true};
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.grad_dtype = at::kFloat;
    chain.shard(options);
    chain.forward().backward();
    for (const auto& w : chain.root.parameters()) gradients.push_back(w.grad().clone());
  }
  void expect_gradients(double factor) {
    const auto parameters = chain.root.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      ASSERT_TRUE(parameters[i].grad().defined());
      EXPECT_EQ(parameters[i].grad().scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(parameters[i].grad(), gradients[i] * factor));
    }
  }
  Chain chain;
  std::vector<at::Tensor> gradients;
};

TEST(FullyShardGradDtype, test_parameter_conversion_with_gradient) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    WithGradients model(world);
    const at::Tensor gradient = model.chain.root.w[0].grad();
    EXPECT_THROW(model.chain.root.to(at::kXPU), c10::Error);  // a device that no build supports
    EXPECT_TRUE(model.chain.root.w[0].grad().is_same(gradient));
    model.chain.root.to(device_of_tests());
    model.chain.root.to(at::kDouble);
    model.chain.root.to(at::kFloat);
    expect_weights_of(Chain().root, model.chain.root);
    model.expect_gradients(1);
    model.chain.forward().backward();  // adds to the existing gradient
    model.expect_gradients(2);
  });
}

TEST(FullyShardGradDtype, test_partial_parameter_conversion_failure) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    WithGradients model(world);
    auto& first = *model.chain.units[0];
    // Quantised values cannot become doubles: the conversion fails after this unit's weight.
    first.register_buffer("stop", at::quantize_per_tensor(at::ones({1}), 1.0, 0, at::kQInt8));
    EXPECT_THROW(model.chain.root.to(at::kDouble), c10::Error);
    EXPECT_EQ(first.w[0].scalar_type(), at::kDouble);
    EXPECT_EQ(model.chain.units[1]->w[0].scalar_type(), at::kFloat);
    model.expect_gradients(1);
    EXPECT_THROW(model.chain.root.to(at::kFloat), c10::Error);
    EXPECT_EQ(first.w[0].scalar_type(), at::kFloat);
    model.chain.forward().backward();
    model.expect_gradients(2);
  });
}

TEST(FullyShardConversion, test_to_matches_plain_module) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Converted models(world);
    models.plain.root.to(at::kDouble);
    models.chain.root.to(at::kDouble);
    for (uint64_t step = 0; step < 2; ++step) {
      models.plain.root.zero_grad();
      models.chain.root.zero_grad();
      const at::Tensor x = fixed({4, 6}, step).to(at::kDouble);
      const at::Tensor expected = models.plain.root.forward(x).sum();
      const at::Tensor loss = models.chain.root.forward(x).sum();
      EXPECT_TRUE(at::equal(loss, expected));
      expected.backward();
      loss.backward();
      models.expect_equal();
      descend(models.plain.root, 1e-3);
      descend(models.chain.root, 1e-3);
    }
  });
}

TEST(FullyShardConversion, test_same_dtype_to_after_backward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Converted models(world);
    const at::Tensor w = models.chain.root.w[0];
    const void* const memory = reshard_and_view(w).local.data_ptr();
    models.chain.root.to(at::kFloat);
    EXPECT_EQ(reshard_and_view(w).local.data_ptr(), memory);
    models.expect_equal();
  });
}

TEST(FullyShardConversion, test_no_op_conversion_preserves_pending_grad) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    chain.shard({.mesh = flat_mesh(world)});
    for (uint64_t micro = 0; micro < 2; ++micro) {
      set_requires_gradient_sync(chain.root, micro == 1);
      plain.forward(micro).backward();
      chain.forward(micro).backward();
      chain.root.to(at::kFloat);  // in between; keeps gradients that wait for the reduction
    }
    expect_gradients_of(plain.root, chain.root);
  });
}

}  // namespace
}  // namespace megashard::testing
