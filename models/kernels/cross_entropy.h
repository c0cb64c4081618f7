#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "parallel/collectives/process_group.h"
#include "parallel/device/device_plan.h"

/// Differentiable cross-entropy of tokens in fp32; a second derivative is an error. labels [...] are int64 and must be
/// in [0, V) or kIgnoredLabel, for which loss and gradient are 0. Losses are [...] fp32. `ranks`, if not null and
/// larger than one: each rank has a shard of the vocabulary, V / ranks, and labels and losses are the same on all
/// (Megatron's vocab_parallel_cross_entropy). Then collective: one gather and one sum of a number per token.
namespace megashard {

constexpr int64_t kIgnoredLabel = -100;

struct TokenLosses {
  at::Tensor of_tokens;  ///< [...] fp32; without gradient if `weighted` is defined
  at::Tensor weighted;   ///< scalar: the sum of loss_weights * of_tokens; undefined: not computed

  template <class F>
  void visit_tensors(F&& f) {
    f(of_tokens);
    f(weighted);
  }
};

/// logits [..., V / ranks]. CONSUMES them: backward overwrites them by their gradient, so that only one copy exists.
/// They must not be read after backward, and backward runs once.
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                        const ProcessGroupPtr& ranks);
at::Tensor token_cross_entropy(const at::Tensor& logits, const at::Tensor& labels);

/// c tanh(x / c) for a softcap c; x for 0.
at::Tensor soft_capped(const at::Tensor& x, double softcap);

/// Maximum number of logits in memory in linear_cross_entropy; GPUs multiply larger parts faster.
inline int64_t logits_at_once(c10::Device device) { return int64_t{1} << (acts_as_cpu(device) ? 27 : 28); }

/// Cross-entropy of the logits hidden weight^T; hidden [..., C], weight [V / ranks, C]. At most `at_once` logits
/// (unset: logits_at_once) exist at a time: tokens are processed in parts. Gradients of 16-bit weights are then rounded
/// once per part. With `loss_weights` [...] fp32, gradients are computed in forward together with the logits, and
/// TokenLosses::weighted passes them on. Without, or if one part suffices, the logits are recomputed in backward.
/// `softcap`: caps the logits (soft_capped).
TokenLosses linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                 const ProcessGroupPtr& ranks, const at::Tensor& loss_weights = {},
                                 std::optional<int64_t> at_once = {}, double softcap = 0);

}  // namespace megashard
