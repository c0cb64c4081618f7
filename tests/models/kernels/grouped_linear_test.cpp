// Products of groups of rows, each with its own weights: compared with fp64 and with one product after the other.

#include "models/kernels/grouped_linear.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/autograd.h>

#include <numeric>

#include "models/kernels/fused_ops.h"
#include "parallel/fsdp/adjacent_parameters.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/guarded_tensor.h"
#include "tests/models/kernels/against_fp64.h"
#include "tests/support/counting_allocator.h"
#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using Counts = std::vector<int64_t>;

int64_t rows_of(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

RowGroupsPtr groups_of(const Counts& counts) {
  return c10::make_intrusive<RowGroups>(at::tensor(counts, at::kLong).to(device_of_tests()), rows_of(counts));
}

/// The expected result of grouped_linear: for each weight of a group, the rows of all groups, [N, out].
Tensors one_by_one(const at::Tensor& x, at::TensorList weights, const Counts& counts) {
  const auto pieces = x.split_with_sizes(counts);
  const size_t each = weights.size() / counts.size();
  Tensors results;
  for (size_t i = 0; i < each; ++i) {
    Tensors parts;
    for (size_t group = 0; group < counts.size(); ++group)
      parts.push_back(at::linear(pieces[group], weights[group * each + i]));
    results.push_back(at::cat(parts));
  }
  return results;
}

const std::vector<Counts> kCounts = {{3, 0, 5, 1}, {0, 9, 0, 0}, {0, 0, 0, 1}, {16, 31, 2, 64}};

TEST(GroupedLinear, HasTheNumbersOfFp64) {
  MEGASHARD_NOT_ON_SIM("its kernel is for weights that a unit has gathered");
  for (const Counts& counts : kCounts) {
    for (const auto& [out, in] : {std::pair{17, 33}, std::pair{1, 1}, std::pair{160, 200}}) {
      Tensors inputs{fixed({rows_of(counts), in}, 1)};
      for (size_t i = 0; i < counts.size(); ++i) inputs.push_back(fixed({out, in}, 10 + i));
      const auto fused = [&](const Tensors& all) {
        const auto weights = at::TensorList(all).slice(1);
        EXPECT_TRUE(can_group(all[0], weights, 4));
        return grouped_linear(all[0], weights, groups_of(counts))[0];
      };
      // Weights are joined for the comparison: groups without rows have zero gradients, by which `error` would divide.
      const auto plain = [&](const Tensors& all) {
        return one_by_one(all[0], at::TensorList(all).slice(1), counts)[0];
      };
      const auto joined = [&](const auto& of_all) {
        return [of_all, rows = out](const Tensors& given) {
          Tensors all{given[0]};
          for (const auto& weight : given[1].split(rows)) all.push_back(weight);
          return of_all(all);
        };
      };
      expect_same({inputs[0], at::cat(at::TensorList(inputs).slice(1))}, joined(fused), joined(plain));
    }
  }
}

/// Two weights for each group, adjacent in memory when gathered.
struct PairsImpl : torch::nn::Module {
  PairsImpl(const Counts& of_groups, int64_t out, int64_t in) : counts(of_groups) {
    for (size_t i = 0; i < 2 * counts.size(); ++i)
      weights.push_back(register_parameter("w" + std::to_string(i), fixed({out, in}, i)));
    keep_adjacent(weights);
  }
  std::vector<at::Tensor> forward(at::Tensor x) {
    if (apart) return one_by_one(x, weights, counts);
    EXPECT_TRUE(can_group(x, weights, static_cast<int64_t>(counts.size()))) << x.scalar_type();
    return grouped_linear(x, weights, groups);
  }

  Counts counts;
  RowGroupsPtr groups = groups_of(counts);
  Tensors weights;
  bool apart = false;
};
using Pairs = Hooked<PairsImpl>;

/// Results, gradients of the input, and gradients of this rank's rows of the trainable weights.
Tensors run(Pairs& model, at::ScalarType dtype, int64_t out, int64_t in) {
  const auto device = device_of_tests();
  const int64_t rows = rows_of(model.counts);
  const auto x = fixed({rows, in}, 30).to(device, dtype).requires_grad_();
  auto found = model.forward(x);
  model.zero_grad();
  const auto of = [&](uint64_t seed) { return fixed({rows, out}, seed).to(device, dtype); };
  ((found[0] * of(40)).sum() + (found[1] * of(41)).sum()).backward();
  for (auto& each : found) each = each.detach();
  found.push_back(x.grad());
  for (const auto& weight : model.weights) {
    if (weight.requires_grad()) found.push_back(unguarded(weight.grad()).clone());
  }
  return found;
}

void expect_the_same(const ProcessGroupPtr& world, const Counts& counts, at::ScalarType dtype, double bar) {
  constexpr int64_t kOut = 16, kIn = 32;
  Pairs model(counts, kOut, kIn);
  model.to(device_of_tests());
  if (dtype == at::kHalf) model.weights[3].set_requires_grad(false);
  auto options = resharding(world);
  options.mixed_precision.param_dtype = dtype;
  fully_shard(model, options);
  const auto grouped = run(model, dtype, kOut, kIn);
  model.apart = true;
  const auto apart = run(model, dtype, kOut, kIn);
  ASSERT_EQ(grouped.size(), apart.size());
  for (size_t i = 0; i < apart.size(); ++i)
    EXPECT_LE((grouped[i] - apart[i]).abs().max().item<double>(), bar * apart[i].abs().max().item<double>())
        << dtype << " " << i;
}

TEST(GroupedLinear, OfASwigluThatIsNotKept) {
  MEGASHARD_NOT_ON_SIM("its kernel is for weights that a unit has gathered; moe_test.cpp has these");
  auto& allocator = *new CountingAllocator;
  for (const Counts& counts : kCounts) {
    const int64_t rows = rows_of(counts);
    const auto both = fixed({rows, 2 * 24}, 1);
    Tensors leaves{both.narrow(1, 0, 24).detach().requires_grad_(), both.narrow(1, 24, 24).detach().requires_grad_()};
    for (size_t i = 0; i < counts.size(); ++i) leaves.push_back(fixed({9, 24}, 10 + i).requires_grad_());
    leaves.back().set_requires_grad(false);
    const auto weights = at::TensorList(leaves).slice(2);
    const auto groups = groups_of(counts);
    const auto run = [&](const auto& body) {
      const auto before = allocator.live();
      Tensors results{body()};
      const auto kept = static_cast<int64_t>(allocator.live() - before) / 4;
      Tensors trained = leaves;
      trained.pop_back();
      const auto grads = torch::autograd::grad(results, trained, {fixed({rows, 9}, 3)});
      results.insert(results.end(), grads.begin(), grads.end());
      return std::pair{results, kept};
    };
    const auto [joint, kept] = run([&] { return grouped_swiglu_linear(leaves[0], leaves[1], weights, groups); });
    const auto [apart, kept_apart] =
        run([&] { return grouped_linear(swiglu(leaves[0], leaves[1]), weights, groups)[0]; });
    for (size_t i = 0; i < apart.size(); ++i) EXPECT_TRUE(at::equal(joint[i], apart[i])) << i;
    EXPECT_EQ(kept_apart - kept, rows * 24);
  }
  allocator.stop();
}

TEST(GroupedLinear, OfWeightsThatLieAdjacent) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    for (const Counts& counts : kCounts) {
      expect_the_same(world, counts, at::kBFloat16, 1e-2);
      if (on_simulated_device()) continue;  // the simulated device has no such kernel
      expect_the_same(world, counts, at::kFloat, 2e-6);
      expect_the_same(world, counts, at::kHalf, 2e-3);
    }
  });
}

TEST(GroupedLinear, OnADeviceTheHostDoesNotWait) {
  MEGASHARD_SIM_ONLY();
  run_ranks(1, [](const ProcessGroupPtr& world) {
    const Counts counts{8, 0, 24, 1};
    Pairs model(counts, 16, 32);
    model.to(device_of_tests());
    auto options = resharding(world);
    options.mixed_precision.param_dtype = at::kBFloat16;
    fully_shard(model, options);
    run(model, at::kBFloat16, 16, 32);  // warm-up: allocations that happen once
    const auto x = fixed({33, 32}, 30).to(device_of_tests(), at::kBFloat16).requires_grad_();
    simulated_cuda().log_host_syncs(true);
    simulated_cuda().take_host_syncs();
    const auto results = model.forward(x);
    (results[0] * results[1]).sum().backward();
    for (const HostSync& sync : simulated_cuda().take_host_syncs()) ADD_FAILURE() << sync.how << " in " << sync.place;
  });
}

TEST(GroupedLinear, WeightsThatItDoesNotTake) {
  const auto device = device_of_tests();
  const auto x = fixed({4, 16}, 1).to(device);
  const Tensors alike{fixed({8, 16}, 2).to(device), fixed({8, 16}, 3).to(device)};
  EXPECT_EQ(can_group(x, alike, 2), x.is_cpu());
  EXPECT_FALSE(can_group(x, alike, 1)) << "two for one group, not adjacent";
  EXPECT_FALSE(can_group(x.to(at::kBFloat16), alike, 2));
  EXPECT_FALSE(can_group(x, Tensors{alike[0], fixed({16, 16}, 4).to(device)}, 2));
}

}  // namespace
}  // namespace megashard::testing
