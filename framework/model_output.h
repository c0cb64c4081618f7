#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace megashard {

/// A term that a model adds to the loss besides that of the tokens: a router's balance.
struct AuxTerm {
  std::string name;   ///< of its metric: "load_balancing_loss"
  at::Tensor value;   ///< scalar fp32 with its coefficient; its gradient is that of the mean over the tokens
  at::Tensor metric;  ///< scalar without gradient: what the log shows
};

/// What a model returns for a Batch. Undefined tensors are absent.
struct ModelOutput {
  at::Tensor logits{};        ///< [B, T, V]; without labels
  at::Tensor token_losses{};  ///< [B, T] fp32, -log p(label); with labels
  /// Scalar: the sum of loss_weights * token_losses, where the batch has that column and the model makes the head's
  /// gradients in forward; token_losses have no gradient then. A model need not: the trainer takes the sum itself.
  at::Tensor weighted_loss{};
  std::vector<AuxTerm> aux{};

  template <class F>
  void visit_tensors(F&& f) {
    f(logits);
    f(token_losses);
    f(weighted_loss);
    for (AuxTerm& term : aux) f(term.value);
  }
};

}  // namespace megashard
