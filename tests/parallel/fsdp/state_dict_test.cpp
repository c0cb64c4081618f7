// test_fully_shard_state.py, _state_dict.py, _logging.py and fsdp_dsd: a module's state, and the weights as checkpoints
// see them. This library's state dict is reshard_and_view over named_parameters().

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <set>

#include "parallel/fsdp/detail/fsdp_state.h"
#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"
#include "tests/support/small_model.h"

namespace megashard::testing {
namespace {

TEST(FullyShardStateClass, test_fully_shard_state) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Chain chain;
    EXPECT_EQ(fsdp_state(chain.root), nullptr);
    chain.shard({.mesh = flat_mesh(world)});
    std::set<const FsdpState*> states{fsdp_state(chain.root).get()};
    for (const auto& unit : chain.units) states.insert(fsdp_state(*unit).get());
    EXPECT_EQ(states.size(), 4U);
    EXPECT_EQ(states.count(nullptr), 0U);
    EXPECT_EQ(fsdp_state(FormulaImpl({{4, 4}}, linear)), nullptr);
  });
}

TEST(FullyShardStateClass, test_fully_shard_reapply) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Formula model({{4, 4}}, linear);
    fully_shard(model, {.mesh = flat_mesh(world)});
    contains(message_of([&] { fully_shard(model, {.mesh = flat_mesh(world)}); }),
             "fully_shard was applied twice to a Formula");
  });
}

TEST(FullyShardStateClass, test_fully_shard_unsupported_module_cls) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    torch::nn::ModuleList list;
    torch::nn::ModuleDict dict;
    contains(message_of([&] { fully_shard(*list, {.mesh = flat_mesh(world)}); }),
             "fully_shard does not take containers without a forward (ModuleList)");
    contains(message_of([&] { fully_shard(*dict, {.mesh = flat_mesh(world)}); }),
             "fully_shard does not take containers without a forward (ModuleDict)");
    StackImpl unhooked(1, 5, 7);  // only here: hooks around forward must be added explicitly
    contains(message_of([&] { fully_shard(unhooked, {.mesh = flat_mesh(world)}); }), "make it a Hooked<StackImpl>");
  });
}

struct RunsItsList : torch::nn::ModuleListImpl {
  at::Tensor forward(at::Tensor x) {
    for (const auto& each : *this) x = each->as<Formula>()->forward(x);
    return x;
  }
};
struct RunsItsDict : torch::nn::ModuleDictImpl {
  at::Tensor forward(at::Tensor x) { return (*this)["a"]->as<Formula>()->forward(x); }
};

template <class Container>
void expect_sharded_container(Container& container, ProcessGroupPtr world) {
  const at::Tensor x = fixed({4, 6}, 1);
  const c10::NoGradGuard no_graph;  // a graph would hold the weights
  const at::Tensor expected = container.forward(x);
  fully_shard(container, {.mesh = flat_mesh(world)});
  EXPECT_TRUE(at::equal(container.forward(x), expected));
  expect_sharded(container);
}

TEST(FullyShardInit, test_modulelist_subclass_with_forward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Hooked<RunsItsList> list;
    for (const uint64_t seed : {1, 2})
      list.push_back(std::make_shared<Formula>(Sizes{{6, 6}}, linear, at::kFloat, seed));
    expect_sharded_container(list, world);
  });
}

TEST(FullyShardInit, test_moduledict_subclass_with_forward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Hooked<RunsItsDict> dict;
    dict.update(std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{
        {"a", std::make_shared<Formula>(Sizes{{6, 6}}, linear)}});
    expect_sharded_container(dict, world);
  });
}

TEST(FullyShardStateClass, test_fully_shard_deepcopy) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Formula model({{4, 4}}, linear);
    fully_shard(model, {.mesh = flat_mesh(world)});
    contains(message_of([&] { model.clone(); }), "build a second model instead of cloning");
  });
}

// Weights as checkpoints see them.

at::Tensor affine(const Weights& w, at::Tensor x) { return at::linear(x, w[0], w[1]); }

/// A whole parameter, assembled from the ranks' views.
at::Tensor whole_of(const at::Tensor& parameter, ProcessGroup& world) {
  const ShardedTensor view = reshard_and_view(parameter);
  at::Tensor whole = at::zeros(view.global_sizes);
  at::Tensor mine = whole;
  for (size_t dim = 0; dim < view.offsets.size(); ++dim) {
    const auto axis = static_cast<int64_t>(dim);
    mine = mine.narrow(axis, std::min(view.offsets[dim], whole.size(axis)), view.local.size(axis));
  }
  mine.copy_(view.local);
  // Each element comes from one rank, or from replicas with equal values; the rest is zero.
  world.all_reduce(whole, ReduceOp::kSum).wait();
  if (view.mesh != nullptr && view.mesh->ndim() == 2) whole.div_(view.mesh->size(0));
  return whole;
}

DeviceMeshPtr mesh_of(const ProcessGroupPtr& world, bool replicas) {
  if (!replicas) return flat_mesh(world);
  return std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2}, std::vector<std::string>{"replicate", "shard"});
}

TEST(FullyShardStateDict, test_dp_state_dict_save_load) {
  for (const bool replicas : {false, true}) {
    for (const int64_t width : {2, 3, 4, 5}) {  // over 4 ranks: even, uneven, and without rows
      run_ranks(4, [=](const ProcessGroupPtr& world) {
        Chain plain(2, width), chain(2, width);
        chain.shard({.mesh = mesh_of(world, replicas), .reshard_after_forward = false});
        chain.forward();  // leaves everything unsharded: reading the state reshards it
        EXPECT_EQ(chain.units[0]->w[0].size(0), width);
        const auto expected = plain.root.named_parameters();
        std::vector<std::string> names;
        for (const auto& item : chain.root.named_parameters()) {
          names.push_back(item.key());
          const ShardedTensor view = reshard_and_view(item.value());
          EXPECT_EQ(item.value().sizes(), view.local.sizes()) << "the view frees";
          EXPECT_EQ(view.global_sizes, (std::vector<int64_t>{width, width}));
          EXPECT_TRUE(view.local.is_alias_of(item.value())) << "the view is the live storage";
          EXPECT_TRUE(at::equal(whole_of(item.value(), *world), expected[item.key()]));
        }
        EXPECT_EQ(names, (std::vector<std::string>{"w0", "a.w0", "b.w0"}));

        // Loading writes through the views: new weights, whole or as rows.
        for (const auto& item : plain.root.named_parameters()) {
          item.value().set_data(item.value().detach() * 3 + 1);
          const at::Tensor mine = chain.root.named_parameters()[item.key()];
          const void* const address = reshard_and_view(mine).local.data_ptr();
          if (item.key() == "w0") {
            assign_full_parameter(mine, item.value());
          } else {
            reshard_and_view(mine).local.copy_(part_like(item.value(), mine));
          }
          EXPECT_EQ(reshard_and_view(mine).local.data_ptr(), address);
        }
        const at::Tensor loss = plain.forward(), sharded_loss = chain.forward();
        EXPECT_TRUE(at::equal(sharded_loss, loss));
        loss.backward();
        sharded_loss.backward();
        expect_gradients_of(plain.root, chain.root, replicas ? 1e-6 : 0);
      });
    }
  }
}

TEST(FullyShardStateDict, test_cached_state_dict) {
  for (const ReshardAfterForward reshard : {true, false}) {
    run_ranks(2, [&](const ProcessGroupPtr& world) {
      Chain chain;
      chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = reshard});
      ShardedTensors cached;  // read once, before the first forward
      for (const auto& item : chain.root.named_parameters())
        cached.emplace_back(item.key(), reshard_and_view(item.value()));
      for (uint64_t step = 0; step < 3; ++step) {
        const at::Tensor before = cached[0].second.local.clone();
        chain.root.zero_grad();
        chain.forward(step).backward();
        descend(chain.root);
        EXPECT_FALSE(at::equal(cached[0].second.local, before));
        for (const auto& [name, view] : cached) {
          const at::Tensor now = reshard_and_view(chain.root.named_parameters()[name]).local;
          EXPECT_EQ(view.local.data_ptr(), now.data_ptr()) << name;
          EXPECT_TRUE(at::equal(view.local, now)) << name;
        }
      }
    });
  }
}

TEST(FullyShardStateDict, test_dp_state_dict_cpu_offload) {
  MEGASHARD_SIM_ONLY();
  for (const bool pin : {true, false}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      FullyShardOptions options{.mesh = flat_mesh(world)};
      options.cpu_offload = CpuOffloadPolicy{.pin_memory = pin};
      FormulaImpl plain({{5, 6}, {5}}, affine);
      Formula model({{5, 6}, {5}}, affine);
      Formula deferred({}, affine);
      for (const char* name : {"w0", "w1"}) {
        const at::Tensor like = plain.named_parameters()[name];
        deferred.w.push_back(deferred.register_parameter(name, at::empty(like.sizes(), at::kMeta)));
      }
      fully_shard(model, options);
      fully_shard(deferred, options);
      // Only some weights were loaded: the first forward names the missing ones.
      assign_full_parameter(deferred.w[0], plain.w[0]);
      contains(message_of([&] { deferred.forward(fixed({4, 6}, 1)); }), "still on the meta device: w1");
      assign_full_parameter(deferred.w[1], plain.w[1]);
      for (Formula* each : {&model, &deferred}) {
        const at::Tensor loss = each->forward(fixed({4, 6}, 1)).pow(2).sum();
        plain.zero_grad();
        const at::Tensor expected = plain.forward(fixed({4, 6}, 1)).pow(2).sum();
        EXPECT_TRUE(at::equal(loss, expected));
        expected.backward();
        loss.backward();
        expect_gradients_of(plain, *each);
        for (const auto& w : each->w) {
          EXPECT_TRUE(reshard_and_view(w).local.is_cpu());
          EXPECT_TRUE(w.grad().is_cpu());
          EXPECT_TRUE(at::equal(whole_of(w, *world), plain.w[&w - each->w.data()]));
        }
      }
    });
  }
}

TEST(FullyShardStateDict, test_rank0_offload_full_state_dict) {
  for (const bool replicas : {false, true}) {
    run_ranks(4, [=](const ProcessGroupPtr& world) {
      Chain plain, chain;
      chain.shard({.mesh = mesh_of(world, replicas)});
      const auto expected = plain.root.named_parameters();
      std::vector<std::pair<std::string, at::Tensor>> kept;
      for (const auto& item : chain.root.named_parameters()) {
        at::Tensor whole = whole_of(item.value(), *world);
        if (world->rank() == 0) kept.emplace_back(item.key(), whole.cpu());
      }
      EXPECT_EQ(kept.size(), world->rank() == 0 ? 4U : 0U);
      for (const auto& [name, whole] : kept) EXPECT_TRUE(at::equal(whole, expected[name].cpu())) << name;
    });
  }
}

/// All whole weights after two steps, with the plain model's names in its order.
void expect_full_state(const ProcessGroupPtr& world, const FullyShardOptions& options) {
  StackImpl plain(2, 5, 7);
  Stack model(2, 5, 7);
  fill_weights(plain);
  copy_weights(plain, model);
  shard_stack(model, options);
  for (int step = 0; step < 2; ++step) {
    plain.zero_grad();
    model.zero_grad();
    plain.forward(fixed({4, 5}, 1)).sum().backward();
    model.forward(fixed({4, 5}, 1)).sum().backward();
    descend(plain);
    descend(model);
  }
  const auto expected = plain.named_parameters(), actual = model.named_parameters();
  ASSERT_EQ(actual.keys(), expected.keys());
  for (const auto& item : actual) {
    const at::Tensor whole = whole_of(item.value(), *world).cpu();
    EXPECT_TRUE(at::equal(whole, expected[item.key()].cpu())) << item.key();
  }
}

TEST(FullyShardDsd, test_1d_fsdp_get_model_state_dict) {
  run_ranks(2, [](const ProcessGroupPtr& world) { expect_full_state(world, {.mesh = flat_mesh(world)}); });
}

TEST(FullyShardDsd, test_1d_fsdp_cpu_offload_full_model_state_dict) {
  MEGASHARD_SIM_ONLY();
  run_ranks(2, [](const ProcessGroupPtr& world) {
    FullyShardOptions options{.mesh = flat_mesh(world)};
    options.cpu_offload = CpuOffloadPolicy{};
    expect_full_state(world, options);
  });
}

TEST(FullyShardLogging, test_fsdp_logging) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Stack model(1, 5, 7);
    shard_stack(model, {.mesh = flat_mesh(world)});
    std::set<std::string> lines;
    set_schedule_observer(model,
                          [&](const char* event, const std::string& group) { lines.insert(event + (" " + group)); });
    model.forward(fixed({4, 5}, 1)).sum().backward();
    const std::set<std::string> expected = {
        "unshard Stack",    "pre_backward Stack",    "post_backward Stack",    "reshard Stack",    "reduce Stack",
        "unshard blocks.0", "pre_backward blocks.0", "post_backward blocks.0", "reshard blocks.0", "reduce blocks.0"};
    EXPECT_EQ(lines, expected);
  });
}

}  // namespace
}  // namespace megashard::testing
