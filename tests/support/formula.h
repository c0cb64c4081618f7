#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parallel/fsdp/fully_shard.h"
#include "tests/support/message_of.h"

namespace megashard::testing {

/// Normally distributed values that depend on the seed only: the same on every rank.
inline at::Tensor fixed(at::IntArrayRef sizes, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator);
}

inline DeviceMeshPtr flat_mesh(const ProcessGroupPtr& world) {
  return std::make_shared<DeviceMesh>(world, std::vector<int>{world->size()});
}

inline DeviceMeshPtr two_by_two(const ProcessGroupPtr& world) {
  return std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2}, std::vector<std::string>{"replicate", "shard"});
}

/// A mesh with one rank in the shard dimension, as replicate of torch.distributed.
inline DeviceMeshPtr replicas_only(const ProcessGroupPtr& world) {
  return std::make_shared<DeviceMesh>(world, std::vector<int>{world->size(), 1},
                                      std::vector<std::string>{"replicate", "shard"});
}

/// A different seed for each step and rank.
inline uint64_t data_seed(uint64_t step, const ProcessGroup& world) {
  return 100 + 10 * step + static_cast<uint64_t>(world.rank());
}

/// All ranks in one dimension; every unit reshards after forward.
inline FullyShardOptions resharding(const ProcessGroupPtr& world) {
  return {.mesh = flat_mesh(world), .reshard_after_forward = true};
}

/// This rank's part of a whole tensor, sharded as the parameter is, along any dimensions.
inline at::Tensor part_like(const at::Tensor& whole, const at::Tensor& parameter) {
  const auto view = reshard_and_view(parameter);
  at::Tensor part = whole.detach();
  for (int64_t dim = 0; dim < part.dim(); ++dim) {
    const int64_t begin = std::min(view.offsets[static_cast<size_t>(dim)], whole.size(dim));
    part = part.narrow(dim, begin, view.local.size(dim));
  }
  return part;
}

inline bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  ADD_FAILURE() << "\"" << part << "\" is not in \"" << text << "\"";
  return false;
}

using Weights = std::vector<at::Tensor>;
using Body = std::function<at::Tensor(const Weights& w, at::Tensor x)>;
using Sizes = std::vector<std::vector<int64_t>>;

/// The most common body: one weight, no bias.
inline at::Tensor linear(const Weights& w, at::Tensor x) { return at::linear(x, w[0]); }

/// A module whose forward is a function of its parameters w0, w1, ... and one input.
struct FormulaImpl : torch::nn::Module {
  FormulaImpl(const Sizes& sizes, Body given, at::ScalarType dtype = at::kFloat, uint64_t seed = 1)
      : body(std::move(given)) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      w.push_back(register_parameter("w" + std::to_string(i), fixed(sizes[i], seed + i).to(dtype)));
    }
  }
  at::Tensor forward(at::Tensor x) { return body(w, x); }

  Weights w;
  Body body;
};
using Formula = Hooked<FormulaImpl>;

/// The same formula with the same weights, plain and as a unit of fully_shard over `mesh`. If the policy has a
/// param_dtype, the plain one has that dtype.
struct Twins {
  Twins(const Sizes& sizes, const Body& body, const FullyShardOptions& options)
      : plain(sizes, body, options.mixed_precision.param_dtype.value_or(at::kFloat)), unit(sizes, body) {
    fully_shard(unit, options);
  }

  /// Expects the unit's gradients to be this rank's rows of the plain ones. Inputs must be the same on all ranks and
  /// the number of ranks a power of two: then averages are exact.
  void expect_equal_gradients() {
    for (size_t i = 0; i < plain.w.size(); ++i) {
      ASSERT_EQ(unit.w[i].grad().defined(), plain.w[i].grad().defined()) << "w" << i;
      if (!plain.w[i].grad().defined()) continue;
      const at::Tensor expected = part_like(plain.w[i].grad(), unit.w[i]);
      EXPECT_EQ(unit.w[i].grad().scalar_type(), unit.w[i].scalar_type());
      EXPECT_TRUE(at::equal(unit.w[i].grad(), expected.to(unit.w[i].scalar_type()))) << "w" << i;
    }
  }
  /// Expects parameters to hold local rows.
  void expect_sharded() {
    for (const auto& w : unit.w) EXPECT_EQ(w.sizes(), reshard_and_view(w).local.sizes());
  }
  void zero_grad() {
    plain.zero_grad();
    unit.zero_grad();
  }

  FormulaImpl plain;
  Formula unit;
};

}  // namespace megashard::testing
