#pragma once

#include <ATen/core/Tensor.h>

#include "parallel/collectives/process_group.h"

/// Differentiable cross-entropy of tokens in fp32, once: a second derivative is an error. labels [...] are int64, and
/// an error outside [0, V) unless kIgnoredLabel, where loss and gradient are 0. Losses are [...] fp32. `ranks`, null or
/// of one rank: none; else each of them has a piece of the vocabulary, V / ranks, and labels and losses are the same on
/// all (Megatron's vocab_parallel_cross_entropy). Collective then: one gather and one sum of a number a token.
namespace megashard {

constexpr int64_t kIgnoredLabel = -100;

/// logits [..., V / ranks]. CONSUMES them: backward overwrites them by their gradient, so that one copy of them is all
/// that ever exists; they must not be read after backward, and backward runs once.
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                        const ProcessGroupPtr& ranks);
at::Tensor token_cross_entropy(const at::Tensor& logits, const at::Tensor& labels);

/// The logits of so many tokens that linear_cross_entropy has at a time.
constexpr int64_t kLogitsAtOnce = int64_t{1} << 27;

/// That of the logits hidden weight^T; hidden [..., C], weight [V / ranks, C]. More than `at_once` logits are never
/// there at a time: they are made for some tokens after the others, and again in backward. Gradients of 16-bit weights
/// are then rounded once for each of these parts.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                const ProcessGroupPtr& ranks, int64_t at_once = kLogitsAtOnce);

}  // namespace megashard
