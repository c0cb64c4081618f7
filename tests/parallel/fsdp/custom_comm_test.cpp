// Run-time controls of test_fully_shard_comm.py, _training.py, _init.py and _autograd.py: custom communication,
// factors, hooks, explicit unshard. Each test has its upstream test's name.

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <map>

#include "tests/support/model_pairs.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

// Factors and operators of reductions.

/// The loss contains every weight, with the rank's own factor.
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
      // 16-bit communication: one rounding of each summand and of the sum.
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
  for (const double factor : {0.0, 1.0, 4.0}) {  // 0: unset
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

/// Records operators, sizes and the number of inputs in flight; otherwise like the group's own.
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

/// Counts its runs, and notes how many reduce-scatters are in flight at each if it is given the one of the units.
class NotingAllGather final : public AllGather {
 public:
  explicit NotingAllGather(std::shared_ptr<NotingReduceScatter> given = nullptr) : scatter_(std::move(given)) {}
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, c10::Device device) override {
    return at::empty({numel}, at::TensorOptions(dtype).device(device));
  }
  Work run(at::Tensor output, at::Tensor input, ProcessGroup& group) override {
    ++runs;
    if (scatter_) in_flight.push_back(scatter_->in_flight);
    return group.all_gather_into(output, input);
  }

  int runs = 0;
  std::vector<int> in_flight;

 private:
  std::shared_ptr<NotingReduceScatter> scatter_;
};

/// In backward, all-gathers start while the reduce-scatter of an earlier unit is in flight, whether or not that has a
/// communicator of its own. overlap_test.cpp measures times.
TEST(FullyShardOverlap, test_fully_shard_backward_comm_overlap) {
  for (const bool separate : {false, true}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      const auto scatter = std::make_shared<NotingReduceScatter>();
      const auto gather = std::make_shared<NotingAllGather>(scatter);
      Chain plain(5), chain(5);
      chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
      if (separate) set_separate_reduce_scatter_group(chain.root);
      for (auto& unit : chain.units) {
        set_custom_all_gather(*unit, gather);
        set_custom_reduce_scatter(*unit, scatter);
      }
      plain.forward().backward();
      const at::Tensor loss = chain.forward();
      gather->in_flight.clear();
      loss.backward();
      // The root's backward gathers the last unit and the one before it, before any reduction of theirs.
      EXPECT_EQ(gather->in_flight, (std::vector<int>{0, 0, 1, 1, 1}));
      expect_gradients_of(plain.root, chain.root);
    });
  }
}

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
    // Sharded over two ranks, and averaged over the other two by the user's hook, as HSDP does.
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

/// NCCL's registered memory itself needs a machine with several GPUs.
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
    // An all-gather's output contains its input; a reduction has two buffers.
    EXPECT_EQ(counts["allocate"], counts["all_gather"] + 2 * counts["reduce_scatter"]);
  });
}

/// NCCL's windows themselves need several GPUs that can map each other's memory.
TEST(FullyShardComm, test_fully_shard_symm_mem) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    Chain plain, chain;
    chain.shard({.mesh = recording_mesh(world, {2}, {"shard"}, calls), .reshard_after_forward = true});
    for (auto& unit : chain.units) set_symm_mem_for_comm(*unit, true);
    set_symm_mem_for_comm(chain.root, true);
    expect_chain_parity(plain, chain, *world);
    std::map<std::string, int> counts;
    bool sums = true;
    std::vector<int64_t> sizes;  // windows are made by all ranks together
    for (const auto& call : calls) {
      ++counts[call.operation];
      if (call.operation == "reduce_scatter") sums &= call.op == ReduceOp::kSum;  // NCCL's kernels only sum
      if (call.operation == "allocate_symmetric") sizes.push_back(call.numel);
    }
    EXPECT_EQ(counts["allocate_symmetric"], counts["all_gather"] + 2 * counts["reduce_scatter"]);
    EXPECT_EQ(counts["allocate"], 0);
    EXPECT_TRUE(sums);
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

// test_custom_hook_custom_stream of cuda_test.cpp, without a stream of a GPU.
TEST(FullyShardInit, ACustomHookMayHaveACpusStream) {
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

}  // namespace
}  // namespace megashard::testing
