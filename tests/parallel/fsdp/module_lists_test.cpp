// test_fully_shard_training.py: a list of modules as one group, some of which do not run with the others.

#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

/// The first and the third unit of the chain are one group.
void shard_as_list(Chain& chain, const FullyShardOptions& options) {
  torch::nn::Module* const list[] = {chain.units[0].get(), chain.units[2].get()};
  fully_shard(list, options);
  fully_shard(*chain.units[1], options);
  fully_shard(chain.root, options);
  chain.watch();
}

/// The root returns the input of the last unit; the caller runs that unit itself, on chunks.
void leave_out_last(Chain& chain) {
  chain.root.body = [&chain](const Weights& w, at::Tensor x) {
    return at::linear(chain.units[1]->forward(chain.units[0]->forward(x)), w[0]);
  };
}

at::Tensor chunked_loss(Chain& chain, const at::Tensor& hidden) {
  at::Tensor loss;
  for (const auto& chunk : hidden.chunk(2)) {
    const at::Tensor part = chain.units[2]->forward(chunk).pow(2).sum();
    loss = loss.defined() ? loss + part : part;
  }
  return loss;
}

/// Equal to the plain chain up to the order of additions: a unit that is called on chunks reduces once per chunk.
void expect_chunked_parity(const ProcessGroupPtr& world, const FullyShardOptions& options, int microbatches,
                           const std::function<void(Chain&, int)>& before) {
  Chain plain, chain;
  leave_out_last(plain);
  leave_out_last(chain);
  shard_as_list(chain, options);
  for (uint64_t step = 0; step < 2; ++step) {
    plain.root.zero_grad();
    chain.root.zero_grad();
    for (int micro = 0; micro < microbatches; ++micro) {
      before(chain, micro);
      const at::Tensor x = fixed({4, 6}, data_seed(step, *world) + 1000 * micro) * 0.1;
      const at::Tensor expected = chunked_loss(plain, plain.root.forward(x));
      const at::Tensor loss = chunked_loss(chain, chain.root.forward(x));
      ASSERT_TRUE(at::equal(loss, expected));
      expected.backward();
      loss.backward();
    }
    average_gradients(plain.root, *world);
    expect_gradients_of(plain.root, chain.root, 1e-6);
    expect_sharded(chain.root);
  }
}

TEST(FullyShardTraining, test_partial_group_forward_then_standalone) {
  for (const bool reshard : {true, false}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      expect_chunked_parity(world, {.mesh = flat_mesh(world), .reshard_after_forward = reshard}, 1, [](Chain&, int) {});
    });
  }
}

TEST(FullyShardTraining, test_partial_group_forward_grad_accum_chunked) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    expect_chunked_parity(world, {.mesh = flat_mesh(world), .reshard_after_forward = true}, 3,
                          [](Chain& chain, int micro) { set_requires_gradient_sync(chain.root, micro == 2); });
  });
}

TEST(FullyShardTraining, test_partial_group_reshard_toggle) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    expect_chunked_parity(world, {.mesh = flat_mesh(world), .reshard_after_forward = true}, 2,
                          [](Chain& chain, int micro) {
                            set_reshard_after_forward(chain.root, micro == 1);
                            set_reshard_after_backward(chain.root, micro == 1);
                          });
  });
}

TEST(FullyShardTraining, test_double_partial_forward_then_backward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    leave_out_last(plain);
    leave_out_last(chain);
    shard_as_list(chain, {.mesh = flat_mesh(world), .reshard_after_forward = true});
    const at::Tensor x = fixed({4, 6}, data_seed(0, *world)) * 0.1, y = fixed({4, 6}, data_seed(1, *world)) * 0.1;
    (plain.root.forward(x).sum() + plain.root.forward(y).pow(2).sum()).backward();
    (chain.root.forward(x).sum() + chain.root.forward(y).pow(2).sum()).backward();
    average_gradients(plain.root, *world);
    expect_gradients_of(plain.root, chain.root, 1e-6);
  });
}

TEST(FullyShardTraining, test_grouped_module_cast_forward_inputs) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Chain chain;
    std::vector<at::ScalarType> seen;
    for (auto& unit : chain.units) {
      unit->body = [&](const Weights& w, at::Tensor x) {
        seen.push_back(x.scalar_type());
        return at::linear(x.to(w[0].scalar_type()), w[0]).to(at::kFloat);
      };
    }
    FullyShardOptions options{.mesh = flat_mesh(world)};
    options.mixed_precision.param_dtype = at::kBFloat16;
    torch::nn::Module* const list[] = {chain.units[0].get(), chain.units[1].get(), chain.units[2].get()};
    fully_shard(list, options);
    fully_shard(chain.root, {.mesh = flat_mesh(world)});
    chain.forward().backward();
    EXPECT_EQ(seen, (std::vector<at::ScalarType>(3, at::kBFloat16)));
  });
}

TEST(FullyShardTraining, test_reset_iter_state_after_exception) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    bool fail = false;
    for (Chain* each : {&plain, &chain}) {
      each->units[2]->body = [&](const Weights& w, at::Tensor x) {
        TORCH_CHECK(!fail, "forward failed on purpose");
        return at::linear(x, w[0]);
      };
    }
    shard_as_list(chain, {.mesh = flat_mesh(world)});
    for (int step = 0; step < 2; ++step) {
      fail = true;
      contains(message_of([&] { chain.forward(); }), "forward failed on purpose");
      expect_sharded(chain.root);
      fail = false;
      plain.root.zero_grad();
      chain.root.zero_grad();
      plain.forward().backward();
      chain.forward().backward();
      expect_gradients_of(plain.root, chain.root);
    }
  });
}

}  // namespace
}  // namespace megashard::testing
