// Controls of PyTorch 2.13 to 2.15: backward ended by the caller, iterations that are given up, a group of its own for
// reductions, unsharded memory that stays.

#include "tests/support/model_pairs.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

/// A plain chain and a sharded one, of which every backward counts for one step.
struct Finalized {
  Finalized(const ProcessGroupPtr& group, const FullyShardOptions& options) : world(*group) {
    chain.shard(options);
    set_manual_backward_finalization(chain.root, true);
  }
  void backward(uint64_t step) {
    const at::Tensor x = input_of(step, world);
    plain.root.forward(x).sum().backward();
    chain.root.forward(x).sum().backward();
  }
  void expect_equal_gradients(double tolerance = 0) {
    average_gradients(plain.root, world);
    expect_gradients_of(plain.root, chain.root, tolerance);
    expect_sharded(chain.root);
  }
  void zero_grad() {
    plain.root.zero_grad();
    chain.root.zero_grad();
  }
  void descend() {
    megashard::testing::descend(plain.root, 1e-3);
    megashard::testing::descend(chain.root, 1e-3);
  }
  ProcessGroup& world;
  Chain plain, chain;
};

std::vector<DeviceMeshPtr> meshes(const ProcessGroupPtr& world, std::vector<CollectiveCall>& calls) {
  return {recording_mesh(world, {4}, {"shard"}, calls), recording_mesh(world, {2, 2}, {"replicate", "shard"}, calls)};
}

TEST(ManualFinalization, ReducesWhatSeveralBackwardsLeftOnce) {
  for (const bool async_op : {false, true}) {
    for (const size_t mesh : {0, 1}) {
      run_ranks(4, [=](const ProcessGroupPtr& world) {
        std::vector<CollectiveCall> calls;
        Finalized models(world, {.mesh = meshes(world, calls)[mesh]});
        for (uint64_t step = 0; step < 2; ++step) {
          models.zero_grad();
          set_requires_gradient_sync(models.chain.root, false);
          calls.clear();
          for (uint64_t micro = 0; micro < 3; ++micro) models.backward(10 * step + micro);
          EXPECT_EQ(count(calls, "reduce_scatter"), 0);
          set_requires_gradient_sync(models.chain.root, true);
          finalize_backward(models.chain.root, async_op).wait();
          EXPECT_EQ(count(calls, "reduce_scatter"), 4) << "one for each unit";
          EXPECT_EQ(count(calls, "all_reduce"), mesh == 0 ? 0 : 4);
          models.expect_equal_gradients(1e-6);  // sums of averages versus averages of sums
          models.descend();
        }
      });
    }
  }
}

TEST(ManualFinalization, EndsOneBackwardWithGradientSync) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    Finalized models(world, {.mesh = recording_mesh(world, {2}, {"shard"}, calls)});
    set_is_last_backward(models.chain.root, false);  // has no effect with manual finalization
    for (uint64_t step = 0; step < 2; ++step) {
      models.zero_grad();
      calls.clear();
      models.backward(step);  // its input needs no gradient, so the first unit's reduction waits for the end
      EXPECT_EQ(count(calls, "reduce_scatter"), 2);
      finalize_backward(models.chain.root);
      EXPECT_EQ(count(calls, "reduce_scatter"), 4);
      models.expect_equal_gradients();
      models.descend();
    }
  });
}

TEST(ManualFinalization, KeepsParametersThatAreNotToBeResharded) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    for (const bool reshard : {false, true}) {
      Finalized models(world, {.mesh = flat_mesh(world)});
      set_reshard_after_backward(models.chain.root, reshard);
      models.backward(0);
      finalize_backward(models.chain.root);
      const bool whole = models.chain.units[0]->w[0].size(0) == models.chain.width;
      EXPECT_EQ(whole, !reshard);
    }
  });
}

TEST(ManualFinalization, BeforeTheFirstForwardThereIsNothingToDo) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Finalized models(world, {.mesh = flat_mesh(world)});
    finalize_backward(models.chain.root);
    finalize_backward(models.chain.root, /*async_op=*/true).wait();
    models.backward(0);
    auto handle = finalize_backward(models.chain.root, /*async_op=*/true);
    handle.wait();
    handle.wait();
    models.expect_equal_gradients();
  });
}

TEST(ManualFinalization, WrongOrdersAreRefused) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Finalized models(world, {.mesh = flat_mesh(world)});
    auto& root = models.chain.root;
    auto& unit = *models.chain.units[0];
    models.backward(0);
    contains(message_of([&] { set_manual_backward_finalization(root, false); }), "finalize_backward: call that");
    contains(message_of([&] { set_manual_backward_finalization(unit, true); }), "is not the root");
    contains(message_of([&] { finalize_backward(unit); }), "is not the root");
    contains(message_of([&] { reset_iter_state(unit); }), "is not the root");
    auto handle = finalize_backward(root, /*async_op=*/true);
    contains(message_of([&] { root.forward(input_of(1, *world)); }), "before the next forward");
    contains(message_of([&] { finalize_backward(root); }), "before the next finalize_backward");
    handle.wait();
    models.expect_equal_gradients();
    set_manual_backward_finalization(root, false);
    contains(message_of([&] { finalize_backward(root); }), "needs set_manual_backward_finalization(root, true)");

    Chain early;
    early.shard({.mesh = flat_mesh(world)});
    set_manual_backward_finalization(*early.units[1], true);
    contains(message_of([&] { early.forward(); }), "set_manual_backward_finalization was called on 'b'");
  });
}

TEST(ManualFinalization, ItIsRefusedInsideABackward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Finalized models(world, {.mesh = flat_mesh(world)});
    std::string finalize, change;
    models.chain.root.body = [&](const Weights& w, at::Tensor x) {
      for (auto& unit : models.chain.units) x = unit->forward(x);
      x.register_hook([&](const at::Tensor&) {
        finalize = message_of([&] { finalize_backward(models.chain.root); });
        change = message_of([&] { set_manual_backward_finalization(models.chain.root, false); });
      });
      return at::linear(x, w[0]);
    };
    models.backward(0);
    contains(finalize, "finalize_backward was called inside a forward or backward");
    contains(change, "set_manual_backward_finalization cannot change between a backward");
    finalize_backward(models.chain.root);
    models.expect_equal_gradients();
  });
}

/// PyTorch refuses both. Here a backward or a finalize_backward without all-reduce leaves its sums to the next one.
TEST(ManualFinalization, GradientsWaitForABackwardWithAllReduce) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    Finalized models(world, {.mesh = meshes(world, calls)[1]});
    set_requires_all_reduce(models.chain.root, false);
    for (uint64_t micro = 0; micro < 2; ++micro) models.backward(micro);
    finalize_backward(models.chain.root);
    EXPECT_EQ(count(calls, "all_reduce"), 0);
    for (const auto& w : models.chain.root.parameters()) EXPECT_FALSE(w.grad().defined());
    set_requires_all_reduce(models.chain.root, true);
    models.backward(2);
    finalize_backward(models.chain.root);
    EXPECT_EQ(count(calls, "all_reduce"), 4);
    models.expect_equal_gradients(1e-6);
  });
}

TEST(ManualFinalization, CanBeCalledAgainAfterAHookThatThrew) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Finalized models(world, {.mesh = flat_mesh(world)});
    bool fail = true;
    register_post_accumulate_grad_hook(models.chain.units[0]->w[0],
                                       [&](const at::Tensor&) { TORCH_CHECK(!fail, "failed on purpose"); });
    set_requires_gradient_sync(models.chain.root, false);
    models.backward(0);
    set_requires_gradient_sync(models.chain.root, true);
    contains(message_of([&] { finalize_backward(models.chain.root); }), "failed on purpose");
    fail = false;
    finalize_backward(models.chain.root);
    models.expect_equal_gradients();
  });
}

/// Two roots that share a comm context; the first one's backwards are ended by hand.
struct SharingRoots {
  explicit SharingRoots(const ProcessGroupPtr& world) {
    for (Chain* each : {&a, &b}) {
      for (auto& unit : each->units) fully_shard(*unit, {.mesh = flat_mesh(world)});
      fully_shard(each->root, {.mesh = flat_mesh(world)});
    }
    torch::nn::Module* const roots[] = {&a.root, &b.root};
    share_comm_context(roots);
    set_manual_backward_finalization(a.root, true);
  }
  Chain a, b;
};

TEST(ManualFinalization, AnAsynchronousOneWaitsForTheWorkOfAnotherRoot) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    SharingRoots roots(world);
    auto& [a, b] = roots;
    const auto expect_refused = [&] {
      contains(message_of([&] { finalize_backward(a.root, /*async_op=*/true); }),
               "cannot overlap the work of another root");
    };
    a.forward().backward();
    const at::Tensor loss = b.forward();
    expect_refused();  // the other root's backward is to come
    set_is_last_backward(b.root, false);
    loss.backward();
    expect_refused();  // a reduction of it is in flight
    finalize_backward(a.root);
    a.root.zero_grad();
    a.forward().backward();
    set_is_last_backward(b.root, true);
    b.forward().backward();
    finalize_backward(a.root, /*async_op=*/true).wait();
    Chain plain;
    plain.forward().backward();
    expect_gradients_of(plain.root, a.root);
  });
}

TEST(ManualFinalization, ARootThatSharesTheCommContextWaits) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    SharingRoots roots(world);
    auto& [a, b] = roots;
    set_manual_backward_finalization(b.root, true);
    b.forward().backward();
    finalize_backward(b.root);
    a.forward().backward();
    auto handle = finalize_backward(a.root, /*async_op=*/true);
    contains(message_of([&] { b.forward(); }), "before the next forward");
    contains(message_of([&] { finalize_backward(b.root); }), "before the next finalize_backward");
    contains(message_of([&] { reset_iter_state(b.root); }), "another root, which shares the comm context");
    handle.wait();
    b.forward().backward();
    finalize_backward(b.root);
  });
}

TEST(ResetIterState, DropsWhatBackwardsWithoutSyncLeft) {
  for (const size_t mesh : {0, 1}) {
    run_ranks(4, [=](const ProcessGroupPtr& world) {
      std::vector<CollectiveCall> calls;
      Chain plain, chain;
      bool fail = false;
      chain.units[2]->body = [&](const Weights& w, at::Tensor x) {
        TORCH_CHECK(!fail, "failed on purpose");
        return at::linear(x, w[0]);
      };
      chain.shard({.mesh = meshes(world, calls)[mesh]});
      const auto backward = [&](uint64_t step) { chain.root.forward(input_of(step, *world)).sum().backward(); };
      if (mesh == 0) set_requires_gradient_sync(chain.root, false);
      if (mesh == 1) set_requires_all_reduce(chain.root, false);
      backward(7);
      fail = true;
      contains(message_of([&] { backward(8); }), "failed on purpose");
      reset_iter_state(chain.root);
      fail = false;
      EXPECT_TRUE(pending_gradients(chain.root).empty());
      set_requires_gradient_sync(chain.root, true);
      backward(1);
      plain.root.forward(input_of(1, *world)).sum().backward();
      average_gradients(plain.root, *world);
      expect_gradients_of(plain.root, chain.root, mesh == 0 ? 0 : 1e-6);
    });
  }
}

TEST(ResetIterState, EndsAReductionThatWasNotWaitedFor) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Finalized models(world, {.mesh = flat_mesh(world)});
    models.backward(0);
    auto handle = finalize_backward(models.chain.root, /*async_op=*/true);
    reset_iter_state(models.chain.root);
    contains(message_of([&] { handle.wait(); }), "reset_iter_state discarded these gradients");
    models.zero_grad();
    models.backward(1);
    finalize_backward(models.chain.root);
    models.expect_equal_gradients();
  });
}

/// Records the collectives of the groups that are made of it by themselves.
class Parent final : public RecordingGroup {
 public:
  Parent(ProcessGroupPtr inner, std::vector<CollectiveCall>& own, std::vector<CollectiveCall>& of_groups)
      : RecordingGroup(std::move(inner), own), of_groups_(of_groups) {}
  std::shared_ptr<ProcessGroup> subgroup(const std::vector<int>& members, const std::string& name) override {
    ++made;
    return std::make_shared<RecordingGroup>(inner_->subgroup(members, name), of_groups_);
  }
  int made = 0;

 private:
  std::vector<CollectiveCall>& of_groups_;
};

TEST(FullyShardOverlap, test_set_separate_reduce_scatter_group) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> shared, separate;
    const auto parent = std::make_shared<Parent>(world, shared, separate);
    Chain plain, chain;
    chain.shard({.mesh = flat_mesh(parent)});
    const auto expect_reductions = [&](int64_t in_shared, int64_t in_separate) {
      shared.clear();
      separate.clear();
      chain.forward().backward();
      EXPECT_EQ(count(shared, "reduce_scatter"), in_shared);
      EXPECT_EQ(count(separate, "reduce_scatter"), in_separate);
      EXPECT_EQ(count(separate, "all_gather"), 0);
    };
    expect_reductions(4, 0);
    set_separate_reduce_scatter_group(*chain.units[1], true, /*recurse=*/false);
    expect_reductions(3, 1);
    set_separate_reduce_scatter_group(chain.root);
    set_separate_reduce_scatter_group(chain.root);
    EXPECT_EQ(parent->made, 1) << "one group for all units";
    expect_reductions(0, 4);
    chain.root.zero_grad();
    expect_chain_parity(plain, chain, *world);
    set_separate_reduce_scatter_group(chain.root, false);
    expect_reductions(4, 0);
  });
}

TEST(KeepUnshardedStorage, AddressesStayTheSameUntilItIsSwitchedOff) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<const void*> addresses;
    at::Tensor seen;
    Chain plain, chain;
    for (Chain* each : {&plain, &chain}) {
      each->units[0]->body = [&, each](const Weights& w, at::Tensor x) {
        if (each == &chain) addresses.push_back(w[0].data_ptr());
        if (each == &chain) seen = w[0].detach();
        return at::linear(x, w[0]);
      };
    }
    chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
    set_keep_unsharded_storage(chain.root, true);
    expect_chain_parity(plain, chain, *world);  // changes weights between its steps
    ASSERT_EQ(addresses.size(), 3);
    EXPECT_EQ(addresses[0], addresses[1]);
    EXPECT_EQ(addresses[0], addresses[2]);
    EXPECT_NE(seen.storage().data_ptr().get(), nullptr);
    set_keep_unsharded_storage(chain.root, false);
    chain.forward().backward();
    EXPECT_THROW(seen.data_ptr(), c10::Error) << "freed";
  });
}

}  // namespace
}  // namespace megashard::testing
