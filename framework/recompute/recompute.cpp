#include "framework/recompute/recompute.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "framework/recompute/recompute_frame.h"
#include "parallel/device/torch_versions.h"
#include "parallel/fsdp/recompute_scope.h"

namespace megashard {
namespace {

using detail::KeptOutputs;
using detail::RecomputeFrame;
using detail::RepeatableCall;
using torch::autograd::Engine;
using torch::autograd::variable_list;

/// A reentrant call in the graph: its backward repeats forward with grad, then runs backward through it.
class ReentrantCall final : public torch::autograd::Node {
 public:
  ReentrantCall(RepeatableCall call, const std::vector<at::Tensor>& inputs)
      : Node(torch::autograd::collect_next_edges(inputs)), call_(std::move(call)) {}

  std::string name() const override { return "RecomputeBackward"; }
  void release_variables() override { call_.reset(); }

 protected:
  variable_list apply(variable_list&& gradients) override {
    TORCH_CHECK(call_.has_value(), torch::autograd::ERR_BACKWARD_TWICE);
    TORCH_CHECK(Engine::get_default_engine().is_checkpoint_valid() && !at::GradMode::is_enabled(), "recompute of ",
                call_->module(),
                " with use_reentrant serves loss.backward() only, not autograd::grad, backward with inputs or "
                "create_graph; set use_reentrant to false");
    const auto inputs = call_->detached_inputs();
    RecomputeScope scope;
    torch::autograd::edge_list roots;
    variable_list root_gradients;
    {
      const CallState::Replayed replayed(call_->state());
      const auto outputs = call_->body()(inputs);
      TORCH_CHECK(outputs.size() == gradients.size(), "recompute of ", call_->module(), ": forward returned ",
                  gradients.size(), " tensors, and ", outputs.size(), " when computed again");
      for (size_t i = 0; i < outputs.size(); ++i) {
        if (!gradients[i].defined() || !outputs[i].defined() || !outputs[i].requires_grad()) continue;
        roots.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
        root_gradients.push_back(std::move(gradients[i]));
      }
    }
    scope.run_callbacks();
    if (!roots.empty()) {
      Engine::get_default_engine().execute(roots, root_gradients, /*keep_graph=*/false,
                                           /*create_graph=*/false,
                                           /*accumulate_grad=*/true, /*outputs=*/{});
    }
    variable_list input_gradients;
    for (const auto& input : inputs) input_gradients.push_back(input.defined() ? input.grad() : at::Tensor());
    return input_gradients;
  }

 private:
  std::optional<RepeatableCall> call_;
};

class RecomputeRunner final : public ForwardRunner {
 public:
  RecomputeRunner(HookedModule& module, RecomputeOptions options)
      : hooked_(module), module_(dynamic_cast<torch::nn::Module*>(&module)), options_(std::move(options)) {
    if (options_.save_outputs_of.empty()) return;
    kept_operators_ = std::make_shared<const detail::OperatorList>(detail::operators_named(options_.save_outputs_of));
  }

  std::vector<at::Tensor> run(const Body& body, const std::vector<at::Tensor>& inputs) override {
    if (!at::GradMode::is_enabled()) return body(inputs);
    return options_.use_reentrant ? run_reentrant(body, inputs) : run_hooked(body, inputs);
  }

 private:
  RepeatableCall repeatable(const Body& body, const std::vector<at::Tensor>& inputs) const {
    std::shared_ptr<void> owner = module_ == nullptr ? nullptr : module_->weak_from_this().lock();
    return {hooked_.class_name(), std::move(owner), body, inputs, options_};
  }

  std::vector<at::Tensor> run_hooked(const Body& body, const std::vector<at::Tensor>& inputs) const {
    std::unique_ptr<KeptOutputs> kept;
    if (kept_operators_ != nullptr) {
      kept = std::make_unique<KeptOutputs>(hooked_.class_name(), kept_operators_, options_.preserve_rng_state);
    }
    const auto frame = std::make_shared<RecomputeFrame>(repeatable(body, inputs), options_.early_stop, std::move(kept));
    const SavedTensorHooks hooks(frame.get());
    const KeptOutputs::Run keeping(frame->kept(), KeptOutputs::Run::Kind::kFirst);
    return body(inputs);
  }

  std::vector<at::Tensor> run_reentrant(const Body& body, const std::vector<at::Tensor>& inputs) const {
    if (!needs_backward(inputs)) return body(inputs);
    const auto node = make_node<ReentrantCall>(repeatable(body, inputs), inputs);
    std::vector<at::Tensor> detached;
    for (const auto& input : inputs) detached.push_back(input.defined() ? input.detach() : input);
    std::vector<at::Tensor> outputs;
    {
      const at::NoGradGuard no_grad;
      const ForwardToRepeat repeated_with_grad;
      outputs = body(detached);
      for (auto& output : outputs) {
        if (output.defined()) output = output.detach();  // an input that is returned stays the caller's tensor
      }
    }
    for (auto& output : outputs) {
      if (output.defined() && torch::autograd::isDifferentiableType(output.scalar_type())) {
        torch::autograd::set_history(output, node);
      } else {
        node->add_input_metadata(torch::autograd::Node::undefined_input());
      }
    }
    return outputs;
  }

  /// Unlike PyTorch, parameters get gradients even if no input requires grad.
  bool needs_backward(const std::vector<at::Tensor>& inputs) const {
    const auto requires_grad = [](const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); };
    if (std::any_of(inputs.begin(), inputs.end(), requires_grad) || module_ == nullptr) return true;
    const auto parameters = module_->parameters();
    return std::any_of(parameters.begin(), parameters.end(), requires_grad);
  }

  HookedModule& hooked_;
  torch::nn::Module* module_;
  RecomputeOptions options_;
  std::shared_ptr<const detail::OperatorList> kept_operators_;
};

}  // namespace

void recompute(HookedModule& module, const RecomputeOptions& options) {
  TORCH_CHECK(module.forward_runner() == nullptr, module.class_name(),
              " recomputes already, or offloads its activations: a path pattern matches it twice, or recompute was "
              "called twice, or after ActivationOffload::add, which comes last");
  TORCH_CHECK(!options.use_reentrant || options.save_outputs_of.empty(), "recompute of ", module.class_name(),
              ": outputs of operators can be saved by non-reentrant recompute only; set use_reentrant to false");
  module.set_forward_runner(std::make_shared<RecomputeRunner>(module, options));
}

}  // namespace megashard
