#include "framework/training/optimizers/optimizer.h"

#include <ATen/Functions.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "parallel/fsdp/fully_shard.h"
#include "tests/support/counting_allocator.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

at::Tensor leaf(std::vector<int64_t> sizes, int64_t seed, at::ScalarType dtype = at::kFloat) {
  const auto n = at::arange(1, c10::multiply_integers(sizes) + 1, at::kFloat);
  return (n * 0.37 + seed).sin().view(sizes).to(dtype).requires_grad_();
}

NamedTensors small_model(at::ScalarType dtype = at::kFloat) {
  return {{"layer.weight", leaf({5, 3}, 1, dtype)},
          {"layer.bias", leaf({5}, 2, dtype)},
          {"norm.weight", leaf({3}, 3, dtype)},
          {"head.weight", leaf({7, 5}, 4, dtype)}};
}

void set_gradients(const NamedTensors& model, int64_t step) {
  int64_t seed = 100 * step;
  for (const auto& [name, parameter] : model) {
    parameter.mutable_grad() = leaf(parameter.sizes().vec(), ++seed).detach().to(parameter.scalar_type());
  }
}

/// torch::optim's options for the two groups of Megatron's rule: 2-D weights, then the rest.
template <class Options>
std::vector<torch::optim::OptimizerParamGroup> groups_of(const NamedTensors& model, Options decayed, Options plain) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{model[0].second, model[3].second}, std::make_unique<Options>(decayed));
  groups.emplace_back(std::vector<at::Tensor>{model[1].second, model[2].second}, std::make_unique<Options>(plain));
  return groups;
}

double largest_difference(const NamedTensors& a, const NamedTensors& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    worst = std::max(worst, (a[i].second - b[i].second).abs().max().item<double>());
  }
  return worst;
}

TEST(OptimizerTest, AdamWStepsAsTorchDoes) {
  const auto ours = small_model(), theirs = small_model();
  auto optimizer = make_optimizer(ours, {.lr = 1e-2, .weight_decay = 0.1, .beta2 = 0.95});
  auto options = torch::optim::AdamWOptions(1e-2).betas({0.9, 0.95}).weight_decay(0.1);
  auto plain = options;
  torch::optim::AdamW reference(groups_of(theirs, options, plain.weight_decay(0)));
  for (int64_t step = 1; step <= 10; ++step) {
    set_gradients(ours, step);
    set_gradients(theirs, step);
    optimizer->step();
    reference.step();
  }
  // The fused kernel and torch::optim round in another order.
  EXPECT_LT(largest_difference(ours, theirs), 1e-6);
}

TEST(OptimizerTest, SgdStepsAsTorchDoes) {
  for (const double momentum : {0.0, 0.9}) {
    const auto ours = small_model(), theirs = small_model();
    auto optimizer =
        make_optimizer(ours, {.kind = OptimizerKind::kSgd, .lr = 1e-2, .weight_decay = 0.1, .momentum = momentum});
    auto options = torch::optim::SGDOptions(1e-2).momentum(momentum).weight_decay(0.1);
    auto plain = options;
    torch::optim::SGD reference(groups_of(theirs, options, plain.weight_decay(0)), torch::optim::SGDOptions(1e-2));
    for (int64_t step = 1; step <= 5; ++step) {
      set_gradients(ours, step);
      set_gradients(theirs, step);
      optimizer->step();
      reference.step();
    }
    EXPECT_LT(largest_difference(ours, theirs), 1e-6) << "momentum " << momentum;
  }
}

TEST(OptimizerTest, GroupsFollowMegatronsRuleAndTheSchedule) {
  auto optimizer = make_optimizer(small_model(), {.lr = 0.5, .weight_decay = 0.1});
  ASSERT_EQ(optimizer->param_groups().size(), 2u);
  const auto& decayed = optimizer->param_groups()[0];
  const auto& plain = optimizer->param_groups()[1];
  EXPECT_EQ(decayed.params, (std::vector<std::string>{"layer.weight", "head.weight"}));
  EXPECT_EQ(plain.params, (std::vector<std::string>{"layer.bias", "norm.weight"}));
  optimizer->set_lr(0.25);
  optimizer->set_weight_decay(0.2);
  EXPECT_EQ(decayed.lr, 0.25);
  EXPECT_EQ(plain.lr, 0.25);
  EXPECT_EQ(decayed.weight_decay, 0.2);
  EXPECT_EQ(plain.weight_decay, 0.0);
}

TEST(OptimizerTest, OverridesMakeGroupsOfTheirOwn) {
  OptimizerOptions options{.lr = 0.5, .weight_decay = 0.1};
  options.overrides = {{.pattern = "*.weight", .lr_mult = 0.5}, {.pattern = "norm.*", .wd_mult = 2.0, .beta2 = 0.9}};
  auto optimizer = make_optimizer(small_model(), options);
  ASSERT_EQ(optimizer->param_groups().size(), 3u);
  const auto& norm = optimizer->param_groups()[0];
  const auto& matrices = optimizer->param_groups()[1];
  const auto& bias = optimizer->param_groups()[2];
  EXPECT_EQ(norm.params, (std::vector<std::string>{"norm.weight"}));
  EXPECT_EQ(matrices.params, (std::vector<std::string>{"layer.weight", "head.weight"}));
  EXPECT_EQ(bias.params, (std::vector<std::string>{"layer.bias"}));
  optimizer->set_lr(0.2);
  optimizer->set_weight_decay(0.3);
  EXPECT_EQ((std::vector<double>{norm.lr, norm.weight_decay, norm.beta1, norm.beta2}),
            (std::vector<double>{0.1, 0.6, 0.9, 0.9}));
  EXPECT_EQ((std::vector<double>{matrices.lr, matrices.weight_decay, matrices.beta2}),
            (std::vector<double>{0.1, 0.3, 0.999}));
  EXPECT_EQ((std::vector<double>{bias.lr, bias.weight_decay}), (std::vector<double>{0.2, 0}));
}

TEST(OptimizerTest, AGroupIsSteppedByItsNumbers) {
  const auto ours = small_model(), theirs = small_model();
  OptimizerOptions options{.lr = 1e-2, .weight_decay = 0.1};
  options.overrides = {{.pattern = "norm.weight", .lr_mult = 10, .wd_mult = 1, .beta1 = 0.5, .beta2 = 0.9}};
  auto optimizer = make_optimizer(ours, options);
  OptimizerOptions alone_options{.lr = 0.1, .weight_decay = 0.1, .beta1 = 0.5, .beta2 = 0.9};
  alone_options.overrides = {{.pattern = "*", .wd_mult = 1}};
  auto alone = make_optimizer({theirs[2]}, alone_options);
  for (int64_t step = 1; step <= 3; ++step) {
    set_gradients(ours, step);
    set_gradients(theirs, step);
    optimizer->step();
    alone->step();
  }
  EXPECT_TRUE(ours[2].second.equal(theirs[2].second));
}

TEST(OptimizerTest, FrozenTiedAndUnusedParameters) {
  auto model = small_model();
  model[1].second.requires_grad_(false);
  model.emplace_back("tied.weight", model[0].second);
  auto optimizer = make_optimizer(model, {});
  EXPECT_EQ(optimizer->parameters().size(), 3u);

  const auto before = model[3].second.detach().clone();
  set_gradients(model, 1);
  model[3].second.mutable_grad().reset();
  optimizer->step();
  EXPECT_TRUE(before.equal(model[3].second));
  for (const auto& [key, piece] : optimizer->sharded_state_dict()) {
    if (!key.ends_with(".step")) continue;
    EXPECT_EQ(piece.local.item<float>(), key == "optimizer.state.head.weight.step" ? 0 : 1) << key;
  }
}

TEST(OptimizerTest, StateIsNamedAsTorchDoesAndResumesExactly) {
  const auto first = small_model(), second = small_model();
  auto straight = make_optimizer(first, {.lr = 1e-2});
  set_gradients(first, 1);
  straight->step();

  auto resumed = make_optimizer(second, {.lr = 1e-2});
  auto from = straight->sharded_state_dict(), to = resumed->sharded_state_dict();
  ASSERT_EQ(from.size(), 12u);
  EXPECT_EQ(from[0].first, "optimizer.state.layer.weight.exp_avg");
  EXPECT_EQ(from[1].first, "optimizer.state.layer.weight.exp_avg_sq");
  EXPECT_EQ(from[2].first, "optimizer.state.layer.weight.step");
  EXPECT_EQ(from[2].second.local.dim(), 0);
  EXPECT_EQ(from[2].second.local.scalar_type(), at::kFloat);
  EXPECT_EQ(from[0].second.global_sizes, (std::vector<int64_t>{5, 3}));
  {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < from.size(); ++i) to[i].second.local.copy_(from[i].second.local);
    for (size_t i = 0; i < first.size(); ++i) second[i].second.copy_(first[i].second);
  }
  set_gradients(first, 2);
  set_gradients(second, 2);
  straight->step();
  resumed->step();
  EXPECT_EQ(largest_difference(first, second), 0);
}

TEST(OptimizerTest, Bf16ParametersAreSteppedInFp32) {
  const auto model = small_model(at::kBFloat16);
  auto optimizer = make_optimizer(model, {.lr = 1e-5, .weight_decay = 0});
  const auto start = model[0].second.detach().to(at::kFloat);
  const auto state = optimizer->sharded_state_dict();
  const at::Tensor main = state[3].second.local;
  ASSERT_EQ(state[3].first, "optimizer.state.layer.weight.fp32_param");
  ASSERT_EQ(main.scalar_type(), at::kFloat);
  for (int64_t step = 0; step < 3; ++step) {  // of 1e-5 each: lost in bf16, kept in the copy
    set_gradients(model, 1);
    optimizer->step();
  }
  EXPECT_NEAR((main - start).abs().max().item<double>(), 3e-5, 1e-6);
  EXPECT_TRUE(model[0].second.equal(main.to(at::kBFloat16)));
  {
    const at::NoGradGuard no_grad;
    model[0].second.fill_(2);
  }
  optimizer->reload_model_parameters([](const std::string&) { return true; });
  EXPECT_TRUE(main.eq(2).all().item<bool>());
}

TEST(OptimizerTest, Bf16GradientsAreClippedInFp32) {
  const auto model = small_model(at::kBFloat16);
  auto optimizer = make_optimizer(model, {.kind = OptimizerKind::kSgd, .lr = 1, .weight_decay = 0, .momentum = 0});
  set_gradients(model, 1);
  const auto gradient = model[0].second.grad().to(at::kFloat);
  const auto start = model[0].second.detach().to(at::kFloat);
  const double norm = optimizer->clip_grad_norm(0.5).item<double>();
  EXPECT_TRUE(gradient.equal(model[0].second.grad().to(at::kFloat)));  // the bf16 one is untouched
  optimizer->step();
  const at::Tensor main = optimizer->sharded_state_dict()[0].second.local;
  EXPECT_LT((main - (start - gradient * (0.5 / norm))).abs().max().item<double>(), 1e-6);
}

TEST(OptimizerTest, AdamWClipsWhatItReadsAndLeavesTheGradients) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const auto folded = small_model(dtype), multiplied = small_model(dtype);
    auto ours = make_optimizer(folded, {.lr = 1e-2}), other = make_optimizer(multiplied, {.lr = 1e-2});
    for (int64_t step = 1; step <= 3; ++step) {
      set_gradients(folded, step);
      set_gradients(multiplied, step);
      const auto gradient = folded[0].second.grad().clone();
      // Powers of two: a product is exact, where a gradient in bf16 is multiplied, too.
      const double scale = 1 << step;
      for (const auto& [name, parameter] : folded) parameter.mutable_grad() *= scale;
      const at::Tensor norm = ours->clip_grad_norm(0, at::full({}, scale));
      EXPECT_TRUE(folded[0].second.grad().equal(gradient * scale));
      EXPECT_TRUE(norm.equal(other->clip_grad_norm(0)));
      ours->step();
      other->step();
    }
    EXPECT_EQ(largest_difference(folded, multiplied), 0);
  }
}

TEST(OptimizerTest, MomentsInBf16AreRoundedOnceAStep) {
  const auto narrow = small_model(), wide = small_model();
  OptimizerOptions options{.lr = 1e-2};
  auto reference = make_optimizer(wide, options);
  options.exp_avg_dtype = options.exp_avg_sq_dtype = at::kBFloat16;
  auto optimizer = make_optimizer(narrow, options);
  const auto state = optimizer->sharded_state_dict(), expected = reference->sharded_state_dict();
  ASSERT_EQ(state[0].second.local.scalar_type(), at::kBFloat16);
  ASSERT_EQ(state[1].second.local.scalar_type(), at::kBFloat16);
  for (int64_t step = 1; step <= 5; ++step) {
    set_gradients(narrow, step);
    set_gradients(wide, step);
    optimizer->step();
    reference->step();
    // A step uses the moments before they are rounded: the first one is exact.
    if (step > 1) continue;
    EXPECT_EQ(largest_difference(narrow, wide), 0);
    EXPECT_TRUE(state[0].second.local.equal(expected[0].second.local.to(at::kBFloat16)));
  }
  EXPECT_GT(largest_difference(narrow, wide), 0);
  EXPECT_LT(largest_difference(narrow, wide), 5 * 1e-2 * 0x1p-7);  // five steps of lr, moments of 8 bits
}

TEST(OptimizerTest, AdamWStepsWhatHasGaps) {
  const auto with_gaps = [](at::ScalarType dtype) {
    NamedTensors model{{"a.weight", leaf({4, 6}, 1, dtype).detach().t().requires_grad_()},
                       {"b.weight", leaf({4, 6}, 2, dtype).detach().narrow(1, 1, 3).requires_grad_()}};
    return model;
  };
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto model = with_gaps(dtype);
    NamedTensors dense;
    for (const auto& [name, parameter] : model)
      dense.emplace_back(name, parameter.detach().contiguous().requires_grad_());
    auto ours = make_optimizer(model, {.lr = 1e-2}), other = make_optimizer(dense, {.lr = 1e-2});
    for (int64_t step = 1; step <= 2; ++step) {
      set_gradients(dense, step);
      for (size_t i = 0; i < model.size(); ++i)  // laid out otherwise, too
        model[i].second.mutable_grad() = dense[i].second.grad().t().contiguous().t();
      ours->step();
      other->step();
    }
    EXPECT_EQ(largest_difference(model, dense), 0);
    EXPECT_GT(largest_difference(model, with_gaps(dtype)), 0);
  }
}

TEST(OptimizerTest, AStepMovesTheVersionSoThatAutogradNotices) {
  const auto model = small_model();
  auto optimizer = make_optimizer(model, {});
  const auto weight = model[0].second;
  const auto loss = at::linear(at::ones({2, 3}).requires_grad_(), weight).sum();
  set_gradients(model, 1);
  optimizer->step();
  EXPECT_THROW(loss.backward(), c10::Error);
}

/// Sizes that fill buckets of 128 in every way: less, just so, more, several and a rest.
NamedTensors model_of_many_sizes(at::ScalarType dtype) {
  NamedTensors model;
  for (const int64_t rows : {3, 64, 65, 128, 200, 1}) {
    const auto number = std::to_string(model.size());
    model.emplace_back("weight" + number, leaf({rows, 2}, rows, dtype));
    model.emplace_back("norm" + number, leaf({rows}, rows + 1, dtype));
  }
  return model;
}

TEST(OptimizerTest, CastsBucketByBucketToTheSameBits) {
  for (const auto kind : {OptimizerKind::kAdam, OptimizerKind::kSgd, OptimizerKind::kMuon}) {
    const auto at_once = model_of_many_sizes(at::kBFloat16), in_buckets = model_of_many_sizes(at::kBFloat16);
    OptimizerOptions options{.kind = kind, .lr = 1e-2, .weight_decay = 0.1};
    auto whole = make_optimizer(at_once, options);
    options.cast_elements = 128;
    auto parts = make_optimizer(in_buckets, options);
    for (int64_t step = 1; step <= 3; ++step) {
      for (auto* optimizer : {whole.get(), parts.get()}) {
        set_gradients(optimizer == whole.get() ? at_once : in_buckets, step);
        if (step < 3) optimizer->clip_grad_norm(0.5);
        optimizer->step();
      }
    }
    const auto expected = whole->sharded_state_dict(), state = parts->sharded_state_dict();
    for (size_t i = 0; i < state.size(); ++i)
      EXPECT_TRUE(state[i].second.local.equal(expected[i].second.local)) << state[i].first;
    EXPECT_EQ(largest_difference(at_once, in_buckets), 0);
  }
}

/// The most that the tests' device held at once during `work`, beyond what it held before.
size_t peak_bytes(const std::function<void()>& work) {
  if (testing::on_simulated_device()) {
    auto* memory = c10::getDeviceAllocator(c10::kCUDA);
    memory->resetPeakStats(0);
    const int64_t before = memory->getDeviceStats(0).allocated_bytes[0].current;
    work();
    return static_cast<size_t>(memory->getDeviceStats(0).allocated_bytes[0].peak - before);
  }
  auto* memory = new testing::CountingAllocator;  // leaked on purpose
  work();
  memory->stop();
  return memory->peak();
}

TEST(OptimizerTest, HoldsAFewCastGradientsAtATime) {
  constexpr int64_t kElements = 1 << 16, kBucket = 1 << 12;
  NamedTensors model;
  for (const char* name : {"a.weight", "b.weight"})
    model.emplace_back(name, leaf({kElements / 2, 2}, 1, at::kBFloat16));
  auto optimizer = make_optimizer(model, {.kind = OptimizerKind::kSgd, .cast_elements = kBucket});
  set_gradients(model, 1);
  const auto peak = peak_bytes([&] {
    optimizer->clip_grad_norm(0.5);
    optimizer->step();
  });
  EXPECT_LT(peak, size_t{2} * kBucket * sizeof(float));
}

TEST(OptimizerTest, AdamWCastsNothing) {
  const NamedTensors model{{"a.weight", leaf({1 << 12, 2}, 1, at::kBFloat16)}};
  auto optimizer = make_optimizer(model, {});
  set_gradients(model, 1);
  const auto peak = peak_bytes([&] {
    optimizer->clip_grad_norm(0.5);
    optimizer->step();
  });
  EXPECT_LT(peak, size_t{1} << 12);  // a norm, a factor and sums; the gradient has 16 KiB
}

TEST(OptimizerTest, AStepThatTheDeviceSkipsChangesNothing) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto kind : {OptimizerKind::kAdam, OptimizerKind::kSgd, OptimizerKind::kMuon}) {
      const auto model = small_model(dtype), same = small_model(dtype);
      auto optimizer = make_optimizer(model, {.kind = kind}), other = make_optimizer(same, {.kind = kind});
      for (int64_t step = 1; step <= 3; ++step) {
        set_gradients(model, step);
        set_gradients(same, step);
        optimizer->step(at::full({}, step == 2 ? 1.0F : 0.0F));
        if (step != 2) other->step();
      }
      const auto expected = other->sharded_state_dict(), state = optimizer->sharded_state_dict();
      for (size_t i = 0; i < state.size(); ++i)
        EXPECT_TRUE(state[i].second.local.equal(expected[i].second.local)) << state[i].first;
      EXPECT_EQ(largest_difference(model, same), 0);
    }
  }
}

struct Weights : torch::nn::Module {
  explicit Weights(at::ScalarType dtype = at::kFloat) {
    for (const auto& [name, value] : small_model(dtype)) {
      std::string flat = name;
      std::replace(flat.begin(), flat.end(), '.', '_');
      register_parameter(flat, value.detach().clone());
    }
  }
  at::Tensor forward(at::Tensor x) { return x; }
};

NamedTensors named(const torch::nn::Module& module) {
  NamedTensors found;
  for (const auto& item : module.named_parameters()) found.emplace_back(item.key(), item.value());
  return found;
}

// Element by element the same arithmetic, but for the last elements of LibTorch's SGD, which are not
// computed in vectors and round otherwise. Five rows on four ranks: the last has none.
TEST(OptimizerTest, ShardedEqualsWhole) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto kind : {OptimizerKind::kAdam, OptimizerKind::kSgd}) {
      testing::run_ranks(4, [&](const ProcessGroupPtr& world) {
        Weights whole(dtype);
        Hooked<Weights> sharded(dtype);
        FullyShardOptions where;
        where.mesh = std::make_shared<DeviceMesh>(world, std::vector<int>{4});
        fully_shard(sharded, where);
        const auto wholes = named(whole), pieces = named(sharded);
        const OptimizerOptions options{.kind = kind, .lr = 1e-2, .weight_decay = 0.1};
        auto on_whole = make_optimizer(wholes, options), on_pieces = make_optimizer(pieces, options);
        for (int64_t step = 1; step <= 3; ++step) {
          set_gradients(wholes, step);
          for (size_t i = 0; i < pieces.size(); ++i) {
            const auto view = reshard_and_view(pieces[i].second);
            pieces[i].second.mutable_grad() =
                wholes[i].second.grad().narrow(0, view.offsets[0], view.local.size(0)).clone();
          }
          on_whole->step();
          on_pieces->step();
        }
        const auto expected = on_whole->sharded_state_dict(), state = on_pieces->sharded_state_dict();
        ASSERT_EQ(state.size(), expected.size());
        for (size_t i = 0; i < state.size(); ++i) {
          const auto& [key, piece] = state[i];
          EXPECT_EQ(piece.global_sizes, expected[i].second.global_sizes) << key;
          const auto& all = expected[i].second.local;
          const auto rows = all.dim() == 0 ? all : all.narrow(0, piece.offsets[0], piece.local.size(0));
          EXPECT_TRUE(rows.allclose(piece.local, 1e-6, 1e-8)) << key;
        }
        for (size_t i = 0; i < pieces.size(); ++i) {
          const auto view = reshard_and_view(pieces[i].second);
          const auto rows = wholes[i].second.narrow(0, view.offsets[0], view.local.size(0));
          EXPECT_TRUE(rows.allclose(view.local, dtype == at::kFloat ? 1e-6 : 1e-2)) << pieces[i].first;
        }
      });
    }
  }
}

TEST(OptimizerTest, ParametersOfOtherSizesThanTheState) {
  const auto model = small_model();
  auto optimizer = make_optimizer(model, {});
  model[0].second.set_data(leaf({2, 3}, 1).detach());
  set_gradients(model, 1);
  try {
    optimizer->step();
    FAIL() << "stepped a resharded parameter";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("make the optimizer after fully_shard"), std::string::npos);
  }
}

}  // namespace
}  // namespace megashard
