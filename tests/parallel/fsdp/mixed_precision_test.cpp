// test_fully_shard_mixed_precision.py and _grad_dtype.py: dtypes of everything, and Module::to after fully_shard.

#include <ATen/ops/batch_norm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "parallel/device/torch_versions.h"
#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

at::Tensor two_layers(const Weights& w, at::Tensor x) {
  return at::linear(at::linear(x, w[0], w[1]).relu().to(w[2].scalar_type()), w[2]);
}
const Sizes kSizes{{7, 6}, {7}, {5, 7}};

struct PrecisionCase {
  std::optional<at::ScalarType> param, reduce;
  ReshardAfterForward reshard;
  std::optional<size_t> in_fp32{};  // index of a weight whose dtype is overridden
};

/// Three steps of gradient descent in fp32 on weights that compute in another dtype.
void expect_precision_parity(const PrecisionCase& given) {
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    FullyShardOptions options{.mesh = recording_mesh(world, {2}, {"shard"}, calls),
                              .reshard_after_forward = given.reshard};
    options.mixed_precision.param_dtype = given.param;
    options.mixed_precision.reduce_dtype = given.reduce;
    const auto compute = given.param.value_or(at::kFloat);
    const auto reduce = given.reduce.value_or(given.in_fp32 || kReducesInStoredDtype ? at::kFloat : compute);
    const auto dtype_of = [&](size_t i) { return i == given.in_fp32 ? at::kFloat : compute; };
    FormulaImpl master(kSizes, two_layers);  // fp32 weights, like the shards
    Formula unit(kSizes, two_layers);
    if (given.in_fp32) {
      const at::Tensor fp32 = unit.w[*given.in_fp32];
      options.param_dtype_override_fn = [fp32](const at::Tensor& parameter) {
        return parameter.is_same(fp32) ? std::optional(at::kFloat) : std::nullopt;
      };
    }
    fully_shard(unit, options);
    for (uint64_t step = 0; step < 3; ++step) {
      FormulaImpl plain(kSizes, two_layers, compute);
      for (size_t i = 0; i < plain.w.size(); ++i) plain.w[i].set_data(master.w[i].detach().to(dtype_of(i)));
      const at::Tensor x = fixed({4, 6}, 10 * step + static_cast<uint64_t>(world->rank()));
      const at::Tensor expected = plain.forward(x.to(compute)).sum();
      calls.clear();
      unit.zero_grad();
      const at::Tensor loss = unit.forward(x).sum();
      ASSERT_TRUE(at::equal(loss, expected)) << "step " << step;
      EXPECT_EQ(loss.scalar_type(), dtype_of(2));
      expected.backward();
      loss.backward();
      EXPECT_EQ(calls.back().operation, "reduce_scatter");
      EXPECT_EQ(calls.back().dtype, reduce);
      for (size_t i = 0; i < plain.w.size(); ++i) {
        at::Tensor reduced = plain.w[i].grad().to(reduce);
        if (reduce == at::kHalf) {  // halved first: sums of fp16 could overflow
          reduced.div_(2);
          world->all_reduce(reduced, ReduceOp::kSum).wait();
        } else {
          world->all_reduce(reduced, ReduceOp::kAvg).wait();
        }
        EXPECT_EQ(unit.w[i].grad().scalar_type(), at::kFloat);
        EXPECT_TRUE(at::equal(unit.w[i].grad(), part_like(reduced.to(at::kFloat), unit.w[i]))) << "w" << i;
        master.w[i].detach().sub_(reduced.to(at::kFloat), 0.01);
      }
      descend(unit);
    }
    expect_weights_of(master, unit);
  });
}

TEST(FullyShardMixedPrecision, test_compute_dtype) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const auto& reshard : {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward::to(2)})
      expect_precision_parity({dtype, {}, reshard});
  }
}

TEST(FullyShardMixedPrecision, test_reduce_dtype) {
  for (const bool reshard : {true, false}) {
    expect_precision_parity({at::kBFloat16, at::kFloat, reshard});
    expect_precision_parity({{}, at::kBFloat16, reshard});
  }
}

TEST(FullyShardMixedPrecision, AnOverriddenWeightComputesInItsOwnDtype) {
  for (const bool reshard : {true, false}) {
    expect_precision_parity({at::kBFloat16, {}, reshard, /*in_fp32=*/2});
    expect_precision_parity({at::kBFloat16, at::kFloat, reshard, /*in_fp32=*/2});
    expect_precision_parity({at::kBFloat16, at::kBFloat16, reshard, /*in_fp32=*/2});
  }
}

TEST(FullyShardMixedPrecision, test_reduce_dtype_after_frozen_first_forward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    FullyShardOptions options{.mesh = recording_mesh(world, {2}, {"shard"}, calls)};
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.reduce_dtype = at::kFloat;
    Formula unit(kSizes, two_layers);
    fully_shard(unit, options);
    for (const auto& w : unit.w) w.set_requires_grad(false);
    unit.forward(fixed({4, 6}, 1));
    for (const auto& w : unit.w) w.set_requires_grad(true);
    unit.forward(fixed({4, 6}, 1)).sum().backward();
    EXPECT_EQ(calls.back().operation, "reduce_scatter");
    EXPECT_EQ(calls.back().dtype, at::kFloat);
    for (const auto& w : unit.w) EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
  });
}

TEST(FullyShardMixedPrecision, test_grad_acc_with_reduce_dtype) {
  for (const bool reshard : {true, false}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      FullyShardOptions options{.mesh = flat_mesh(world), .reshard_after_forward = reshard};
      options.mixed_precision.param_dtype = at::kBFloat16;
      options.mixed_precision.reduce_dtype = at::kFloat;
      Formula unit(kSizes, two_layers);
      fully_shard(unit, options);
      std::vector<at::Tensor> sums(kSizes.size());
      for (uint64_t micro = 0; micro < 4; ++micro) {
        FormulaImpl plain(kSizes, two_layers, at::kBFloat16);
        const at::Tensor x = fixed({4, 6}, 10 * micro + static_cast<uint64_t>(world->rank()));
        plain.forward(x.to(at::kBFloat16)).sum().backward();
        for (size_t i = 0; i < sums.size(); ++i) {
          const at::Tensor one = plain.w[i].grad().to(at::kFloat);
          sums[i] = sums[i].defined() ? sums[i] + one : one;
        }
        set_requires_gradient_sync(unit, micro == 3);
        unit.forward(x).sum().backward();
      }
      for (size_t i = 0; i < sums.size(); ++i) {
        world->all_reduce(sums[i], ReduceOp::kAvg).wait();
        EXPECT_TRUE(at::equal(unit.w[i].grad(), part_like(sums[i], unit.w[i]))) << "w" << i;
      }
    });
  }
}

struct Activations {
  at::Tensor x;
  std::vector<at::Tensor> more;
  at::Tensor indices;
  template <class F>
  void visit_tensors(F&& f) {
    f(x);
    f(more);
    f(indices);
  }
};

struct StructuredImpl : torch::nn::Module {
  StructuredImpl() : w(register_parameter("w", fixed({6, 6}, 1))) {}
  Activations forward(Activations given) {
    seen = {given.x.scalar_type(), given.more.at(0).scalar_type(), given.indices.scalar_type()};
    return {at::linear(given.x + given.more[0], w), given.more, given.indices};
  }
  at::Tensor w;
  std::vector<at::ScalarType> seen;
};

TEST(FullyShardMixedPrecision, test_structured_input_output) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    FullyShardOptions options{.mesh = flat_mesh(world), .reshard_after_forward = true};
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.output_dtype = at::kFloat;
    Hooked<StructuredImpl> unit;
    fully_shard(unit, options);
    const at::Tensor x = fixed({4, 6}, 1).requires_grad_(), y = fixed({4, 6}, 2).requires_grad_();
    const Activations out = unit.forward({x, {y}, at::ones({3}, at::kLong)});
    EXPECT_EQ(unit.seen, (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16, at::kLong}));
    EXPECT_EQ(out.x.scalar_type(), at::kFloat);
    EXPECT_EQ(out.more.at(0).scalar_type(), at::kFloat);
    EXPECT_EQ(out.indices.scalar_type(), at::kLong);
    out.x.sum().backward();
    for (const auto& each : {x, y}) EXPECT_EQ(each.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(unit.w.grad().defined());
  });
}

TEST(FullyShardMixedPrecision, test_float16_on_one_submodule) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    // b computes in fp16 inside an fp32 model, which passes fp32 and expects fp32 back.
    for (const bool casts_inputs : {true, false}) {
      Chain chain;
      std::vector<at::ScalarType> inputs, outputs;
      chain.root.body = [&](const Weights& w, at::Tensor x) {
        for (auto& unit : chain.units) {
          const bool half = unit == chain.units[1];
          x = unit->forward(half && !casts_inputs ? x.to(at::kHalf) : x);
          outputs.push_back(x.scalar_type());
        }
        return at::linear(x, w[0]);
      };
      for (auto& unit : chain.units) {
        unit->body = [&](const Weights& w, at::Tensor x) {
          inputs.push_back(x.scalar_type());
          EXPECT_EQ(w[0].scalar_type(), x.scalar_type());
          return at::linear(x, w[0]);
        };
      }
      FullyShardOptions options{.mesh = flat_mesh(world)};
      fully_shard(*chain.units[0], options);
      options.mixed_precision = {
          .param_dtype = at::kHalf, .output_dtype = at::kFloat, .cast_forward_inputs = casts_inputs};
      fully_shard(*chain.units[1], options);
      options.mixed_precision = {};
      fully_shard(*chain.units[2], options);
      fully_shard(chain.root, options);
      chain.root.forward(fixed({4, 6}, 1) * 0.1).sum().backward();
      EXPECT_EQ(inputs, (std::vector<at::ScalarType>{at::kFloat, at::kHalf, at::kFloat}));
      EXPECT_EQ(outputs, (std::vector<at::ScalarType>(3, at::kFloat)));
      for (const auto& w : chain.root.parameters()) EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
    }
  });
}

struct ExternalImpl : torch::nn::Module {  // the second input is not an activation: a mask, a table
  ExternalImpl() : w(register_parameter("w", fixed({6, 6}, 1))) {}
  at::Tensor forward(at::Tensor x, at::Tensor table) {
    seen = {x.scalar_type(), table.scalar_type()};
    return at::linear(x, w) + table.to(w.scalar_type());
  }
  at::Tensor w;
  std::vector<at::ScalarType> seen;
};

TEST(FullyShardMixedPrecision, test_submodules_with_external_inputs) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    for (const bool casts : {true, false}) {
      FullyShardOptions options{.mesh = flat_mesh(world)};
      options.mixed_precision = {.param_dtype = at::kBFloat16, .cast_forward_inputs = casts};
      Hooked<ExternalImpl> unit;
      fully_shard(unit, options);
      unit.forward(fixed({4, 6}, 1).to(at::kBFloat16), at::ones({6})).sum().backward();
      EXPECT_EQ(unit.seen, (std::vector<at::ScalarType>{at::kBFloat16, casts ? at::kBFloat16 : at::kFloat}));
    }
  });
}

struct NormsImpl : torch::nn::Module {
  NormsImpl()
      : weight(register_parameter("weight", at::ones({6}))),
        bias(register_parameter("bias", at::zeros({6}))),
        running_mean(register_buffer("running_mean", at::zeros({6}))),
        running_var(register_buffer("running_var", at::ones({6}))),
        table(register_buffer("table", at::ones({6}))) {}
  at::Tensor forward(at::Tensor x) {
    if (layer_norm) return at::layer_norm(x, {6}, weight, bias) * table.to(x.scalar_type());
    // torch requires weights and statistics of one dtype: the activations' or fp32.
    const auto dtype = running_mean.scalar_type();
    return at::batch_norm(x, weight.to(dtype), bias.to(dtype), running_mean, running_var, true, 0.1, 1e-5, false);
  }
  at::Tensor weight, bias, running_mean, running_var, table;
  bool layer_norm = true;
};

void expect_norms_in(at::ScalarType dtype) {
  run_ranks(2, [=](const ProcessGroupPtr& world) {
    for (const bool casts_buffers : {false, true}) {
      FullyShardOptions options{.mesh = flat_mesh(world), .reshard_after_forward = true};
      options.mixed_precision.param_dtype = dtype;
      if (casts_buffers) options.mixed_precision.buffer_dtype = dtype;
      Hooked<NormsImpl> unit;
      fully_shard(unit, options);
      for (const auto& buffer : unit.buffers()) EXPECT_EQ(buffer.scalar_type(), casts_buffers ? dtype : at::kFloat);
      for (const bool layer_norm : {true, false}) {
        unit.layer_norm = layer_norm;
        unit.zero_grad();
        const at::Tensor y = unit.forward(fixed({8, 6}, 1));
        EXPECT_EQ(y.scalar_type(), dtype);
        y.pow(2).sum().backward();
        EXPECT_EQ(unit.weight.grad().scalar_type(), at::kFloat);
      }
      EXPECT_NE(unit.running_mean.abs().sum().item<float>(), 0);  // and they were updated
    }
  });
}

TEST(FullyShardMixedPrecision, test_norm_modules_bf16) { expect_norms_in(at::kBFloat16); }
TEST(FullyShardMixedPrecision, test_norm_modules_fp16) { expect_norms_in(at::kHalf); }

TEST(FullyShardMixedPrecision, test_clamp_reduce_dtype) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    FullyShardOptions options{.mesh = recording_mesh(world, {2}, {"shard"}, calls)};
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.reduce_dtype = at::kFloat;
    Formula unit(kSizes, two_layers);
    fully_shard(unit, options);
    unit.to(at::kBFloat16);  // now the stored dtype is the compute dtype; the reduce dtype stays
    unit.forward(fixed({4, 6}, 1)).sum().backward();
    EXPECT_EQ(calls.back().operation, "reduce_scatter");
    EXPECT_EQ(calls.back().dtype, at::kFloat);
    for (const auto& w : unit.w) {
      EXPECT_EQ(w.scalar_type(), at::kBFloat16);
      EXPECT_EQ(w.grad().scalar_type(), at::kBFloat16);
    }
  });
}

// Gradients with another dtype than the weights.

TEST(FullyShardGradDtype, test_default_gradient_dtype) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    FullyShardOptions options{.mesh = flat_mesh(world)};
    options.mixed_precision.param_dtype = at::kBFloat16;
    for (const auto stored : {at::kFloat, at::kBFloat16}) {
      Formula unit(kSizes, two_layers, stored);
      fully_shard(unit, options);
      unit.forward(fixed({4, 6}, 1)).sum().backward();
      for (const auto& w : unit.w) EXPECT_EQ(w.grad().scalar_type(), stored);
    }
  });
}

/// y = x wᵀ in bf16; the weight's gradient is computed and kept in fp32.
struct Fp32WeightGradient : torch::autograd::Function<Fp32WeightGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return at::linear(x, w);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor g = gradients[0].to(at::kFloat);
    return {at::matmul(gradients[0], saved[1]), at::matmul(g.t(), saved[0].to(at::kFloat))};
  }
};

at::Tensor fp32_gradient(const Weights& w, at::Tensor x) { return Fp32WeightGradient::apply(x, w[0]); }

TEST(FullyShardGradDtype, test_fp32_gradient) {
  for (const auto stored : {at::kFloat, at::kBFloat16}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      std::vector<CollectiveCall> calls;
      FullyShardOptions options{.mesh = recording_mesh(world, {2}, {"shard"}, calls), .reshard_after_forward = true};
      options.mixed_precision.param_dtype = at::kBFloat16;
      options.mixed_precision.grad_dtype = at::kFloat;
      Formula unit({{5, 6}}, fp32_gradient, stored);
      fully_shard(unit, options);
      at::Tensor sum;  // result of fp32 arithmetic without rounding to 16 bits
      for (uint64_t micro = 0; micro < 2; ++micro) {
        const at::Tensor x = fixed({4, 6}, 10 * micro + static_cast<uint64_t>(world->rank())).to(at::kBFloat16);
        unit.forward(x).sum().backward();
        const at::Tensor g = at::ones({4, 5});
        at::Tensor one = at::matmul(g.t(), x.to(at::kFloat));
        world->all_reduce(one, ReduceOp::kAvg).wait();
        sum = sum.defined() ? sum + one : one;
        EXPECT_EQ(calls.back().dtype, at::kFloat);
      }
      EXPECT_EQ(unit.w[0].grad().scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(unit.w[0].grad(), part_like(sum, unit.w[0])));
    });
  }
}

TEST(FullyShardGradDtype, test_explicit_reduction_dtype_and_unused_parameter) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    FullyShardOptions options{.mesh = recording_mesh(world, {2}, {"shard"}, calls)};
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.grad_dtype = at::kFloat;
    options.mixed_precision.reduce_dtype = at::kBFloat16;
    Formula unit({{5, 6}, {4}}, fp32_gradient);  // the second is never used
    fully_shard(unit, options);
    unit.forward(fixed({4, 6}, 1)).sum().backward();
    EXPECT_EQ(calls.back().dtype, at::kBFloat16);
    EXPECT_EQ(unit.w[0].grad().scalar_type(), at::kFloat);
    EXPECT_FALSE(unit.w[1].grad().defined());
  });
}

TEST(FullyShardGradDtype, test_invalid_dtype) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    FullyShardOptions options{.mesh = flat_mesh(world)};
    options.mixed_precision.grad_dtype = at::kLong;
    Formula unit(kSizes, two_layers);
    contains(message_of([&] { fully_shard(unit, options); }),
             "MixedPrecisionPolicy.grad_dtype is Long, which is not a floating dtype");
  });
}

}  // namespace
}  // namespace megashard::testing
