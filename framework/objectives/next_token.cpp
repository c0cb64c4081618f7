#include <ATen/TensorOperators.h>

#include "framework/objectives/objectives.h"

namespace megashard {
namespace {

/// The mean loss of the tokens whose loss_mask is 1 (Megatron's loss_func in pretrain_gpt.py).
class NextToken final : public Objective {
 public:
  std::vector<std::string> columns() const override { return {kLossMask}; }
  at::Tensor count(const Batch& whole) const override { return whole.at(kLossMask).sum(); }
  at::Tensor weights(const Batch& whole) const override { return whole.at(kLossMask); }

  Loss operator()(const at::Tensor& token_losses, const Batch& batch) const override {
    const at::Tensor& mask = batch.at(kLossMask);
    const at::Tensor sum = (token_losses * mask).sum();
    return {.sum = sum,
            .metrics = {{.name = "lm loss", .sum = sum.detach().to(at::kDouble), .count = mask.sum().to(at::kDouble)}}};
  }
};

const RegisterObjective kRegisteredNextToken({.name = kNextToken, .make = [](const std::vector<double>&) {
                                                return std::make_unique<NextToken>();
                                              }});

}  // namespace
}  // namespace megashard
