#include "framework/recompute/activation_offload.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "framework/recompute/recompute.h"
#include "tests/support/formula.h"
#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using ::testing::HasSubstr;
constexpr int64_t kBytes = 6 * 6 * 4;

at::Tensor exp_of(const Weights& /*w*/, at::Tensor x) { return x.exp(); }

/// Modules in a row, which offload all that is saved in them.
struct Row {
  Row(int count, const Body& body, const Sizes& weights = {},
      const ActivationOffloadOptions& options = {.min_elements = 1})
      : offload(options) {
    for (int i = 0; i < count; ++i) modules.push_back(std::make_shared<Formula>(weights, body));
  }
  void begin() {
    for (auto& module : modules) offload.add(*module);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& module : modules) x = module->forward(x);
    return x;
  }

  std::vector<std::shared_ptr<Formula>> modules;
  ActivationOffload offload;
};

at::Tensor some(uint64_t seed = 1) { return (fixed({6, 6}, seed) * 0.1).requires_grad_(); }

/// The input's gradient.
at::Tensor gradient(const std::function<at::Tensor(at::Tensor)>& forward, int backwards = 1) {
  const auto x = some();
  const auto loss = forward(x).sum();
  for (int i = backwards; i > 0; --i) loss.backward({}, /*retain_graph=*/i > 1);
  return x.grad();
}

TEST(ActivationOffload, GradientsAreThoseWithoutIt) {
  const Body body = [](const Weights& w, at::Tensor x) {
    const auto wide = at::linear(x, w[0]).view({2, 3, 6}).transpose(0, 1);  // not contiguous
    return (at::gelu(wide) * wide.expand({3, 2, 6}).softmax(-1)).transpose(0, 1).reshape({6, 6});
  };
  for (const int backwards : {1, 2}) {
    Row plain(3, body, {{6, 6}}), moved(3, body, {{6, 6}});
    moved.begin();
    const auto expected = gradient([&](at::Tensor x) { return plain.forward(x); }, backwards);
    EXPECT_TRUE(at::equal(gradient([&](at::Tensor x) { return moved.forward(x); }, backwards), expected));
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(at::equal(moved.modules[i]->w[0].grad(), plain.modules[i]->w[0].grad()));
    }
    EXPECT_GT(moved.offload.traffic().back_bytes, 0);
    EXPECT_EQ(moved.offload.traffic().host_bytes, 0);
  }
}

TEST(ActivationOffload, EachModuleIsFetchedWhileTheOneAfterItComputes) {
  Row row(4, exp_of);
  row.begin();
  std::vector<int64_t> fetched;
  at::Tensor x = some();
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  for (auto& module : row.modules) {
    x = module->forward(x);
    storages.push_back(x.storage().getWeakStorageImpl());
    x.register_hook([&](const at::Tensor&) { fetched.push_back(row.offload.traffic().back_bytes / kBytes); });
  }
  EXPECT_EQ(row.offload.traffic().out_bytes, 4 * kBytes);
  EXPECT_EQ(row.offload.traffic().host_bytes, 4 * kBytes);
  const auto loss = std::exchange(x, at::Tensor()).sum();
  EXPECT_TRUE(storages[2].expired());  // in host memory alone
  EXPECT_FALSE(storages[3].expired());
  loss.backward();
  // The last one's is still here; each brings the one before it.
  EXPECT_EQ(fetched, (std::vector<int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(row.offload.traffic().back_bytes, 3 * kBytes);
  EXPECT_EQ(row.offload.traffic().host_bytes, 0);
}

TEST(ActivationOffload, AStorageTravelsOnceHoweverManyViewsOfItAreSaved) {
  Row row(1, [](const Weights&, at::Tensor x) {
    const auto y = x * 2;  // saves nothing of x
    return y * y.t() + y.sin() + y.narrow(0, 0, 3).cos().sum();
  });
  row.begin();
  const auto y = row.forward(some());
  EXPECT_EQ(row.offload.traffic().out_bytes, kBytes);
  y.sum().backward();
}

TEST(ActivationOffload, ParametersBuffersAndSmallTensorsStay) {
  Row row(1, [](const Weights& w, at::Tensor x) { return at::linear(x, w[0]) * w[1]; }, {{6, 6}, {6}});
  row.begin();
  row.forward(some() * 1);
  EXPECT_EQ(row.offload.traffic().out_bytes, 2 * kBytes);  // x, and the product for w1's gradient
  Row large(1, exp_of, {}, {.min_elements = 37});
  large.begin();
  EXPECT_TRUE(at::equal(gradient([&](at::Tensor x) { return large.forward(x); }), some().exp().detach()));
  EXPECT_EQ(large.offload.traffic().out_bytes, 0);
}

TEST(ActivationOffload, GatheredParametersStay) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Formula root({{6, 6}}, linear);
    Row row(2,
            [&root](const Weights& w, at::Tensor x) {
              return at::linear(at::linear(x, w[0]), root.w[0]);  // another unit's, gathered now
            },
            {{6, 6}});
    root.body = [&row](const Weights& /*w*/, at::Tensor x) { return row.forward(x); };
    row.begin();
    for (size_t i = 0; i < row.modules.size(); ++i) {
      root.register_module("m" + std::to_string(i), row.modules[i]);
      fully_shard(*row.modules[i], {.mesh = flat_mesh(world), .reshard_after_forward = true});
    }
    fully_shard(root, {.mesh = flat_mesh(world)});
    const auto loss = root.forward(some()).sum();
    EXPECT_EQ(row.offload.traffic().out_bytes, 2 * 2 * kBytes);  // two inputs of products each
    loss.backward();
    EXPECT_EQ(row.offload.traffic().host_bytes, 0);
    EXPECT_TRUE(row.modules[0]->w[0].grad().defined());
  });
}

/// What is changed next may have been on its way to the host.
void wait_for_device() {
  if (!on_simulated_device()) return;
  c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeDevice(0);
}

TEST(ActivationOffload, WhatChangedSinceIsAnError) {
  const auto message =
      HasSubstr("a tensor of sizes [6, 6] that backward needs was changed in place after forward had used "
                "it: it is at version 1 and was saved at version 0");
  for (const int64_t min_elements : {1, 1000}) {  // it travels, or stays
    Row row(1, exp_of, {}, {.min_elements = min_elements});
    row.begin();
    const auto y = row.forward(some());
    wait_for_device();
    y.detach().zero_();
    EXPECT_THAT(message_of([&] { y.sum().backward(); }), message);
  }
  Row row(2, exp_of);
  row.begin();
  const auto between = row.modules[0]->forward(some());
  wait_for_device();
  between.detach().zero_();
  const auto y = row.modules[1]->forward(between);  // the memory of the first is let go
  EXPECT_THAT(message_of([&] { y.sum().backward(); }), message);
}

TEST(ActivationOffload, WhatChangesLaterComesFromTheHost) {
  Row row(2, exp_of);
  row.begin();
  const auto x = some();
  const auto between = row.modules[0]->forward(x);
  const auto y = row.modules[1]->forward(between);
  between.detach().zero_();
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), (x.exp() * x.exp().exp()).detach()));
}

TEST(ActivationOffload, WithRecomputeTheInputsTravel) {
  const Body body = [](const Weights& w, at::Tensor x) { return at::linear(x.exp().tanh(), w[0]); };
  for (const bool reentrant : {false, true}) {
    Row plain(3, body, {{6, 6}}), row(3, body, {{6, 6}});
    for (auto& module : row.modules) recompute(*module, {.use_reentrant = reentrant});
    row.begin();
    const auto expected = gradient([&](at::Tensor x) { return plain.forward(x); });
    EXPECT_TRUE(at::equal(gradient([&](at::Tensor x) { return row.forward(x * 1); }), expected));
    EXPECT_EQ(row.offload.traffic().out_bytes, 3 * kBytes);
    EXPECT_EQ(row.offload.traffic().host_bytes, 0);
  }
}

TEST(ActivationOffload, InsideARecomputeOnlyTheFirstRunCopies) {
  Row plain(2, exp_of), row(2, exp_of);
  row.begin();
  Formula around({}, [&row](const Weights&, at::Tensor x) { return row.forward(x * x); });
  recompute(around, {});
  const auto expected = gradient([&](at::Tensor x) { return plain.forward(x * x); });
  EXPECT_TRUE(at::equal(gradient([&](at::Tensor x) { return around.forward(x); }), expected));
  EXPECT_EQ(row.offload.traffic().out_bytes, 2 * kBytes);
}

TEST(ActivationOffload, WithoutGradNothingMoves) {
  Row row(2, exp_of);
  row.begin();
  {
    const c10::NoGradGuard evaluation;
    row.forward(some());
  }
  EXPECT_EQ(row.offload.traffic().out_bytes, 0);
}

TEST(ActivationOffload, AFailedForwardLeavesNothingBehind) {
  bool fail = true;
  Row row(2, [&fail](const Weights&, at::Tensor x) {
    auto y = x.exp();
    if (fail) throw std::runtime_error("forward failed");
    return y;
  });
  row.begin();
  EXPECT_THROW(row.forward(some()), std::runtime_error);
  EXPECT_EQ(row.offload.traffic().host_bytes, 0);
  fail = false;
  Row plain(2, exp_of);
  EXPECT_TRUE(at::equal(gradient([&](at::Tensor x) { return row.forward(x); }),
                        gradient([&](at::Tensor x) { return plain.forward(x); })));
}

TEST(ActivationOffload, WhatIsFetchedForNothingGoesWithItsGraph) {
  Row row(2, exp_of);
  row.begin();
  const auto end_early = [&row] {
    const auto middle = row.modules[0]->forward(some());
    return torch::autograd::grad({row.modules[1]->forward(middle).sum()}, {middle});
  };
  end_early();
  EXPECT_EQ(row.offload.traffic().back_bytes, kBytes);  // the first module's, which nobody takes
  EXPECT_EQ(row.offload.traffic().host_bytes, 0);
  std::vector<at::Tensor> others;  // its memory is used again
  for (int i = 0; i < 64; ++i) others.push_back(some().detach() * 2);
}

TEST(ActivationOffload, RefusesTwiceAndRecomputeAfterIt) {
  Row row(1, exp_of);
  row.begin();
  EXPECT_THAT(message_of([&] { row.offload.add(*row.modules[0]); }), HasSubstr("offloads its activations already"));
  EXPECT_THAT(message_of([&] { recompute(*row.modules[0], {}); }),
              HasSubstr("after ActivationOffload::add, which comes last"));
}

}  // namespace
}  // namespace megashard::testing
