#include "parallel/fsdp/detail/pass_through_node.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace megashard {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

class UnitNode final : public Node {
 public:
  UnitNode(const char* node_name, torch::autograd::edge_list next, std::function<void()> callback)
      : Node(std::move(next)), name_(node_name), callback_(std::move(callback)) {}

  variable_list apply(variable_list&& gradients) override {
    callback_();
    return std::move(gradients);
  }
  std::string name() const override { return name_; }

 private:
  const char* name_;
  std::function<void()> callback_;
};

}  // namespace

bool pass_through_node(const char* node_name, TensorRefs tensors, std::function<void()> callback) {
  c10::SmallVector<at::Tensor*, 8> differentiable;
  torch::autograd::edge_list edges;
  for (auto* tensor : tensors) {
    if (!tensor->defined() || !tensor->requires_grad()) continue;
    differentiable.push_back(tensor);
    edges.push_back(torch::autograd::impl::gradient_edge(*tensor));
  }
  if (differentiable.empty()) return false;
  const auto node = std::make_shared<UnitNode>(node_name, std::move(edges), std::move(callback));
  for (auto* tensor : differentiable) {
    at::Tensor alias = tensor->detach();
    torch::autograd::impl::set_gradient_edge(alias, {node, node->add_input_metadata(alias)});
    *tensor = std::move(alias);
  }
  return true;
}

}  // namespace megashard
