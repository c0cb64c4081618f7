#pragma once

#include <gtest/gtest.h>

#include <unordered_set>
#include <vector>

#include "tests/support/formula.h"

namespace megashard::testing {

/// Averages the gradients of a plain model over all ranks, as DistributedDataParallel does. Handles each tensor once.
inline void average_gradients(const torch::nn::Module& plain, ProcessGroup& world) {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& parameter : plain.parameters()) {
    if (!parameter.grad().defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    world.all_reduce(parameter.mutable_grad(), ReduceOp::kAvg).wait();
  }
}

/// Sets weights that depend on the seed only. LibTorch's own initialisation differs from rank to rank.
inline void fill_weights(const torch::nn::Module& module, uint64_t seed = 1) {
  for (const auto& item : module.named_parameters()) item.value().set_data(fixed(item.value().sizes(), seed++) * 0.3);
}

/// Copies all parameters. `to` must not be sharded yet.
inline void copy_weights(const torch::nn::Module& from, const torch::nn::Module& to) {
  const auto source = from.named_parameters();
  for (const auto& item : to.named_parameters()) item.value().set_data(source[item.key()].detach().clone());
}

/// Expects every gradient of `model` to be this rank's part of the plain model's: bit for bit, or within `tolerance` of
/// the largest value if the order of additions differs (replicas).
inline void expect_gradients_of(const torch::nn::Module& plain, const torch::nn::Module& model, double tolerance = 0) {
  const auto expected = plain.named_parameters();
  for (const auto& item : model.named_parameters()) {
    const at::Tensor whole = expected[item.key()].grad(), mine = item.value().grad();
    ASSERT_EQ(mine.defined(), whole.defined()) << item.key();
    if (!mine.defined()) continue;
    const at::Tensor part = part_like(whole, item.value()).to(mine.device());  // it may be offloaded
    ASSERT_EQ(mine.sizes(), part.sizes()) << item.key();
    EXPECT_EQ(mine.scalar_type(), item.value().scalar_type()) << item.key();
    if (tolerance == 0) {
      EXPECT_TRUE(at::equal(mine, part)) << item.key();
    } else if (part.numel() > 0) {
      EXPECT_LE((mine - part).abs().max().item<double>(), tolerance * whole.abs().max().item<double>()) << item.key();
    }
  }
}

/// The same for weights.
inline void expect_weights_of(const torch::nn::Module& plain, const torch::nn::Module& model, double tolerance = 0) {
  const auto expected = plain.named_parameters();
  for (const auto& item : model.named_parameters()) {
    const at::Tensor whole = expected[item.key()];
    const at::Tensor local = reshard_and_view(item.value()).local,
                     part = part_like(whole, item.value()).to(local.device());
    if (tolerance == 0) {
      EXPECT_TRUE(at::equal(local, part)) << item.key();
    } else if (part.numel() > 0) {
      EXPECT_LE((local - part).abs().max().item<double>(), tolerance * whole.abs().max().item<double>()) << item.key();
    }
  }
}

/// Expects that no parameter is unsharded.
inline void expect_sharded(const torch::nn::Module& model) {
  for (const auto& item : model.named_parameters()) {
    const auto now = item.value().sizes().vec();  // read before reshard_and_view, which reshards
    EXPECT_EQ(now, reshard_and_view(item.value()).local.sizes().vec()) << item.key();
  }
}

/// w -= rate * w.grad, for the rows that this rank has.
inline void descend(const torch::nn::Module& model, double rate = 0.01) {
  const c10::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (auto& parameter : model.parameters()) {
    if (!parameter.grad().defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    parameter.sub_(parameter.grad(), rate);
  }
}

}  // namespace megashard::testing
