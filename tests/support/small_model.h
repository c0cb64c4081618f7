#pragma once

#include <ATen/ops/gelu.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <memory>
#include <vector>

#include "parallel/fsdp/fully_shard.h"

namespace megashard::testing {

/// x + down(gelu(up(norm(x)))) with `hidden` channels in between. Some tests choose uneven sizes on purpose.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t hidden)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, hidden))),
        down(register_module("down", torch::nn::Linear(hidden, width))) {}
  at::Tensor forward(at::Tensor x) { return x + down(at::gelu(up(norm(x)))); }

  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};

/// `depth` blocks and a head. The blocks are Hooked<BlockImpl>, so that each can be a unit.
struct StackImpl : torch::nn::Module {
  StackImpl(int depth, int64_t width, int64_t hidden) {
    torch::nn::ModuleList list;
    for (int i = 0; i < depth; ++i) {
      blocks.push_back(std::make_shared<Hooked<BlockImpl>>(width, hidden));
      list->push_back(blocks.back());
    }
    register_module("blocks", list);
    head = register_module("head", torch::nn::Linear(width, 3));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block->forward(x);
    return head(x);
  }

  std::vector<std::shared_ptr<Hooked<BlockImpl>>> blocks;
  torch::nn::Linear head{nullptr};
};
using Stack = Hooked<StackImpl>;

/// Calls fully_shard on every block, then on the root.
inline void shard_stack(Stack& model, const FullyShardOptions& options) {
  for (auto& block : model.blocks) fully_shard(*block, options);
  fully_shard(model, options);
}

}  // namespace megashard::testing
