#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "framework/training/optimizers/optimizer.h"

namespace megashard {

/// A rule by which each element of a parameter changes on its own, in one fused kernel for many parameters. Casts
/// gradients to the stepped dtype bucket by bucket, so that few casts live at a time.
class ElementwiseRule : public UpdateRule {
 public:
  void step(const std::vector<const SteppedParameter*>& parameters, const ParamGroup& group,
            const StepContext& context) final;

 protected:
  /// Arguments of a fused kernel: lists of parameters, or of parts of parameters.
  struct KernelLists {
    std::vector<at::Tensor> parameters, gradients, steps;
    std::vector<std::vector<at::Tensor>> states;  ///< for each name of state_names()
  };
  /// The lists are not empty.
  virtual void run_kernel(const KernelLists& lists, const ParamGroup& group,
                          const std::optional<at::Tensor>& skip) const = 0;

 private:
  class Buckets;
};

}  // namespace megashard
