#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "parallel/collectives/process_group.h"
#include "parallel/device/device_plan.h"

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

/// The logits that linear_cross_entropy has at a time; GPUs multiply longer parts faster.
inline int64_t logits_at_once(c10::Device device) { return int64_t{1} << (acts_as_cpu(device) ? 27 : 28); }

/// That of the logits hidden weight^T; hidden [..., C], weight [V / ranks, C]. More than `at_once` logits (unset:
/// logits_at_once) are never there at a time: they are made for some tokens after the others. Gradients of 16-bit
/// weights are then rounded once for each of these parts.
/// `loss_weights` [...] fp32 are what the losses' gradient will be, bit for bit: gradients are then made in forward,
/// where a part's logits are. Undefined: a part's logits are made again in backward. Another gradient than that is an
/// error on a CPU, and gives NaN on a GPU.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                const ProcessGroupPtr& ranks, const at::Tensor& loss_weights = {},
                                std::optional<int64_t> at_once = {});

}  // namespace megashard
