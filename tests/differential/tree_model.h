#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parallel/fsdp/fully_shard.h"
#include "tests/differential/tree_spec.h"

namespace megashard::testing {

/// A module of a random tree. The same code runs sharded, and unsharded with weights that the
/// caller sets.
struct TreeNodeImpl : torch::nn::Module {
  TreeNodeImpl(const NodeSpec& node, const TreeSpec& tree, int rank, uint64_t& next_seed);
  at::Tensor forward(at::Tensor x);
  std::string class_name() const { return "TreeNode"; }

  const NodeSpec& node;
  const TreeSpec& tree;
  int rank;
  std::vector<at::Tensor> weights;        // in the order in which the layers use them
  std::vector<std::string> weight_names;  // a tied weight has two
  std::vector<const LayerSpec*> weight_layers;
  std::vector<std::shared_ptr<Hooked<TreeNodeImpl>>> children_nodes;
  /// Casts as the policies of fully_shard do, for the unsharded run.
  bool casts_like_units = false;
  at::ScalarType parent_dtype = at::kFloat;
};
using TreeNode = Hooked<TreeNodeImpl>;

/// dtype in which a node's own parameters compute.
inline at::ScalarType compute_dtype(const NodeSpec& unit) { return unit.half ? at::kBFloat16 : at::kFloat; }

/// One weight of the tree, and the unit whose group it is in.
struct TreeWeight {
  TreeNodeImpl* owner;
  size_t index;
  std::string path;
  const NodeSpec* unit;
  const LayerSpec* layer;
  at::ScalarType dtype;  // of compute
};
/// Every weight once, in pre-order.
std::vector<TreeWeight> tree_weights(TreeNodeImpl& root);

/// fully_shard, recompute and the run-time controls as the spec says; bottom-up.
void shard_tree(TreeNode& root, const DeviceMeshPtr& mesh);

/// A microbatch's input and the loss of the output, the same everywhere for a seed.
at::Tensor tree_input(const TreeSpec& tree, int step, int microbatch, int rank);
at::Tensor tree_loss(const at::Tensor& output);

}  // namespace megashard::testing
