// Run-time controls of test_fully_shard_comm.py, _training.py, _init.py and _autograd.py: custom
// communication, factors, hooks, units by hand. Each test bears its upstream test's name.

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/optim/adam.h>

#include <chrono>
#include <map>
#include <thread>

#include "parallel/fsdp/detail/fsdp_state.h"
#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"
#include "tests/support/small_model.h"

namespace megashard::testing {
namespace {

at::Tensor input_of(uint64_t step, const ProcessGroup& world) {
  return fixed({4, 6}, 100 + 10 * step + static_cast<uint64_t>(world.rank())) * 0.3;
}

DeviceMeshPtr two_by_two(const ProcessGroupPtr& world) {
  return std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2}, std::vector<std::string>{"replicate", "shard"});
}

/// Some steps of the plain chain and of the sharded one, bit for bit or within `tolerance`.
void expect_chain_parity(Chain& plain, Chain& chain, ProcessGroup& world, double tolerance = 0) {
  for (uint64_t step = 0; step < 3; ++step) {
    plain.root.zero_grad();
    chain.root.zero_grad();
    const at::Tensor expected = plain.root.forward(input_of(step, world)).sum();
    const at::Tensor loss = chain.root.forward(input_of(step, world)).sum();
    if (tolerance == 0 || step == 0) {
      ASSERT_TRUE(at::equal(loss, expected)) << "step " << step;
    }
    expected.backward();
    loss.backward();
    average_gradients(plain.root, world);
    expect_gradients_of(plain.root, chain.root, tolerance);
    expect_sharded(chain.root);
    descend(plain.root, 1e-3);
    descend(chain.root, 1e-3);
  }
}

// Gathers by hand.

TEST(FullyShardComm, test_unshard_async) {
  for (const bool waits : {true, false}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      Chain plain, chain;
      at::Tensor total = at::ones({1000});
      for (Chain* each : {&plain, &chain}) {
        each->root.body = [&, each](const Weights& w, at::Tensor x) {
          x = each->units[0]->forward(x);
          UnshardHandle ahead;
          if (each == &chain) {  // b travels while another collective runs on the same ranks
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
    // And on a module that is not under fully_shard it is a plain call.
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

// Factors and operators of reductions.

/// Every weight is in the loss, with a factor of the rank's own.
at::Tensor weighted_squares(const Weights& w, at::Tensor x) {
  at::Tensor y = x.sum() * 0;
  for (const auto& each : w) y = y + (each * each).sum() * x[0];
  return y;
}
const Sizes kFactorSizes{{5, 3}, {7}};

TEST(FullyShardComm, test_set_reduce_scatter_divide_factor) {
  struct Case {
    std::vector<int> mesh;
    double factor;
    std::optional<at::ScalarType> reduce_dtype;
  };
  const std::vector<Case> cases = {{{4}, 2, {}},          {{4}, 4, {}},    {{4}, 48, {}},       {{2, 2}, 2, {}},
                                   {{2, 2}, 16, {}},      {{4, 1}, 8, {}}, {{4}, 8, at::kHalf}, {{4}, 3, at::kBFloat16},
                                   {{2, 2}, 8, at::kHalf}};
  for (const auto& each : cases) {
    run_ranks(4, [&](const ProcessGroupPtr& world) {
      const auto mesh = each.mesh.size() == 1 ? flat_mesh(world)
                                              : std::make_shared<DeviceMesh>(
                                                    world, each.mesh, std::vector<std::string>{"replicate", "shard"});
      FullyShardOptions options{.mesh = mesh};
      options.mixed_precision.reduce_dtype = each.reduce_dtype;
      FormulaImpl plain(kFactorSizes, weighted_squares);
      Formula unit(kFactorSizes, weighted_squares);
      fully_shard(unit, options);
      set_gradient_divide_factor(unit, each.factor);
      const at::Tensor x = fixed({1}, static_cast<uint64_t>(10 + world->rank()));
      plain.forward(x).backward();
      unit.forward(x).backward();
      for (const auto& w : plain.w) {
        world->all_reduce(w.mutable_grad(), ReduceOp::kSum).wait();
        w.grad().div_(each.factor);
      }
      // 16 bits on the way: one rounding of each summand and of the sum.
      const double tolerance = !each.reduce_dtype ? 1e-6 : *each.reduce_dtype == at::kBFloat16 ? 2e-2 : 2e-3;
      expect_gradients_of(plain, unit, tolerance);
    });
  }
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Formula unit({{4, 4}}, linear);
    fully_shard(unit, {.mesh = flat_mesh(world)});
    contains(message_of([&] { set_gradient_divide_factor(unit, 0); }), "must be positive");
  });
}

TEST(FullyShardComm, test_singleton_copy_division) {
  for (const double factor : {0.0, 1.0, 4.0}) {  // 0: not set
    run_ranks(1, [=](const ProcessGroupPtr& world) {
      FormulaImpl plain(kFactorSizes, weighted_squares);
      Formula unit(kFactorSizes, weighted_squares);
      fully_shard(unit, {.mesh = flat_mesh(world)});
      if (factor > 0) set_gradient_divide_factor(unit, factor);
      plain.forward(at::ones({1})).backward();
      unit.forward(at::ones({1})).backward();
      for (const auto& w : plain.w) {
        if (factor > 0) w.grad().div_(factor);
      }
      expect_gradients_of(plain, unit);
    });
  }
}

/// Notes operators and sizes, and how many inputs are in flight; otherwise as the group does it.
class NotingReduceScatter final : public ReduceScatter {
 public:
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, c10::Device device) override {
    ++allocations;
    return at::empty({numel}, at::TensorOptions(dtype).device(device));
  }
  Work run(at::Tensor output, at::Tensor input, ReduceOp op, ProcessGroup& group) override {
    operators.push_back(op);
    most_in_flight = std::max(most_in_flight, ++in_flight);
    return Work(std::make_shared<Task>(group.reduce_scatter_into(output, input, op), *this));
  }

  int allocations = 0, in_flight = 0, most_in_flight = 0;
  std::vector<ReduceOp> operators;

 private:
  struct Task final : Work::Task {
    Task(Work given, NotingReduceScatter& notes) : work(std::move(given)), owner(notes) {}
    void finish() override {
      work.wait();
      --owner.in_flight;
    }
    Work work;
    NotingReduceScatter& owner;
  };
};

class NotingAllGather final : public AllGather {
 public:
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, c10::Device device) override {
    return at::empty({numel}, at::TensorOptions(dtype).device(device));
  }
  Work run(at::Tensor output, at::Tensor input, ProcessGroup& group) override {
    ++runs;
    return group.all_gather_into(output, input);
  }
  int runs = 0;
};

TEST(FullyShardComm, test_fully_shard_force_sum_reduce_scatter) {
  for (const bool force : {false, true}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      const auto scatter = std::make_shared<NotingReduceScatter>();
      FormulaImpl plain(kFactorSizes, weighted_squares);
      Formula unit(kFactorSizes, weighted_squares);
      fully_shard(unit, {.mesh = flat_mesh(world)});
      set_custom_reduce_scatter(unit, scatter);
      set_force_sum_reduction(unit, force);
      const at::Tensor x = fixed({1}, static_cast<uint64_t>(10 + world->rank()));
      plain.forward(x).backward();
      unit.forward(x).backward();
      EXPECT_EQ(scatter->operators, (std::vector<ReduceOp>{force ? ReduceOp::kSum : ReduceOp::kAvg}));
      EXPECT_EQ(scatter->allocations, 2);  // its input and its output
      average_gradients(plain, *world);
      expect_gradients_of(plain, unit);  // two ranks: halving is exact
    });
  }
}

TEST(FullyShardComm, test_fully_shard_force_sum_both_reductions) {
  for (const bool force : {false, true}) {
    run_ranks(4, [=](const ProcessGroupPtr& world) {
      std::vector<CollectiveCall> calls;
      FormulaImpl plain(kFactorSizes, weighted_squares);
      Formula unit(kFactorSizes, weighted_squares);
      fully_shard(unit, {.mesh = recording_mesh(world, {2, 2}, {"replicate", "shard"}, calls)});
      set_force_sum_reduction(unit, force);
      const at::Tensor x = fixed({1}, static_cast<uint64_t>(10 + world->rank()));
      plain.forward(x).backward();
      unit.forward(x).backward();
      for (const auto& call : calls) {
        if (call.operation != "all_gather") {
          EXPECT_EQ(call.op, force ? ReduceOp::kSum : ReduceOp::kAvg) << call.operation;
        }
      }
      average_gradients(plain, *world);
      expect_gradients_of(plain, unit, 1e-6);  // two steps of additions against one
    });
  }
}

TEST(FullyShardComm, test_set_reduce_scatter_max_input_buffers) {
  for (const int most : {1, 2, 3}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      const auto scatter = std::make_shared<NotingReduceScatter>();
      Chain plain(5), chain(5);
      chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
      for (auto& unit : chain.units) set_custom_reduce_scatter(*unit, scatter);
      set_custom_reduce_scatter(chain.root, scatter);
      set_reduce_scatter_max_input_buffers(chain.root, most);
      expect_chain_parity(plain, chain, *world);
      EXPECT_EQ(scatter->most_in_flight, most);
      EXPECT_EQ(scatter->in_flight, 0);
    });
  }
}

TEST(FullyShardComm, test_reduce_scatter_max_input_buffers_resolves_to_max) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto scatter = std::make_shared<NotingReduceScatter>();
    Chain plain(5), chain(5);
    chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
    for (auto& unit : chain.units) set_custom_reduce_scatter(*unit, scatter);
    set_custom_reduce_scatter(chain.root, scatter);
    for (const int asked : {1, 3, 2}) set_reduce_scatter_max_input_buffers(chain.root, asked);
    expect_chain_parity(plain, chain, *world);
    EXPECT_EQ(scatter->most_in_flight, 3);
  });
}

TEST(FullyShardComm, test_set_reduce_scatter_max_input_buffers_validation) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world)});
    for (const int wrong : {0, -1}) {
      contains(message_of([&] { set_reduce_scatter_max_input_buffers(chain.root, wrong); }),
               "at least one reduce-scatter input must be allowed in flight, got " + std::to_string(wrong));
    }
    FormulaImpl plain({{4, 4}}, linear);
    contains(message_of([&] { set_reduce_scatter_max_input_buffers(plain, 2); }), "is not under fully_shard");
  });
}

TEST(FullyShardComm, test_exception_when_used_together_with_comm_hooks) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    const auto fresh = [&] {
      auto unit = std::make_shared<Formula>(Sizes{{4, 4}}, linear);
      fully_shard(*unit, {.mesh = flat_mesh(world)});
      return unit;
    };
    auto unit = fresh();
    set_custom_all_gather(*unit, std::make_shared<NotingAllGather>());
    contains(message_of([&] { set_allocate_memory_from_process_group(*unit, true); }), "custom");
    contains(message_of([&] { set_symm_mem_for_comm(*unit, true); }), "custom");
    unit = fresh();
    set_custom_reduce_scatter(*unit, std::make_shared<NotingReduceScatter>());
    contains(message_of([&] { set_allocate_memory_from_process_group(*unit, true); }), "custom");
    unit = fresh();
    set_allocate_memory_from_process_group(*unit, true);
    contains(message_of([&] { set_custom_all_gather(*unit, std::make_shared<NotingAllGather>()); }), "custom");
  });
}

TEST(FullyShardInit, test_custom_hsdp_all_reduce_hook) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    // Sharded over two ranks, and averaged over the other two by the user's hook: what HSDP does.
    const auto mesh = two_by_two(world);
    const auto shard_only = std::make_shared<DeviceMesh>(std::vector<ProcessGroupPtr>{mesh->group("shard")},
                                                         std::vector<std::string>{"shard"});
    Chain native, hooked;
    native.shard({.mesh = mesh});
    hooked.shard({.mesh = shard_only});
    int called = 0;
    auto hook = [&](at::Tensor& reduced) {
      ++called;
      EXPECT_EQ(reduced.dim(), 1);
      mesh->group("replicate")->all_reduce(reduced, ReduceOp::kAvg).wait();
    };
    set_all_reduce_hook(hooked.root, hook);
    for (auto& unit : hooked.units) set_all_reduce_hook(*unit, hook);
    for (uint64_t step = 0; step < 2; ++step) {
      native.root.zero_grad();
      hooked.root.zero_grad();
      native.root.forward(input_of(step, *world)).sum().backward();
      hooked.root.forward(input_of(step, *world)).sum().backward();
      const auto expected = native.root.named_parameters();
      for (const auto& item : hooked.root.named_parameters())
        EXPECT_TRUE(at::equal(item.value().grad(), expected[item.key()].grad())) << item.key();
    }
    EXPECT_EQ(called, 2 * 4);
  });
}

/// What NCCL makes of it, registered memory, only a machine with several GPUs could show.
TEST(FullyShardComm, test_fully_shard_alloc_from_pg) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    Chain plain, chain;
    chain.shard({.mesh = recording_mesh(world, {2}, {"shard"}, calls), .reshard_after_forward = true});
    for (auto& unit : chain.units) set_allocate_memory_from_process_group(*unit, true);
    set_allocate_memory_from_process_group(chain.root, true);
    expect_chain_parity(plain, chain, *world);
    std::map<std::string, int> counts;
    for (const auto& call : calls) ++counts[call.operation];
    EXPECT_EQ(counts["reduce_scatter"], 3 * 4);  // steps, groups
    // A gather's output holds its input; a reduction's are two.
    EXPECT_EQ(counts["allocate"], counts["all_gather"] + 2 * counts["reduce_scatter"]);
  });
}

/// As above; NCCL's windows take several GPUs that see each other's memory.
TEST(FullyShardComm, test_fully_shard_symm_mem) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    Chain plain, chain;
    chain.shard({.mesh = recording_mesh(world, {2}, {"shard"}, calls), .reshard_after_forward = true});
    for (auto& unit : chain.units) set_symm_mem_for_comm(*unit, true);
    set_symm_mem_for_comm(chain.root, true);
    expect_chain_parity(plain, chain, *world);
    std::map<std::string, int> counts;
    std::vector<int64_t> sizes;  // windows are made by all ranks together
    for (const auto& call : calls) {
      ++counts[call.operation];
      if (call.operation == "allocate_symmetric") sizes.push_back(call.numel);
    }
    EXPECT_EQ(counts["allocate_symmetric"], counts["all_gather"] + 2 * counts["reduce_scatter"]);
    EXPECT_EQ(counts["allocate"], 0);
    std::string mine;
    for (const int64_t size : sizes) mine += std::to_string(size) + ' ';
    for (const auto& other : world->all_gather_strings(mine)) EXPECT_EQ(other, mine);

    const size_t before = calls.size();
    for (auto& unit : chain.units) set_symm_mem_for_comm(*unit, false);
    set_symm_mem_for_comm(chain.root, false);
    chain.forward(7).backward();
    for (size_t i = before; i < calls.size(); ++i) EXPECT_NE(calls[i].operation, "allocate_symmetric");
  });
}

// What the stream does, conformance_cuda_test.cpp sees.
TEST(FullyShardInit, test_custom_hook_custom_stream) {
  MEGASHARD_NOT_ON_SIM("the stream is a CPU's");
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const c10::Stream stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU));
    const auto hook = [](at::Tensor&) {};
    Chain replicated, sharded;
    replicated.shard({.mesh = two_by_two(world)});
    contains(message_of([&] { set_all_reduce_hook(replicated.root, hook, stream); }),
             "the all-reduce hook of 'Formula' cannot have a stream of its own: its mesh has replicas");
    set_all_reduce_hook(replicated.root, hook);
    sharded.shard({.mesh = flat_mesh(world)});
    set_all_reduce_hook(sharded.root, hook, stream);
    sharded.forward().backward();
  });
}

TEST(CustomCommunication, GathersThroughTheUsersCollective) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto gather = std::make_shared<NotingAllGather>();
    Chain plain, chain;
    chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
    set_custom_all_gather(*chain.units[0], gather);
    expect_chain_parity(plain, chain, *world);
    EXPECT_EQ(gather->runs, 2 * 3);  // forward and backward, three steps
    set_custom_all_gather(*chain.units[0], nullptr);
    chain.forward();
    EXPECT_EQ(gather->runs, 2 * 3);
  });
}

// Optimizer in backward.

TEST(FullyShardAutograd, test_post_acc_grad_hook_runs) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Stack model(2, 5, 7);
    fill_weights(model);
    shard_stack(model, {.mesh = flat_mesh(world), .reshard_after_forward = true});
    std::map<std::string, int> runs;
    for (const auto& item : model.named_parameters()) {
      register_post_accumulate_grad_hook(item.value(), [&runs, name = item.key()](const at::Tensor& parameter) {
        ++runs[name];
        EXPECT_EQ(parameter.grad().sizes(), parameter.sizes()) << name;
      });
    }
    for (int step = 1; step <= 2; ++step) {
      model.forward(fixed({4, 5}, 1)).sum().backward();
      EXPECT_EQ(runs.size(), model.named_parameters().size());
      for (const auto& [name, times] : runs) EXPECT_EQ(times, step) << name;
    }
  });
}

TEST(FullyShardAutograd, test_post_acc_grad_hook_optim_parity) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    StackImpl start(2, 5, 7);
    Stack reference(2, 5, 7), model(2, 5, 7);
    fill_weights(start);
    for (Stack* each : {&reference, &model}) {
      copy_weights(start, *each);
      shard_stack(*each, {.mesh = flat_mesh(world), .reshard_after_forward = true});
    }
    const torch::optim::AdamOptions options(1e-2);
    torch::optim::Adam usual(reference.parameters(), options);
    std::vector<std::unique_ptr<torch::optim::Adam>> each_its_own;
    for (const auto& parameter : model.parameters()) {
      each_its_own.push_back(std::make_unique<torch::optim::Adam>(std::vector<at::Tensor>{parameter}, options));
      register_post_accumulate_grad_hook(parameter, [optimizer = each_its_own.back().get()](const at::Tensor&) {
        optimizer->step();
        optimizer->zero_grad();
      });
    }
    for (uint64_t step = 0; step < 5; ++step) {
      const at::Tensor x = fixed({4, 5}, 10 * step + static_cast<uint64_t>(world->rank()));
      const at::Tensor expected = reference.forward(x).pow(2).sum();
      const at::Tensor loss = model.forward(x).pow(2).sum();
      ASSERT_TRUE(at::equal(loss, expected)) << "step " << step;
      expected.backward();
      usual.step();
      usual.zero_grad();
      loss.backward();
      for (const auto& parameter : model.parameters()) EXPECT_FALSE(parameter.grad().defined());
    }
    const auto expected = reference.named_parameters();
    for (const auto& item : model.named_parameters()) {
      EXPECT_TRUE(at::equal(sharded_view(item.value()).local, sharded_view(expected[item.key()]).local)) << item.key();
    }
  });
}

// Offload to the host: from a device only.

TEST(FullyShardTraining, test_train_parity_multi_group_cpu_offload_eager) {
  MEGASHARD_SIM_ONLY();
  for (const bool pin : {true, false}) {
    for (const ReshardAfterForward reshard : {true, false}) {
      run_ranks(2, [&](const ProcessGroupPtr& world) {
        Chain plain, chain;
        FullyShardOptions options{.mesh = flat_mesh(world), .reshard_after_forward = reshard};
        options.cpu_offload = CpuOffloadPolicy{.pin_memory = pin};
        chain.shard(options);
        expect_chain_parity(plain, chain, *world);
      });
    }
  }
}

// Replicas; upstream keeps these in test_fully_shard_extensions.py.

void expect_hybrid_parity(FullyShardOptions options, bool async_op) {
  for (const ReshardAfterForward reshard : {true, false}) {
    run_ranks(4, [&](const ProcessGroupPtr& world) {
      Chain plain, chain;
      auto here = options;
      here.mesh = two_by_two(world);
      here.reshard_after_forward = reshard;
      chain.shard(here);
      if (async_op) set_unshard_async_op(chain.root, true);
      // A rank that is late by turns.
      chain.units[1]->body = [&](const Weights& w, at::Tensor x) {
        if (world->rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return at::linear(x, w[0]);
      };
      // Averaged in two steps, so that later steps start from weights that differ in the last bit.
      expect_chain_parity(plain, chain, *world, 1e-5);
    });
  }
}

TEST(FullyShardExtensions, test_hsdp_train_parity_multi_group) { expect_hybrid_parity({}, false); }

TEST(FullyShardExtensions, test_hsdp_train_parity_cpu_offload_eager) {
  MEGASHARD_SIM_ONLY();
  for (const bool pin : {true, false}) {
    FullyShardOptions options;
    options.cpu_offload = CpuOffloadPolicy{.pin_memory = pin};
    expect_hybrid_parity(options, false);
  }
}

TEST(FullyShardExtensions, test_hsdp_train_parity_multi_group_unshard_async_op) { expect_hybrid_parity({}, true); }

}  // namespace
}  // namespace megashard::testing
