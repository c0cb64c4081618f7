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
/// with token 0. Undefined tensors are absent. In every mask true, or 1, is what counts: the mask of
/// PyTorch's scaled_dot_product_attention, transformers' attention_mask, Megatron's loss_mask.
struct Batch {
  at::Tensor tokens{};          ///< [B, T] int64
  at::Tensor position_ids{};    ///< [B, T] int64, or [3, B, T] with M-RoPE; absent: the model's own
  at::Tensor labels{};          ///< [B, T] int64; absent: the model returns logits
  at::Tensor loss_mask{};       ///< [B, T] float32, 0 or 1: whose loss counts. For the trainer: models do not see it
  at::Tensor attention_mask{};  ///< [B, 1, T, T] bool: which tokens (dim 2) see which (dim 3), none behind them;
                                ///< absent: causal
  at::Tensor token_mask{};      ///< [B, T] bool: false where a row was only filled up; absent: none was
  SequenceShard sequence{};     ///< sharded: the above are this rank's T rows of it, but attention_mask, which is that
                                ///< of the whole sequence, or in a ring has the rows of this rank's place
  std::map<std::string, at::Tensor> extra{};  ///< further modalities by name (pixel_values, ...)
  std::shared_ptr<const InputPlan> plan{};    ///< of MultiModalModule::prepare

  /// Those that a model reads.
  template <class F>
  void visit_tensors(F&& f) {
    f(tokens);
    f(position_ids);
    f(labels);
    f(attention_mask);
    f(token_mask);
    f(extra);
  }
};

}  // namespace megashard
