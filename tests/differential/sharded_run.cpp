#include "tests/differential/sharded_run.h"

#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>

#include "tests/differential/tree_model.h"
#include "tests/support/parity.h"

namespace megashard::testing {
namespace {

/// Of a tensor's largest value, where additions come in another order: a few units in the last
/// place of fp32, over two steps of SGD.
constexpr double kTolerance = 1e-6;

/// Empty if equal, else what is wrong.
std::string difference(const at::Tensor& on_device, const at::Tensor& expected, const at::Tensor& whole, bool exact) {
  const at::Tensor got = on_device.cpu();
  if (got.sizes() != expected.sizes()) return c10::str("sizes ", got.sizes(), " instead of ", expected.sizes());
  if (at::equal(got, expected)) return "";
  const double largest = whole.abs().max().item<double>();
  const double error = (got - expected).abs().max().item<double>() / std::max(largest, 1e-30);
  if (!exact && error <= kTolerance) return "";
  return c10::str("off by ", error, " of the largest value");
}

class TreeRun {
 public:
  TreeRun(const TreeSpec& tree, const ExpectedRun& expected, const DeviceMeshPtr& mesh, int rank)
      : tree_(tree), expected_(expected), rank_(rank) {
    uint64_t next_seed = 1;
    root_ = std::make_shared<TreeNode>(tree.root, tree, rank, next_seed);
    weights_ = tree_weights(*root_);
    shard_tree(*root_, mesh);
  }

  void run() {
    for (int step = 0; step < tree_.steps; ++step) {
      if (step > 0 && tree_.thaws) {
        for (const auto& weight : weights_) tensor(weight).requires_grad_(true);
      }
      for (int microbatch = 0; microbatch < tree_.microbatches; ++microbatch) run_microbatch(step, microbatch);
      compare(step);
    }
  }

 private:
  static at::Tensor& tensor(const TreeWeight& weight) { return weight.owner->weights[weight.index]; }

  void unshard_some(TreeNode& node) {
    if (node.node.unshard_before) unshard(node, /*async_op=*/true);
    for (auto& child : node.children_nodes) unshard_some(*child);
  }

  void run_microbatch(int step, int microbatch) {
    const Sync sync = sync_of(tree_, microbatch);
    set_requires_gradient_sync(*root_, sync.reduces);
    if (sync.reduces) set_requires_all_reduce(*root_, sync.all_reduces);
    if (step + microbatch > 0) unshard_some(*root_);
    const at::Tensor loss = tree_loss(root_->forward(tree_input(tree_, step, microbatch, rank_)));
    const float wanted = expected_.steps[step].losses[microbatch][rank_];
    TORCH_CHECK(loss.item<float>() == wanted || (!tree_.exact() && step > 0), "step ", step, " microbatch ", microbatch,
                ": loss ", loss.item<float>(), " instead of ", wanted);
    if (loss.requires_grad()) loss.backward();
  }

  void compare(int step) {
    const c10::NoGradGuard no_grad;
    const auto& expected = expected_.steps[step];
    for (size_t i = 0; i < weights_.size(); ++i) {
      const at::Tensor& parameter = tensor(weights_[i]);
      const ShardedTensor view = reshard_and_view(parameter);
      const auto where = c10::str("step ", step, ", ", weights_[i].path, ": ");
      const at::Tensor gradient = parameter.grad();
      TORCH_CHECK(gradient.defined() == expected.gradients[i].defined(), where, "gradient is ",
                  gradient.defined() ? "there" : "missing");
      if (gradient.defined()) {
        const auto wrong =
            difference(gradient, part_like(expected.gradients[i], parameter), expected.gradients[i], tree_.exact());
        TORCH_CHECK(wrong.empty(), where, "gradient ", wrong);
        view.local.sub_(gradient, kLearningRate);
        parameter.mutable_grad() = at::Tensor();
      }
      const auto wrong =
          difference(view.local, part_like(expected.weights[i], parameter), expected.weights[i], tree_.exact());
      TORCH_CHECK(wrong.empty(), where, "weight ", wrong);
    }
  }

  const TreeSpec& tree_;
  const ExpectedRun& expected_;
  int rank_;
  std::shared_ptr<TreeNode> root_;
  std::vector<TreeWeight> weights_;
};

}  // namespace

void run_sharded(const TreeSpec& tree, const ExpectedRun& expected, const DeviceMeshPtr& mesh, int rank) {
  TreeRun(tree, expected, mesh, rank).run();
}

}  // namespace megashard::testing
