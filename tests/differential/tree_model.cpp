#include "tests/differential/tree_model.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/tanh.h>

#include <unordered_set>

#include "framework/recompute/recompute.h"
#include "tests/support/formula.h"

namespace megashard::testing {

TreeNodeImpl::TreeNodeImpl(const NodeSpec& spec, const TreeSpec& whole, int own_rank, uint64_t& next_seed)
    : node(spec), tree(whole), rank(own_rank) {
  using Kind = LayerSpec::Kind;
  const int64_t width = tree.width;
  for (size_t i = 0; i < node.layers.size(); ++i) {
    const LayerSpec& layer = node.layers[i];
    auto add = [&](const char* name, at::IntArrayRef sizes) {
      const at::Tensor values = fixed(sizes, tree.seed * 1000 + next_seed++) * 0.4;
      const bool tied = layer.tied && std::string(name) == "w";
      const auto full = "l" + std::to_string(i) + "_" + name;
      weights.push_back(
          register_parameter(full, tied ? weights[0] : values, tied ? weights[0].requires_grad() : !layer.frozen));
      weight_names.push_back(full);
      weight_layers.push_back(tied ? &node.layers[0] : &layer);
    };
    if (layer.kind == Kind::kLinear) add("w", {width, width});
    if (layer.kind == Kind::kLinear && layer.bias) add("b", {width});
    if (layer.kind == Kind::kMlp) {
      add("up", {layer.hidden, width});
      add("down", {width, layer.hidden});
    }
    if (layer.kind == Kind::kScale) add("s", {width});
    if (layer.kind == Kind::kRow) add("r", {1, width});
  }
  for (size_t i = 0; i < node.children.size(); ++i) {
    children_nodes.push_back(
        register_module("c" + std::to_string(i), std::make_shared<TreeNode>(node.children[i], tree, rank, next_seed)));
  }
}

at::Tensor TreeNodeImpl::forward(at::Tensor x) {
  using Kind = LayerSpec::Kind;
  if (casts_like_units && node.unit && tree.mixed) x = x.to(compute_dtype(node));
  size_t next = 0;
  for (const LayerSpec& layer : node.layers) {
    const size_t first = next;
    next += layer.kind == Kind::kMlp || layer.bias ? 2 : 1;
    if (layer.skipped_on_rank == rank) continue;
    const at::Tensor& w = weights[first];
    switch (layer.kind) {
      case Kind::kLinear:
        x = x + at::linear(x, w, layer.bias ? weights[first + 1] : at::Tensor());
        break;
      case Kind::kMlp:
        x = x + at::linear(at::tanh(at::linear(x, w)), weights[first + 1]);
        break;
      case Kind::kScale:
        x = x * w;
        break;
      case Kind::kRow:
        x = x + w;
        break;
    }
  }
  for (auto& child : children_nodes) {
    for (int call = 0; call < child->node.calls; ++call) x = child->forward(x);
  }
  x = at::tanh(x);
  return casts_like_units && node.unit && tree.mixed ? x.to(parent_dtype) : x;
}

namespace {

void collect_weights(TreeNodeImpl& at, const std::string& path, const NodeSpec* unit,
                     std::unordered_set<const c10::TensorImpl*>& seen, std::vector<TreeWeight>& all) {
  if (at.node.unit) unit = &at.node;
  for (size_t i = 0; i < at.weights.size(); ++i) {
    if (!seen.insert(at.weights[i].unsafeGetTensorImpl()).second) continue;
    all.push_back({&at, i, path + at.weight_names[i], unit, at.weight_layers[i], compute_dtype(*unit)});
  }
  for (size_t i = 0; i < at.children_nodes.size(); ++i)
    collect_weights(*at.children_nodes[i], path + "c" + std::to_string(i) + ".", unit, seen, all);
}

void collect_units(TreeNode& at, std::vector<torch::nn::Module*>& units) {
  if (at.node.unit) units.push_back(&at);
  for (auto& child : at.children_nodes) collect_units(*child, units);
}

FullyShardOptions options_of(const NodeSpec& node, const TreeSpec& tree, at::ScalarType outer,
                             const DeviceMeshPtr& mesh) {
  FullyShardOptions options{.mesh = mesh};
  if (node.reshard == 0 || node.reshard == 1) options.reshard_after_forward = node.reshard == 1;
  if (node.reshard > 1) options.reshard_after_forward = ReshardAfterForward::to(node.reshard);
  if (tree.mixed) {
    options.mixed_precision.param_dtype = compute_dtype(node);
    options.mixed_precision.reduce_dtype = node.reduces_half ? at::kBFloat16 : at::kFloat;
    options.mixed_precision.output_dtype = outer;
  }
  if (tree.offload) options.cpu_offload = CpuOffloadPolicy{};
  const int64_t ranks = mesh->size(mesh->ndim() - 1);
  if (node.shard_dim > 0) {
    options.shard_placement_fn = [ranks](const at::Tensor& parameter) {
      return ShardPlacement{.dim = parameter.dim() > 1 && parameter.size(1) % ranks == 0 ? 1 : 0};
    };
  }
  return options;
}

void shard_bottom_up(TreeNode& at, at::ScalarType outer, const DeviceMeshPtr& mesh, bool joined) {
  const auto own = at.node.unit ? compute_dtype(at.node) : outer;
  auto& children = at.children_nodes;
  for (size_t i = 0; i < children.size(); ++i) {
    const bool first = children[i]->node.joined;
    const bool second = i > 0 && children[i - 1]->node.joined;
    shard_bottom_up(*children[i], own, mesh, first || second);
    if (!second) continue;
    torch::nn::Module* const both[] = {children[i - 1].get(), children[i].get()};
    fully_shard(both, options_of(children[i - 1]->node, at.tree, own, mesh));
  }
  if (at.node.recompute != 0) recompute(at, {.use_reentrant = at.node.recompute == 2, .preserve_rng_state = false});
  if (at.node.unit && !joined) fully_shard(at, options_of(at.node, at.tree, outer, mesh));
}

void set_controls(TreeNode& at, const std::vector<torch::nn::Module*>& units, bool second_of_two) {
  auto chosen = [&](const std::vector<int>& numbers) {
    std::vector<torch::nn::Module*> modules;
    for (const int number : numbers) modules.push_back(units[static_cast<size_t>(number)]);
    return modules;
  };
  if (at.node.unit && !second_of_two) {
    set_modules_to_forward_prefetch(at, chosen(at.node.forward_prefetch));
    set_modules_to_backward_prefetch(at, chosen(at.node.backward_prefetch));
    if (at.node.force_sum) set_force_sum_reduction(at, true);
    if (at.node.keeps_after_backward) set_reshard_after_backward(at, false, /*recurse=*/false);
  }
  auto& children = at.children_nodes;
  for (size_t i = 0; i < children.size(); ++i) set_controls(*children[i], units, i > 0 && children[i - 1]->node.joined);
}

}  // namespace

std::vector<TreeWeight> tree_weights(TreeNodeImpl& root) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::vector<TreeWeight> all;
  collect_weights(root, "", &root.node, seen, all);
  return all;
}

void shard_tree(TreeNode& root, const DeviceMeshPtr& mesh) {
  shard_bottom_up(root, at::kFloat, mesh, /*joined=*/false);
  std::vector<torch::nn::Module*> units;
  collect_units(root, units);
  set_controls(root, units, /*second_of_two=*/false);
  set_reduce_scatter_max_input_buffers(root, root.tree.reductions_in_flight);
}

at::Tensor tree_input(const TreeSpec& tree, int step, int microbatch, int rank) {
  const uint64_t seed = tree.seed * 1000 + 500 + static_cast<uint64_t>((step * 8 + microbatch) * 8 + rank);
  return fixed({2, tree.width}, seed).requires_grad_(tree.input_requires_grad);
}

at::Tensor tree_loss(const at::Tensor& output) { return output.pow(2).sum(); }

}  // namespace megashard::testing
