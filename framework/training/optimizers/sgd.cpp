#include <ATen/ops/_fused_sgd.h>

#include "framework/training/optimizers/elementwise_rule.h"
#include "framework/training/optimizers/rules.h"

namespace megashard {
namespace {

/// torch.optim.SGD: weight decay joins the gradient; the momentum buffer starts as the first gradient, which is what a
/// buffer of zeros gives.
class Sgd final : public ElementwiseRule {
 public:
  explicit Sgd(double momentum) : momentum_(momentum) {}

  std::vector<std::string> state_names() const override {
    return momentum_ == 0 ? std::vector<std::string>() : std::vector<std::string>{kMomentumBuffer};
  }

  void describe(const ParamGroup& /*group*/, Dict& entry) const override {
    entry.set("momentum", momentum_);
    entry.set("dampening", 0);
    entry.set("nesterov", false);
    set_common_keys(entry);
  }

 protected:
  void run_kernel(const KernelLists& lists, const ParamGroup& group,
                  const std::optional<at::Tensor>& skip) const override {
    at::_fused_sgd_(lists.parameters, lists.gradients, momentum_ == 0 ? at::TensorList() : lists.states[0],
                    group.weight_decay, momentum_, group.lr, /*dampening=*/0.0, /*nesterov=*/false, /*maximize=*/false,
                    /*is_first_step=*/false, /*grad_scale=*/{}, /*found_inf=*/skip);
  }

 private:
  double momentum_;
};

}  // namespace

std::unique_ptr<UpdateRule> make_sgd(const OptimizerOptions& options) {
  return std::make_unique<Sgd>(options.momentum);
}

}  // namespace megashard
