#include <ATen/ops/_fused_adamw.h>

#include "checkpoint/values/state_dict_keys.h"
#include "framework/training/optimizers/elementwise_rule.h"
#include "framework/training/optimizers/rules.h"

namespace megashard {
namespace {

class AdamW final : public ElementwiseRule {
 public:
  explicit AdamW(double eps) : eps_(eps) {}

  std::vector<std::string> state_names() const override { return {kExpAvgBuffer, "exp_avg_sq"}; }
  bool counts_steps() const override { return true; }

  void describe(const ParamGroup& group, Dict& entry) const override {
    entry.set("betas", Tuple{{group.beta1, group.beta2}});
    entry.set("eps", eps_);
    entry.set("amsgrad", false);
    entry.set("capturable", false);
    entry.set("decoupled_weight_decay", true);
    set_common_keys(entry);
  }

 protected:
  void run_kernel(const KernelLists& lists, const ParamGroup& group,
                  const std::optional<at::Tensor>& skip) const override {
    at::_fused_adamw_(lists.parameters, lists.gradients, lists.states[0], lists.states[1],
                      /*max_exp_avg_sqs=*/{}, lists.steps, group.lr, group.beta1, group.beta2, group.weight_decay, eps_,
                      /*amsgrad=*/false, /*maximize=*/false, /*grad_scale=*/{}, /*found_inf=*/skip);
  }

 private:
  double eps_;
};

}  // namespace

std::unique_ptr<UpdateRule> make_adamw(const OptimizerOptions& options) { return std::make_unique<AdamW>(options.eps); }

}  // namespace megashard
