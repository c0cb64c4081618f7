// test_fully_shard_autograd.py, _frozen.py, _ignore_params.py, _clip_grad_norm_.py: which parameters backward reaches
// and reduces.

#include <torch/nn/utils/clip_grad.h>

#include <limits>
#include <map>

#include "parallel/fsdp/detail/fsdp_state.h"
#include "parallel/fsdp/grad_norm.h"
#include "tests/support/model_pairs.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

// A unit with two outputs, and modules that use them.

struct TwoOutputsImpl : torch::nn::Module {
  TwoOutputsImpl()
      : left(register_parameter("left", fixed({5, 6}, 1))), right(register_parameter("right", fixed({7, 6}, 2))) {}
  std::pair<at::Tensor, at::Tensor> forward(at::Tensor x) { return {at::linear(x, left), at::linear(x, right)}; }
  at::Tensor left, right;
};

TEST(FullyShardAutograd, test_unused_forward_output) {
  for (const ReshardAfterForward reshard : {true, false}) {
    run_ranks(2, [&](const ProcessGroupPtr& world) {
      TwoOutputsImpl plain;
      Hooked<TwoOutputsImpl> model;
      fully_shard(model, {.mesh = flat_mesh(world), .reshard_after_forward = reshard});
      for (uint64_t step = 0; step < 4; ++step) {
        const at::Tensor x = fixed({4, 6}, 10 * step + static_cast<uint64_t>(world->rank()));
        plain.zero_grad();
        model.zero_grad();
        auto loss = [&](const std::pair<at::Tensor, at::Tensor>& outputs) {
          return step % 2 == 0 ? outputs.first.pow(2).sum() : outputs.first.sum() + outputs.second.pow(2).sum();
        };
        loss(plain.forward(x)).backward();
        loss(model.forward(x)).backward();
        average_gradients(plain, *world);
        expect_gradients_of(plain, model);
        expect_sharded(model);
        descend(plain);
        descend(model);
      }
    });
  }
}

TEST(FullyShardAutograd, test_unused_forward_module) {
  for (const ReshardAfterForward reshard : {true, false}) {
    run_ranks(2, [&](const ProcessGroupPtr& world) {
      Chain plain, chain;
      for (Chain* each : {&plain, &chain}) {  // b runs, and nothing uses what it returns
        each->root.body = [each](const Weights& w, at::Tensor x) {
          x = each->units[0]->forward(x);
          each->units[1]->forward(x);
          return at::linear(each->units[2]->forward(x), w[0]);
        };
      }
      chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = reshard});
      expect_chain_parity(plain, chain, *world);
      EXPECT_FALSE(chain.units[1]->w[0].grad().defined());
    });
  }
}

/// Activations in a container of each kind.
template <class Wrap, class Unwrap>
void expect_container_parity(const ProcessGroupPtr& world, Wrap wrap, Unwrap unwrap) {
  struct InContainerImpl : torch::nn::Module {
    InContainerImpl(Wrap given, Unwrap opens)
        : into(given), out_of(opens), w(register_parameter("w", fixed({6, 6}, 3))) {}
    auto forward(std::invoke_result_t<Wrap, at::Tensor> x) { return into(at::linear(out_of(x), w)); }
    Wrap into;
    Unwrap out_of;
    at::Tensor w;
  };
  InContainerImpl plain(wrap, unwrap);
  Hooked<InContainerImpl> model(wrap, unwrap);
  fully_shard(model, {.mesh = flat_mesh(world), .reshard_after_forward = true});
  const at::Tensor x = fixed({4, 6}, static_cast<uint64_t>(world->rank())).requires_grad_();
  const at::Tensor y = x.detach().clone().requires_grad_();
  unwrap(plain.forward(wrap(x))).pow(2).sum().backward();
  const at::Tensor output = unwrap(model.forward(wrap(y)));
  expect_sharded(model);
  output.pow(2).sum().backward();
  average_gradients(plain, *world);
  expect_gradients_of(plain, model);
  EXPECT_TRUE(at::equal(y.grad(), x.grad()));
}

struct NamedPair {
  at::Tensor value;
  int count = 0;
  template <class F>
  void visit_tensors(F&& f) {
    f(value);
  }
};

TEST(FullyShardAutograd, test_nontensor_activations) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    expect_container_parity(
        world, [](at::Tensor x) { return std::vector<at::Tensor>{x}; },
        [](const std::vector<at::Tensor>& list) { return list.at(0); });
    expect_container_parity(
        world, [](at::Tensor x) { return std::tuple<int, at::Tensor>(3, x); },
        [](const std::tuple<int, at::Tensor>& tuple) { return std::get<1>(tuple); });
    expect_container_parity(
        world,
        [](at::Tensor x) {
          return NamedPair{x, 2};
        },
        [](const NamedPair& pair) { return pair.value; });
    expect_container_parity(
        world,
        [](at::Tensor x) {
          return std::map<std::string, at::Tensor>{{"key", x}};
        },
        [](const std::map<std::string, at::Tensor>& map) { return map.at("key"); });
  });
}

// Frozen parameters.

TEST(FullyShardFrozen, test_train_mixed_requires_grad_per_group) {
  for (const bool freeze_after_sharding : {false, true}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      std::vector<CollectiveCall> calls;
      StackImpl plain(2, 5, 7);
      Stack model(2, 5, 7);
      fill_weights(plain);
      copy_weights(plain, model);
      auto freeze = [](const torch::nn::Module& each) {
        for (const auto& item : each.named_parameters()) item.value().set_requires_grad(item.key().ends_with("bias"));
      };
      freeze(plain);
      if (!freeze_after_sharding) freeze(model);
      shard_stack(model, {.mesh = recording_mesh(world, {2}, {"shard"}, calls), .reshard_after_forward = true});
      if (freeze_after_sharding) freeze(model);
      Events events;
      set_schedule_observer(
          model, [&](const char* event, const std::string& group) { events.push_back(event + (" " + group)); });
      for (uint64_t step = 0; step < 3; ++step) {
        const at::Tensor x = fixed({4, 5}, 10 * step + static_cast<uint64_t>(world->rank())).requires_grad_();
        plain.zero_grad();
        model.zero_grad();
        plain.forward(x).pow(2).sum().backward();
        const at::Tensor loss = model.forward(x).pow(2).sum();
        calls.clear();
        events.clear();
        loss.backward();
        average_gradients(plain, *world);
        expect_gradients_of(plain, model);
        // Only the biases are reduced: 3 elements, or 5, 7 and 5, padded to the ranks, and one flag each; rounded up to
        // 128 bytes.
        std::vector<int64_t> sizes;
        for (const auto& call : calls) {
          if (call.operation == "reduce_scatter") sizes.push_back(call.numel);
        }
        EXPECT_EQ(sizes, std::vector<int64_t>(3, 2 * 32));
        // A unit's post_backward runs when autograd is done with it, not at the end of backward: the last block's comes
        // first.
        const auto position = [&](const char* event) {
          return std::find(events.begin(), events.end(), event) - events.begin();
        };
        EXPECT_LT(position("post_backward blocks.1"), position("pre_backward blocks.0"));
        descend(plain);
        descend(model);
      }
    });
  }
}

TEST(FullyShardFrozen, test_train_mixed_requires_grad_across_groups) {
  for (const ReshardAfterForward reshard : {true, false}) {
    run_ranks(2, [&](const ProcessGroupPtr& world) {
      Chain plain(6), chain(6);
      chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = reshard});
      // Every second unit is frozen; then a forward without gradients; then all are trained.
      auto freeze_odd = [](Chain& each, bool frozen) {
        for (size_t i = 1; i < each.units.size(); i += 2) each.units[i]->w[0].set_requires_grad(!frozen);
      };
      for (uint64_t step = 0; step < 6; ++step) {
        const uint64_t seed = 10 * step + static_cast<uint64_t>(world->rank());
        freeze_odd(plain, step < 3);
        freeze_odd(chain, step < 3);
        plain.root.zero_grad();
        chain.root.zero_grad();
        if (step == 2) {
          const c10::NoGradGuard evaluation;
          EXPECT_TRUE(at::equal(chain.forward(seed), plain.forward(seed)));
          continue;
        }
        plain.forward(seed).backward();
        chain.forward(seed).backward();
        average_gradients(plain.root, *world);
        expect_gradients_of(plain.root, chain.root);
        EXPECT_EQ(chain.units[1]->w[0].grad().defined(), step >= 3);
        expect_sharded(chain.root);
        descend(plain.root, 1e-5);
        descend(chain.root, 1e-5);
      }
    });
  }
}

TEST(FullyShardFrozen, test_multi_forward_mixed_requires_grad) {
  for (const ReshardAfterForward reshard : {true, false}) {
    run_ranks(2, [&](const ProcessGroupPtr& world) {
      Chain plain, chain;
      for (Chain* each : {&plain, &chain}) {
        each->units[1]->w[0].set_requires_grad(false);
        each->root.body = [each](const Weights& w, at::Tensor x) {
          at::Tensor target;
          {
            const c10::NoGradGuard no_grad;  // a teacher's pass through the same units
            target = x;
            for (const auto& unit : each->units) target = unit->forward(target);
          }
          for (const int i : {0, 1, 0, 2, 1}) x = each->units[i]->forward(x) * 0.4;
          return at::linear(x - target, w[0]);
        };
      }
      chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = reshard});
      expect_chain_parity(plain, chain, *world, 1e-6);  // one reduction per use of a unit
    });
  }
}

// Ignored parameters.

TEST(FullyShardIgnoreParams, test_ddp_A_fsdp_B_ddp_C) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    // a and c are replicated, and averaged by the caller; b inside is sharded by itself.
    Chain plain, chain;
    const auto a = chain.units[0], c = chain.units[2];
    fully_shard(*chain.units[1], {.mesh = flat_mesh(world)});
    fully_shard(chain.root, {.mesh = flat_mesh(world), .ignored_parameters = {a->w[0], c->w[0]}});
    EXPECT_EQ(fsdp_state(chain.root)->groups().at(0)->params().size(), 1U);
    for (uint64_t step = 0; step < 4; ++step) {
      const uint64_t seed = 10 * step + static_cast<uint64_t>(world->rank());
      plain.root.zero_grad();
      chain.root.zero_grad();
      plain.forward(seed).backward();
      chain.forward(seed).backward();
      for (const auto& unit : {a, c}) {
        EXPECT_EQ(unit->w[0].size(0), 6);
        world->all_reduce(unit->w[0].mutable_grad(), ReduceOp::kAvg).wait();
      }
      average_gradients(plain.root, *world);
      expect_gradients_of(plain.root, chain.root);
      descend(plain.root, 1e-4);
      descend(chain.root, 1e-4);
    }
  });
}

// Clipping.

TEST(FullyShardClipGradNorm, test_clip_grad_norm_1d) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const double norm_type : {2.0, 1.0, 3.0, kInf}) {
    for (const bool replicas : {false, true}) {
      run_ranks(4, [=](const ProcessGroupPtr& world) {
        std::vector<CollectiveCall> calls;
        const auto mesh = replicas ? recording_mesh(world, {2, 2}, {"replicate", "shard"}, calls)
                                   : recording_mesh(world, {4}, {"shard"}, calls);
        StackImpl plain(3, 5, 7);
        Stack model(3, 5, 7);
        fill_weights(plain);
        copy_weights(plain, model);
        shard_stack(model, {.mesh = mesh});
        constexpr double kMaxNorm = 0.5;
        for (uint64_t step = 0; step < 3; ++step) {
          const at::Tensor x = fixed({4, 5}, 10 * step + static_cast<uint64_t>(world->rank()));
          plain.zero_grad();
          model.zero_grad();
          plain.forward(x).pow(2).sum().backward();
          model.forward(x).pow(2).sum().backward();
          average_gradients(plain, *world);
          const double expected = torch::nn::utils::clip_grad_norm_(plain.parameters(), kMaxNorm, norm_type);
          calls.clear();
          const double norm = clip_grad_norm_(model.parameters(), kMaxNorm, norm_type).item<double>();
          // torch sums squares in fp32, this library in fp64.
          EXPECT_NEAR(norm, expected, 1e-5 * expected);
          EXPECT_GT(norm, kMaxNorm);
          ASSERT_EQ(calls.size(), 1U);  // one for all groups
          EXPECT_EQ(calls[0].operation, "all_reduce");
          expect_gradients_of(plain, model, 1e-5);
          // Clipped gradients have the requested norm.
          EXPECT_NEAR(total_grad_norm(model.parameters(), norm_type).item<double>(), kMaxNorm, 1e-5);
        }
      });
    }
  }
}

}  // namespace
}  // namespace megashard::testing
