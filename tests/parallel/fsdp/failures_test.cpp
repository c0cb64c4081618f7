// Failures leave a model usable, wrong use throws a message, and meta parameters are materialised shard by shard.

#include <ATen/ops/empty.h>

#include "parallel/guarded_tensor.h"
#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

/// A root over two units, the second of which throws on request.
struct Fragile {
  explicit Fragile(const DeviceMeshPtr& mesh) : root({{6, 6}}, linear) {
    for (const char* name : {"first", "second"}) {
      units.push_back(std::make_shared<Formula>(Sizes{{6, 6}}, linear));
      root.register_module(name, units.back());
    }
    units[1]->body = [this](const Weights& w, at::Tensor x) {
      TORCH_CHECK(!fail_forward, "forward failed on purpose");
      at::Tensor y = at::linear(x, w[0]);
      if (fail_backward) y.register_hook([](const at::Tensor&) { TORCH_CHECK(false, "backward failed on purpose"); });
      return y;
    };
    root.body = [this](const Weights& w, at::Tensor x) {
      return at::linear(units[1]->forward(units[0]->forward(x)), w[0]);
    };
    if (mesh == nullptr) return;
    for (auto& unit : units) fully_shard(*unit, {.mesh = mesh, .reshard_after_forward = false});
    fully_shard(root, {.mesh = mesh});
  }
  at::Tensor loss() { return root.forward(fixed({4, 6}, 1).requires_grad_()).pow(2).sum(); }
  void expect_step_equal_to(Fragile& plain) {
    root.zero_grad();
    plain.root.zero_grad();
    const at::Tensor expected = plain.loss(), actual = loss();
    EXPECT_TRUE(at::equal(actual, expected));
    expected.backward();
    actual.backward();
    const auto reference = plain.root.named_parameters();
    for (const auto& item : root.named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      EXPECT_TRUE(at::equal(item.value().grad(), part_like(reference[item.key()].grad(), item.value()))) << item.key();
    }
  }
  void expect_sharded() {
    for (const auto& w : root.parameters()) EXPECT_EQ(w.size(0), 3);
  }

  Formula root;
  std::vector<std::shared_ptr<Formula>> units;
  bool fail_forward = false, fail_backward = false;
};

TEST(FsdpFailures, AnExceptionInForwardLeavesNothingFull) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Fragile plain(nullptr), model(flat_mesh(world));
    for (int i = 0; i < 2; ++i) {
      model.fail_forward = true;
      contains(message_of([&] { model.loss(); }), "forward failed on purpose");
      model.expect_sharded();
      model.fail_forward = false;
      model.expect_step_equal_to(plain);
    }
    // The guard's count of forwards is zero again: optimizers' operators pass.
    const c10::NoGradGuard no_grad;
    model.root.w[0].mul_(1);
  });
}

TEST(FsdpFailures, AnExceptionInBackwardKeepsEarlierGradients) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Fragile plain(nullptr), model(flat_mesh(world));
    model.expect_step_equal_to(plain);
    const at::Tensor first = unguarded(model.units[0]->w[0].grad()).clone();
    model.fail_backward = true;
    const at::Tensor loss = model.loss();
    contains(message_of([&] { loss.backward(); }), "backward failed on purpose");
    model.fail_backward = false;
    model.expect_sharded();
    EXPECT_TRUE(at::equal(model.units[0]->w[0].grad(), first));  // backward did not get that far
    model.expect_step_equal_to(plain);
  });
}

TEST(FsdpFailures, AnExceptionInBackwardKeepsGradientsThatWaitForSync) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Fragile plain(nullptr), model(flat_mesh(world));
    set_requires_gradient_sync(model.root, false);
    model.loss().backward();
    model.fail_backward = true;
    const at::Tensor loss = model.loss();
    contains(message_of([&] { loss.backward(); }), "backward failed on purpose");
    model.fail_backward = false;
    set_requires_gradient_sync(model.root, true);
    model.loss().backward();
    plain.loss().backward();
    plain.loss().backward();
    const at::Tensor& w = model.units[0]->w[0];
    EXPECT_TRUE(at::equal(w.grad(), part_like(plain.units[0]->w[0].grad(), w)));
  });
}

TEST(FsdpFailures, WrongUsesEndInAnError) {  // others: fully_shard_test and state_dict_test
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto mesh = flat_mesh(world);
    Formula unit({{6, 6}}, linear);
    contains(message_of([&] { fully_shard(unit, FullyShardOptions{}); }), "needs options.mesh");
    contains(
        message_of([&] { fully_shard(unit, {.mesh = mesh, .reshard_after_forward = ReshardAfterForward::to(3)}); }),
        "does not divide the 2 ranks");
    contains(message_of([&] { unshard(unit); }), "is not under fully_shard");
  });
}

struct OnMetaImpl : torch::nn::Module {
  OnMetaImpl()
      : weight(register_parameter("weight", at::empty({5, 6}, at::kMeta))),
        bias(register_parameter("bias", at::empty({5}, at::kMeta))) {}
  at::Tensor forward(at::Tensor x) { return at::linear(x, weight, bias); }
  at::Tensor weight, bias;
};

TEST(FsdpFailures, ParametersOnMetaBecomeRealRowByRow) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Hooked<OnMetaImpl> unit;
    fully_shard(unit, {.mesh = flat_mesh(world)});
    EXPECT_EQ(global_sizes(unit.weight), (std::vector<int64_t>{5, 6}));
    const at::Tensor handle = unit.weight;  // an optimizer may hold it already
    assign_full_parameter(unit.weight, fixed({5, 6}, 1));
    contains(message_of([&] { unit.forward(fixed({4, 6}, 1)); }), "still on the meta device: bias");
    materialise_empty_parameter(unit.bias, device_of_tests());
    reshard_and_view(unit.bias).local.zero_();
    const at::Tensor expected = at::linear(fixed({4, 6}, 2), fixed({5, 6}, 1));
    EXPECT_TRUE(at::equal(unit.forward(fixed({4, 6}, 2)), expected));
    EXPECT_TRUE(handle.is_same(unit.weight) && !handle.is_meta());
    contains(message_of([&] { assign_full_parameter(unit.weight, fixed({4, 6}, 1)); }), "has sizes [5, 6]");
  });
}

TEST(FsdpFailures, ShardedViewsSayWhereLocalRowsLie) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const int rank = world->rank();
    Formula unit({{5, 6}}, linear);
    fully_shard(unit, {.mesh = std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2},
                                                            std::vector<std::string>{"replicate", "shard"})});
    const ShardedTensor view = reshard_and_view(unit.w[0]);
    EXPECT_EQ(view.global_sizes, (std::vector<int64_t>{5, 6}));
    EXPECT_EQ(view.offsets, (std::vector<int64_t>{rank % 2 == 0 ? 0 : 3, 0}));
    EXPECT_EQ(view.local.size(0), rank % 2 == 0 ? 3 : 2);
    EXPECT_EQ(view.placements, (std::vector<Placement>{Placement::replicate(), Placement::shard(0)}));
    view.local.fill_(1);  // it is the live storage
    EXPECT_TRUE(at::equal(unit.w[0].detach(), view.local));
    const at::Tensor plain = fixed({3}, 1);
    EXPECT_TRUE(reshard_and_view(plain).is_replicated());
    EXPECT_EQ(global_sizes(plain), (std::vector<int64_t>{3}));
  });
}

}  // namespace
}  // namespace megashard::testing
