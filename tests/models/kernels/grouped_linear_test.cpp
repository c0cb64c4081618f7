// Products of groups of rows, each with its own weights: compared with fp64 and with one product after the other.

#include "models/kernels/grouped_linear.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/autograd.h>

#include <numeric>

#include "models/kernels/fused_ops.h"
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

/// The expected result of grouped_linear for weights [groups, parts, out, in].
Tensors one_by_one(const at::Tensor& x, const at::Tensor& weight, const Counts& counts) {
  const auto pieces = x.split_with_sizes(counts);
  Tensors results;
  for (int64_t i = 0; i < weight.size(1); ++i) {
    Tensors parts;
    for (size_t group = 0; group < counts.size(); ++group)
      parts.push_back(at::linear(pieces[group], weight.select(0, static_cast<int64_t>(group)).select(0, i)));
    results.push_back(at::cat(parts));
  }
  return results;
}

const std::vector<Counts> kCounts = {{3, 0, 5, 1}, {0, 9, 0, 0}, {0, 0, 0, 1}, {16, 31, 2, 64}};

TEST(GroupedLinear, HasTheNumbersOfFp64) {
  MEGASHARD_NOT_ON_SIM("the comparison runs on the CPU");
  for (const Counts& counts : kCounts) {
    for (const auto& [out, in] : {std::pair{17, 33}, std::pair{1, 1}, std::pair{160, 200}}) {
      const auto of_rows = [&](const Tensors& all) { return all[1].view({4, 1, out, in}); };
      const auto fused = [&](const Tensors& all) { return grouped_linear(all[0], of_rows(all), groups_of(counts))[0]; };
      const auto plain = [&](const Tensors& all) { return one_by_one(all[0], of_rows(all), counts)[0]; };
      // One matrix for the comparison: groups without rows have zero gradients, by which `error` would divide.
      expect_same({fixed({rows_of(counts), in}, 1), fixed({4 * out, in}, 10)}, fused, plain);
    }
  }
}

/// Two weights for each group.
struct PairsImpl : torch::nn::Module {
  PairsImpl(const Counts& of_groups, int64_t out, int64_t in) : counts(of_groups) {
    weight = register_parameter("weight", fixed({static_cast<int64_t>(counts.size()), 2, out, in}, 1));
  }
  std::vector<at::Tensor> forward(at::Tensor x) {
    return apart ? one_by_one(x, weight, counts) : grouped_linear(x, weight, groups);
  }

  Counts counts;
  RowGroupsPtr groups = groups_of(counts);
  at::Tensor weight;
  bool apart = false;
};
using Pairs = Hooked<PairsImpl>;

/// Results, gradients of the input, and gradients of this rank's part of a trainable weight.
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
  if (model.weight.requires_grad()) found.push_back(unguarded(model.weight.grad()).clone());
  return found;
}

void expect_the_same(const ProcessGroupPtr& world, const Counts& counts, at::ScalarType dtype, double bar) {
  constexpr int64_t kOut = 16, kIn = 32;
  Pairs model(counts, kOut, kIn);
  model.to(device_of_tests());
  if (dtype == at::kHalf) model.weight.set_requires_grad(false);
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
  MEGASHARD_NOT_ON_SIM("counts the host's memory; moe_test.cpp has the numbers");
  auto& allocator = *new CountingAllocator;
  for (const Counts& counts : kCounts) {
    const int64_t rows = rows_of(counts);
    const auto both = fixed({rows, 2 * 24}, 1);
    const Tensors leaves{both.narrow(1, 0, 24).detach().requires_grad_(),
                         both.narrow(1, 24, 24).detach().requires_grad_(), fixed({4, 9, 24}, 10).requires_grad_()};
    const auto groups = groups_of(counts);
    const auto run = [&](const auto& body) {
      const auto before = allocator.live();
      Tensors results{body()};
      const auto kept = static_cast<int64_t>(allocator.live() - before) / 4;
      const auto grads = torch::autograd::grad(results, leaves, {fixed({rows, 9}, 3)});
      results.insert(results.end(), grads.begin(), grads.end());
      return std::pair{results, kept};
    };
    const auto [joint, kept] = run([&] { return grouped_swiglu_linear(leaves[0], leaves[1], leaves[2], groups); });
    const auto [apart, kept_apart] =
        run([&] { return grouped_linear(swiglu(leaves[0], leaves[1]), leaves[2], groups)[0]; });
    for (size_t i = 0; i < apart.size(); ++i) EXPECT_TRUE(at::equal(joint[i], apart[i])) << i;
    EXPECT_EQ(kept_apart - kept, rows * 24);
  }
  allocator.stop();
}

TEST(GroupedLinear, OfWeightsThatAUnitGathers) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    for (const Counts& counts : kCounts) {
      expect_the_same(world, counts, at::kBFloat16, 1e-2);
      expect_the_same(world, counts, at::kFloat, 2e-6);
      expect_the_same(world, counts, at::kHalf, 2e-3);
    }
  });
}

/// With a kernel the host reads no numbers of rows; without one it must.
TEST(GroupedLinear, OnADeviceTheHostWaitsForNumbersOfRowsAlone) {
  MEGASHARD_SIM_ONLY();
  run_ranks(1, [](const ProcessGroupPtr& world) {
    for (const auto dtype : {at::kBFloat16, at::kFloat}) {
      const Counts counts{8, 0, 24, 1};
      Pairs model(counts, 16, 32);
      model.to(device_of_tests());
      auto options = resharding(world);
      options.mixed_precision.param_dtype = dtype;
      fully_shard(model, options);
      run(model, dtype, 16, 32);  // warm-up: allocations that happen once
      model.groups = groups_of(counts);
      const auto x = fixed({33, 32}, 30).to(device_of_tests(), dtype).requires_grad_();
      simulated_cuda().log_host_syncs(true);
      simulated_cuda().take_host_syncs();
      const auto results = model.forward(x);
      (results[0] * results[1]).sum().backward();
      EXPECT_EQ(simulated_cuda().take_host_syncs().size(), dtype == at::kBFloat16 ? 0u : 1u);
      simulated_cuda().log_host_syncs(false);
      EXPECT_EQ(has_grouped_kernel(x, {32, 32}, 4), dtype == at::kBFloat16);
    }
  });
}

}  // namespace
}  // namespace megashard::testing
