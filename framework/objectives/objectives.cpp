#include "framework/objectives/objectives.h"

#include <ATen/TensorOperators.h>

#include <utility>

namespace megashard {
namespace {

/// Made at the first call, which may come before other static objects exist.
std::vector<ObjectiveKind>& registered() {
  static std::vector<ObjectiveKind> kinds;
  return kinds;
}

}  // namespace

const std::vector<ObjectiveKind>& objectives() { return registered(); }

std::unique_ptr<Objective> make_objective(const std::string& name, const std::map<std::string, double>& options) {
  return make_of_kind(objectives(), "objective", name, options);
}

RegisterObjective::RegisterObjective(ObjectiveKind kind) { add_kind(registered(), std::move(kind)); }

namespace {

/// The mean loss of the tokens whose loss_mask is 1 (Megatron's loss_func in pretrain_gpt.py).
class NextToken final : public Objective {
 public:
  std::vector<std::string> columns() const override { return {kLossMask}; }
  at::Tensor count(const Batch& whole) const override { return whole.at(kLossMask).sum(); }
  at::Tensor weights(const Batch& whole) const override { return whole.at(kLossMask); }

  Loss operator()(const LossInputs& in) const override {
    const at::Tensor& mask = in.batch.at(kLossMask);
    const at::Tensor sum = (in.token_losses * mask).sum();
    return {.sum = sum,
            .metrics = {{.name = "lm loss", .sum = sum.detach().to(at::kDouble), .count = mask.sum().to(at::kDouble)}}};
  }
};

const RegisterObjective kRegisteredNextToken({.name = kNextToken, .make = [](const std::vector<double>&) {
                                                return std::make_unique<NextToken>();
                                              }});

}  // namespace

}  // namespace megashard
