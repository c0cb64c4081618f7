#include "framework/objectives/objectives.h"

#include <ATen/TensorOperators.h>

#include <string_view>

namespace megashard {
namespace {

/// Made at the first call, which may come before other static objects exist.
std::vector<ObjectiveKind>& registered() {
  static std::vector<ObjectiveKind> kinds;
  return kinds;
}

int64_t ignored_kinds = 0;

bool is_own(const ObjectiveStamp& stamp) {
  const ObjectiveStamp own;
  return stamp.version == own.version && std::string_view(stamp.libtorch) == own.libtorch &&
         stamp.inputs_bytes == own.inputs_bytes && stamp.batch_bytes == own.batch_bytes &&
         stamp.loss_bytes == own.loss_bytes;
}

}  // namespace

const std::vector<ObjectiveKind>& objectives() { return registered(); }

std::unique_ptr<Objective> make_objective(const std::string& name, const std::map<std::string, double>& options) {
  return make_of_kind(objectives(), "objective", name, options);
}

int64_t ignored_objectives() { return ignored_kinds; }

RegisterObjective::RegisterObjective(const ObjectiveKind& kind, const ObjectiveStamp& stamp) {
  if (is_own(stamp)) {
    add_kind(registered(), kind);
  } else {
    ++ignored_kinds;  // `kind` may have another layout
  }
}

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
