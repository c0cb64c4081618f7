#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>

#include "parallel/sequence_parallel/sequence_shard.h"

namespace megashard {

/// What a model worked out on the host from a batch; models derive theirs. Hooks pass it on and see
/// none of its tensors.
struct InputPlan {
  virtual ~InputPlan() = default;
};

/// One microbatch, from the data loader to the model: B samples of T tokens, shorter ones filled up
/// with token 0. Undefined tensors are absent. In every mask true, or 1, is what counts: transformers'
/// attention_mask, Megatron's loss_mask.
struct Batch {
  at::Tensor tokens{};          ///< [B, T] int64
  at::Tensor position_ids{};    ///< [B, T] int64, or [3, B, T] with M-RoPE; absent: the model's own
  at::Tensor labels{};          ///< [B, T] int64; absent: the model returns logits
  at::Tensor loss_mask{};       ///< [B, T] float32, 0 or 1: whose loss counts. For the trainer: models do not see it
  at::Tensor loss_weights{};    ///< [B, T] float32: the gradient that the losses will have, bit for bit; a model may
                                ///< begin backward with it (linear_cross_entropy). Absent: it is not known yet
  at::Tensor document_lengths{};  ///< [documents] int64, always in host memory: of those in the rows, one row behind
                                  ///< the other; a token sees none before its own; absent: each row is one
  at::Tensor token_mask{};        ///< [B, T] bool: false where a row was only filled up; absent: none was
  SequenceShard sequence{};       ///< sharded: the above are this rank's T rows of it, but document_lengths
  std::map<std::string, at::Tensor> extra{};  ///< further modalities by name (pixel_values, ...)
  std::shared_ptr<const InputPlan> plan{};    ///< of MultiModalModule::prepare

  /// Those that a model reads.
  template <class F>
  void visit_tensors(F&& f) {
    f(tokens);
    f(position_ids);
    f(labels);
    f(token_mask);
    f(extra);
  }
};

}  // namespace megashard
