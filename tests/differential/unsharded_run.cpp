#include "tests/differential/unsharded_run.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "parallel/collectives/rank_order_reduce.h"
#include "tests/differential/tree_model.h"

namespace megashard::testing {
namespace {

/// The same weights as `tree`'s model for one rank, computing in the units' dtypes.
class RankModel {
 public:
  RankModel(const TreeSpec& tree, int rank) {
    uint64_t next_seed = 1;
    root_ = std::make_shared<TreeNode>(tree.root, tree, rank, next_seed);
    weights = tree_weights(*root_);
    set_parent_dtypes(*root_, at::kFloat);
  }

  /// Gives every use of a weight one fresh leaf in the compute dtype.
  void set_weights(const std::vector<at::Tensor>& values, const std::vector<bool>& trainable) {
    for (size_t i = 0; i < weights.size(); ++i) {
      const at::Tensor old = leaves.empty() ? weights[i].owner->weights[weights[i].index] : leaves[i];
      const at::Tensor leaf =
          values[i].to(weights[i].dtype, /*non_blocking=*/false, /*copy=*/true).requires_grad_(trainable[i]);
      for (auto& use : weights[i].owner->weights) {
        if (use.is_same(old)) use = leaf;
      }
      fresh_.push_back(leaf);
    }
    leaves = std::move(fresh_);
    fresh_.clear();
  }

  at::Tensor forward(const at::Tensor& x) { return root_->forward(x); }

  std::vector<TreeWeight> weights;
  std::vector<at::Tensor> leaves;

 private:
  static void set_parent_dtypes(TreeNode& at, at::ScalarType outer) {
    at.casts_like_units = true;
    at.parent_dtype = outer;
    const auto own = at.node.unit ? compute_dtype(at.node) : outer;
    for (auto& child : at.children_nodes) set_parent_dtypes(*child, own);
  }

  std::shared_ptr<TreeNode> root_;
  std::vector<at::Tensor> fresh_;
};

at::Tensor reduced(const std::vector<at::Tensor>& sources, ReduceOp op) {
  at::Tensor out = at::zeros_like(sources[0]);
  std::vector<const void*> pointers;
  for (const auto& source : sources) pointers.push_back(source.const_data_ptr());
  reduce_in_rank_order(out.data_ptr(), pointers, out.numel(), {out.scalar_type(), out.scalar_type()}, op);
  return out;
}

/// Gradients of one weight on their way to the optimizer.
struct Pending {
  std::vector<at::Tensor> unreduced;  // by rank, in the reduce dtype
  std::vector<at::Tensor> partial;    // by replica, summed over its shard ranks
  bool any_unreduced = false, any_partial = false;
};

}  // namespace

Sync sync_of(const TreeSpec& tree, int microbatch) {
  const bool last = microbatch + 1 == tree.microbatches;
  switch (tree.accumulation) {
    case Accumulation::kAlwaysSync:
      return {true, true};
    case Accumulation::kSyncLast:
      return {last, last};
    case Accumulation::kAllReduceLast:
      return {true, last};
  }
  return {};
}

ExpectedRun run_unsharded(const TreeSpec& tree) {
  std::vector<std::unique_ptr<RankModel>> ranks;
  for (int rank = 0; rank < tree.world; ++rank) ranks.push_back(std::make_unique<RankModel>(tree, rank));
  const auto& weights = ranks[0]->weights;
  ExpectedRun run;
  std::vector<at::Tensor> values;
  for (const auto& weight : weights) {
    run.names.push_back(weight.path);
    values.push_back(weight.owner->weights[weight.index].detach().clone());
  }
  run.initial = values;
  const int shards = tree.world / tree.replicas;
  for (int step = 0; step < tree.steps; ++step) {
    ExpectedStep expected;
    std::vector<bool> trainable;
    for (const auto& weight : weights) trainable.push_back(!weight.layer->frozen || (tree.thaws && step > 0));
    std::vector<Pending> pending(weights.size());
    std::vector<at::Tensor> gradients(weights.size());
    for (int microbatch = 0; microbatch < tree.microbatches; ++microbatch) {
      const Sync sync = sync_of(tree, microbatch);
      expected.losses.emplace_back();
      for (int rank = 0; rank < tree.world; ++rank) {
        ranks[rank]->set_weights(values, trainable);
        const at::Tensor input = tree_input(tree, step, microbatch, rank);
        run.inputs.push_back(input.detach());
        const auto loss = tree_loss(ranks[rank]->forward(input));
        expected.losses.back().push_back(loss.item<float>());
        if (loss.requires_grad()) loss.backward();
      }
      const c10::NoGradGuard no_grad;
      for (size_t i = 0; i < weights.size(); ++i) {
        if (!trainable[i]) continue;
        const auto reduce_dtype = weights[i].unit->reduces_half ? at::kBFloat16 : at::kFloat;
        Pending& waits = pending[i];
        waits.unreduced.resize(tree.world);
        for (int rank = 0; rank < tree.world; ++rank) {
          const at::Tensor gradient = ranks[rank]->leaves[i].grad();
          if (!gradient.defined()) continue;
          waits.any_unreduced = true;
          at::Tensor& sum = waits.unreduced[rank];
          sum = sum.defined() ? sum.add_(gradient) : gradient.to(reduce_dtype, false, true);
        }
        if (!sync.reduces || !waits.any_unreduced) continue;
        for (auto& each : waits.unreduced) {
          if (!each.defined()) each = at::zeros(values[i].sizes(), at::dtype(reduce_dtype));
        }
        const bool sums = weights[i].unit->force_sum || tree.world == 1;
        const auto op = sums ? ReduceOp::kSum : ReduceOp::kAvg;
        std::vector<at::Tensor> by_replica;
        for (int replica = 0; replica < tree.replicas; ++replica) {
          const auto first = waits.unreduced.begin() + replica * shards;
          const std::vector<at::Tensor> sources(first, first + shards);
          by_replica.push_back(shards == 1 ? sources[0].clone() : reduced(sources, op));
          if (waits.any_partial) by_replica.back().add_(waits.partial[replica]);
        }
        waits = {};
        if (tree.replicas > 1 && !sync.all_reduces) {
          waits.partial = std::move(by_replica);
          waits.any_partial = true;
          continue;
        }
        at::Tensor result = tree.replicas > 1 ? reduced(by_replica, op) : by_replica[0];
        if (sums && tree.world > 1) result.div_(static_cast<double>(tree.world));
        result = result.to(at::kFloat);
        gradients[i] = gradients[i].defined() ? gradients[i] + result : result;
      }
    }
    for (size_t i = 0; i < weights.size(); ++i) {
      if (gradients[i].defined()) values[i] = values[i].sub(gradients[i], kLearningRate);
    }
    expected.gradients = gradients;
    expected.weights = values;
    run.steps.push_back(std::move(expected));
  }
  return run;
}

}  // namespace megashard::testing
