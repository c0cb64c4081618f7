#pragma once

#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <limits>
#include <memory>
#include <vector>

#include "parallel/collectives/fake_process_group.h"
#include "parallel/fsdp/fully_shard.h"
#include "tests/support/tensor_parallel_linear.h"
#include "tests/support/parity.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {

/// x + down(gelu(up(norm(x)))), cut over `tp` as Megatron's layers; every rank has the norm.
struct ParallelMlpImpl : torch::nn::Module {
  ParallelMlpImpl(int64_t width, int64_t hidden, const DeviceMeshPtr& tp)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", ColumnParallelLinear(ColumnParallelLinearOptions{
                                     .in_features = width, .out_features = hidden, .mesh = tp}))),
        down(register_module("down", RowParallelLinear(RowParallelLinearOptions{
                                         .in_features = hidden, .out_features = width, .mesh = tp}))) {}
  at::Tensor forward(at::Tensor x) { return x + down(at::gelu(up(norm(x)))); }

  torch::nn::LayerNorm norm;
  ColumnParallelLinear up;
  RowParallelLinear down;
};
using ParallelMlp = Hooked<ParallelMlpImpl>;

/// Causal attention over x [B, T, width] with heads of 2 channels, which are divided over `tp`; then the MLP.
struct ParallelBlockImpl : torch::nn::Module {
  ParallelBlockImpl(int64_t width, int64_t hidden, const DeviceMeshPtr& tp)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        qkv{column("q", width, tp), column("k", width, tp), column("v", width, tp)},
        out(register_module("out", RowParallelLinear(RowParallelLinearOptions{
                                       .in_features = width, .out_features = width, .mesh = tp, .bias = false}))),
        mlp(register_module("mlp", std::make_shared<ParallelMlpImpl>(width, hidden, tp))) {}

  at::Tensor forward(at::Tensor x) {
    const at::Tensor normed = norm(x);
    std::vector<at::Tensor> heads;
    for (auto& each : qkv) {
      const at::Tensor y = each(normed);
      heads.push_back(y.view({y.size(0), y.size(1), -1, 2}).transpose(1, 2));
    }
    const at::Tensor attended =
        at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0, /*is_causal=*/true);
    return mlp->forward(x + out(attended.transpose(1, 2).flatten(2)));
  }

  torch::nn::LayerNorm norm;
  std::vector<ColumnParallelLinear> qkv;
  RowParallelLinear out;
  std::shared_ptr<ParallelMlpImpl> mlp;

 private:
  ColumnParallelLinear column(const char* name, int64_t width, const DeviceMeshPtr& tp) {
    return register_module(name, ColumnParallelLinear(ColumnParallelLinearOptions{
                                     .in_features = width, .out_features = width, .mesh = tp}));
  }
};
using ParallelBlock = Hooked<ParallelBlockImpl>;

/// Two units of one kind, and a head that is not tensor-parallel.
template <class Unit>
struct ParallelStackImpl : torch::nn::Module {
  ParallelStackImpl(int64_t width, int64_t hidden, const DeviceMeshPtr& tp) {
    torch::nn::ModuleList list;
    for (int i = 0; i < 2; ++i) {
      units.push_back(std::make_shared<Unit>(width, hidden, tp));
      list->push_back(units.back());
    }
    register_module("units", list);
    head = register_module("head", torch::nn::Linear(width, 3));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& unit : units) x = unit->forward(x);
    return head(x);
  }

  std::vector<std::shared_ptr<Unit>> units;
  torch::nn::Linear head{nullptr};
};
template <class Unit>
using ParallelStack = Hooked<ParallelStackImpl<Unit>>;

template <class Unit>
void shard_units(ParallelStack<Unit>& model, const FullyShardOptions& options) {
  for (auto& unit : model.units) fully_shard(*unit, options);
  fully_shard(model, options);
}

/// A tensor-parallel mesh of only this rank: the same model without tensor parallelism.
inline DeviceMeshPtr mesh_of_one() {
  return std::make_shared<DeviceMesh>(make_fake_group({.device_type = device_of_tests().type()}), std::vector<int>{1});
}

/// Fills every parameter with its piece of values that are the same at any number of ranks, on the device of tests.
inline void fill_whole(torch::nn::Module& model, uint64_t seed = 1) {
  model.to(device_of_tests());
  for (auto& item : model.named_parameters()) {
    const at::Tensor whole = fixed(global_sizes(item.value()), seed++) * 0.5;
    if (reshard_and_view(item.value()).is_replicated()) {
      item.value().detach().copy_(whole);
    } else {
      assign_full_parameter(item.value(), whole);
    }
  }
}

/// Assembles the whole tensor from all ranks' pieces by their views. -inf if no piece covers a place. Collective.
inline at::Tensor assembled(const ShardedTensor& piece, ProcessGroup& world) {
  const at::Tensor whole = at::full(piece.global_sizes, -std::numeric_limits<double>::infinity(),
                                    piece.local.options().requires_grad(false));
  at::Tensor place = whole;
  for (int64_t dim = 0; dim < place.dim() && piece.local.numel() > 0; ++dim) {
    place = place.narrow(dim, piece.offsets[static_cast<size_t>(dim)], piece.local.size(dim));
  }
  if (piece.local.numel() > 0) place.copy_(piece.local.detach());
  world.all_reduce(whole, ReduceOp::kMax).wait();
  return whole;
}

/// Expects equal values up to the order of additions: a tensor-parallel layer adds over ranks in another order than the
/// whole layer.
inline void expect_near(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (actual.numel() == 0) return;
  const double tolerance = expected.scalar_type() == at::kDouble ? 1e-11 : 1e-5;
  const double largest = expected.abs().max().item<double>();
  const at::Tensor difference = actual - expected.to(actual.device());  // it may be offloaded
  EXPECT_LE(difference.abs().max().item<double>(), tolerance * std::max(largest, 0.1)) << what;
}

}  // namespace megashard::testing
