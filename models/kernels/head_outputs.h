#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// What a loss asks of a head for each token, [...].
struct HeadQuestion {
  at::Tensor labels;       ///< int64; kIgnoredLabel: loss 0
  bool entropies = false;  ///< of the distribution that the label is from
  at::Tensor chosen{};     ///< [K, ...] int64: tokens whose log-probabilities are wanted; undefined: none
};

struct HeadOutputs {
  at::Tensor losses{};     ///< [...] fp32, -log p(label)
  at::Tensor entropies{};  ///< [...] fp32; undefined: not asked for
  at::Tensor log_probs{};  ///< [K, ...] fp32; undefined: not asked for

  template <class F>
  void visit_tensors(F&& f) {
    f(losses);
    f(entropies);
    f(log_probs);
  }
};

/// The answers of the logits hidden weight^T, as linear_cross_entropy with the same arguments: at most `at_once` logits
/// exist at a time, which are computed again in backward. A second derivative is an error.
HeadOutputs linear_head_outputs(const at::Tensor& hidden, const at::Tensor& weight, const HeadQuestion& question,
                                const ProcessGroupPtr& ranks, std::optional<int64_t> at_once = {}, double softcap = 0);

}  // namespace megashard
