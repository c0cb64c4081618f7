// Run-time controls of a unit: explicit unshard, and changes between forward and backward. Tests with PyTorch's names
// are from test_fully_shard_comm.py and _training.py.

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include "parallel/fsdp/detail/fsdp_state.h"
#include "tests/support/model_pairs.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

TEST(FullyShardComm, test_unshard_async) {
  for (const bool waits : {true, false}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      Chain plain, chain;
      at::Tensor total = at::ones({1000});
      for (Chain* each : {&plain, &chain}) {
        each->root.body = [&, each](const Weights& w, at::Tensor x) {
          x = each->units[0]->forward(x);
          UnshardHandle ahead;
          if (each == &chain) {  // b's all-gather overlaps with another collective on the same ranks
            ahead = unshard(*each->units[1], /*async_op=*/true);
            EXPECT_EQ(each->units[1]->w[0].size(0), 3) << "not yet waited for";
            const auto reduced = total.clone();
            world->all_reduce(reduced, ReduceOp::kSum).wait();
            EXPECT_TRUE(at::equal(reduced, at::full({1000}, 2.0)));
          }
          if (waits) {
            ahead.wait();
            EXPECT_EQ(each->units[1]->w[0].size(0), 6);
          }
          return at::linear(each->units[2]->forward(each->units[1]->forward(x)), w[0]);
        };
      }
      chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
      expect_chain_parity(plain, chain, *world);
    });
  }
}

TEST(FullyShardTraining, test_train_parity_multi_group_unshard_async_op) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
    set_unshard_async_op(chain.root, true);
    for (size_t i = 0; i + 1 < chain.units.size(); ++i) {
      torch::nn::Module* const next[] = {chain.units[i + 1].get()};
      set_modules_to_forward_prefetch(*chain.units[i], next);
    }
    expect_chain_parity(plain, chain, *world);
  });
}

TEST(FullyShardTraining, test_register_fsdp_forward_method) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    auto& encoder = chain.units[0];
    chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
    const auto encode = [](FormulaImpl& unit, at::Tensor x) { return at::linear(x, unit.w[0]) * 2; };
    plain.root.body = [&](const Weights& w, at::Tensor x) { return at::linear(encode(*plain.units[0], x), w[0]); };
    chain.root.body = [&](const Weights& w, at::Tensor x) {
      const at::Tensor y = encoder->run_as_forward([&](at::Tensor& given) { return encode(*encoder, given); }, x);
      return at::linear(y, w[0]);
    };
    expect_chain_parity(plain, chain, *world);
    chain.forward();
    EXPECT_EQ(chain.gathers_and_post_backwards(), (Events{"unshard Formula", "unshard a"}));
    // For a module that is not under fully_shard it is a plain call.
    Formula free({{6, 6}}, linear);
    EXPECT_TRUE(
        at::equal(free.run_as_forward([&](at::Tensor& x) { return x * 2; }, at::ones({2})), at::full({2}, 2.0)));
  });
}

TEST(FullyShardTraining, test_share_comm_context) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain_first(2), plain_second(2), first(2), second(2);  // two stages of a pipeline
    for (Chain* each : {&first, &second}) {
      for (auto& unit : each->units) fully_shard(*unit, {.mesh = flat_mesh(world)});
      fully_shard(each->root, {.mesh = flat_mesh(world)});
    }
    torch::nn::Module* const roots[] = {&first.root, &second.root};
    share_comm_context(roots);
    for (uint64_t step = 0; step < 2; ++step) {
      for (Chain* each : {&plain_first, &plain_second, &first, &second}) each->root.zero_grad();
      const at::Tensor x = input_of(step, *world);
      plain_second.root.forward(plain_first.root.forward(x)).sum().backward();
      second.root.forward(first.root.forward(x)).sum().backward();
      average_gradients(plain_first.root, *world);
      average_gradients(plain_second.root, *world);
      expect_gradients_of(plain_first.root, first.root);
      expect_gradients_of(plain_second.root, second.root);
    }
    EXPECT_NE(fsdp_state(first.root)->context(), fsdp_state(second.root)->context());
    EXPECT_EQ(fsdp_state(first.root)->context()->comm, fsdp_state(second.root)->context()->comm);
    EXPECT_EQ(fsdp_state(*first.units[0])->context()->comm, fsdp_state(*second.units[0])->context()->comm);
    torch::nn::Module* const wrong[] = {&plain_first.root, &first.root};
    contains(message_of([&] { share_comm_context(wrong); }), "is not under fully_shard");
    contains(message_of([&] { share_comm_context(roots); }), "before the first forward");
  });
}

TEST(FullyShardComm, test_unshard_no_param_group) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Formula root(Sizes{}, [](const Weights&, at::Tensor x) { return x; });
    const auto inner = std::make_shared<Formula>(Sizes{{6, 6}}, linear);
    root.register_module("inner", inner);
    fully_shard(*inner, {.mesh = flat_mesh(world)});
    fully_shard(root, {.mesh = flat_mesh(world)});
    EXPECT_TRUE(fsdp_state(root)->groups().empty());
    unshard(root);
    reshard(root);
    EXPECT_EQ(inner->w[0].size(0), 3);
  });
}

TEST(FullyShardComm, test_unshard_without_lazy_init) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    chain.shard({.mesh = flat_mesh(world)});
    for (auto& unit : chain.units) {
      unshard(*unit);
      EXPECT_TRUE(at::equal(unit->w[0], plain.units[&unit - chain.units.data()]->w[0]));
    }
    const at::Tensor loss = chain.forward();  // already unsharded
    EXPECT_EQ(chain.gathers_and_post_backwards(), gathers({"Formula"}));
    plain.forward().backward();
    loss.backward();
    expect_gradients_of(plain.root, chain.root);
  });
  run_ranks(2, [](const ProcessGroupPtr& world) {  // before the root is known
    Chain plain, chain;
    for (auto& unit : chain.units) fully_shard(*unit, {.mesh = flat_mesh(world)});
    fully_shard(chain.root, {.mesh = flat_mesh(world)});
    unshard(*chain.units[1]);
    EXPECT_EQ(chain.units[1]->w[0].size(0), 6);
    plain.forward().backward();
    chain.forward().backward();
    expect_gradients_of(plain.root, chain.root);
  });
}

/// Two layers whose weights backward needs; each is a unit.
struct TwoLayers {
  TwoLayers() : first({{6, 4}}, linear), second({{6, 6}}, linear) {}
  at::Tensor forward(const at::Tensor& x) { return second.forward(first.forward(x)).sum(); }
  Formula first, second;
};

TEST(FsdpControls, ReductionsMayChangeBetweenForwardAndBackward) {
  using Control = std::function<void(torch::nn::Module&)>;
  const std::vector<Control> controls = {
      [](torch::nn::Module& unit) { set_gradient_divide_factor(unit, 2); },
      [](torch::nn::Module& unit) { set_force_sum_reduction(unit, true); },
      [](torch::nn::Module& unit) { set_all_reduce_hook(unit, [](at::Tensor& reduced) { reduced.mul_(1); }); }};
  for (const bool reshard : {true, false}) {
    for (const auto& control : controls) {
      run_ranks(2, [&](const ProcessGroupPtr& world) {
        TwoLayers plain, layers;
        for (Formula* unit : {&layers.first, &layers.second}) {
          fully_shard(*unit, {.mesh = flat_mesh(world), .reshard_after_forward = reshard});
        }
        const at::Tensor x = fixed({3, 4}, static_cast<uint64_t>(10 + world->rank())).requires_grad_();
        const at::Tensor loss = layers.forward(x);
        for (Formula* unit : {&layers.first, &layers.second}) control(*unit);
        loss.backward();
        plain.forward(x.detach()).backward();
        average_gradients(plain.first, *world);
        average_gradients(plain.second, *world);
        expect_gradients_of(plain.first, layers.first, 1e-6);
        expect_gradients_of(plain.second, layers.second, 1e-6);
      });
    }
  }
}

TEST(FsdpControls, UnshardReadsWeightsThatHaveJustChanged) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    chain.shard({.mesh = flat_mesh(world)});
    chain.forward().backward();
    for (Chain* each : {&plain, &chain}) {
      const at::NoGradGuard no_grad;
      each->units[1]->w[0].mul_(2);
    }
    unshard(*chain.units[1]);
    EXPECT_TRUE(at::equal(chain.units[1]->w[0], plain.units[1]->w[0]));
    reshard(*chain.units[1]);
  });
}

// Before the first forward the root is unknown: its controls may be called on any unit.
TEST(FsdpControls, OfTheRootReachItFromAUnitThatHasNotRun) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    for (auto& unit : chain.units) fully_shard(*unit, {.mesh = flat_mesh(world)});
    fully_shard(chain.root, {.mesh = flat_mesh(world)});
    Formula& unit = *chain.units[1];
    set_schedule_observer(
        unit, [&](const char* event, const std::string& group) { chain.events.push_back(event + (" " + group)); });
    set_reduce_scatter_max_input_buffers(unit, 3);
    set_is_last_backward(unit, false);
    const CommStreams streams(fsdp_state(unit)->device());
    set_post_optim_event(unit, streams.enabled() ? StreamEvent::record(streams.current()) : StreamEvent());
    const at::Tensor loss = chain.forward();
    EXPECT_EQ(chain.gathers_and_post_backwards(), gathers({"Formula", "a", "b", "c"}));
    const FsdpContext* context = fsdp_state(chain.root)->context();
    EXPECT_EQ(fsdp_state(unit)->context(), context);
    EXPECT_EQ(context->comm->max_reducing, 3U);
    EXPECT_FALSE(context->is_last_backward);
    EXPECT_FALSE(context->post_optim_event.has_value()) << "consumed";
    set_is_last_backward(unit, true);
    plain.forward().backward();
    loss.backward();
    expect_gradients_of(plain.root, chain.root);
  });
}

TEST(FsdpControls, PrefetchListsMayNameUnitsOfARootThatHasNotRun) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain_first(2), plain_second(2), first(2), second(2);  // two stages of a pipeline
    for (Chain* each : {&first, &second}) {
      for (auto& unit : each->units) fully_shard(*unit, {.mesh = flat_mesh(world)});
      fully_shard(each->root, {.mesh = flat_mesh(world)});
    }
    torch::nn::Module* const roots[] = {&first.root, &second.root};
    share_comm_context(roots);
    first.watch();
    torch::nn::Module* const next[] = {second.units[0].get()};
    set_modules_to_forward_prefetch(*first.units[1], next);
    const at::Tensor x = input_of(0, *world);
    const at::Tensor between = first.root.forward(x);
    EXPECT_EQ(first.gathers_and_post_backwards(), gathers({"Formula", "a", "b"}));
    second.root.forward(between).sum().backward();
    plain_second.root.forward(plain_first.root.forward(x)).sum().backward();
    for (Chain* each : {&plain_first, &plain_second}) average_gradients(each->root, *world);
    expect_gradients_of(plain_first.root, first.root);
    expect_gradients_of(plain_second.root, second.root);
  });
}

}  // namespace
}  // namespace megashard::testing
