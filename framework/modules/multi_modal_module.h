#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "framework/batch.h"
#include "framework/modules/megatron_module.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// Base of a trainable model (mindspeed_mm.models.common.MultiModalModule):
///   class MyModel : public MultiModalModule, public FSDP2Mixin, public WeightInitMixin
/// Callers use operator(), which runs the hooks of fully_shard and recompute; models implement
/// forward.
class MultiModalModule : public MegatronModule, public HookedModule {
 public:
  using MegatronModule::MegatronModule;

  /// token_losses of a batch with labels, logits of one without.
  virtual ModelOutput forward(Batch input) = 0;
  ModelOutput operator()(Batch input) {
    return run_hooked([this](Batch& each) { return forward(each); }, prepared(std::move(input)));
  }

  /// Computes what needs values on the host (position ids, places of images); sets Batch::plan. Called once per batch.
  virtual void prepare(Batch& /*input*/) const {}
  /// The batch after prepare(). Call it while the batch is on the host and holds whole sequences: on a device, reading
  /// values blocks the host. operator() calls it for a batch that is not prepared.
  Batch prepared(Batch input) const {
    if (!input.is_prepared) prepare(input);
    input.is_prepared = true;
    return input;
  }

  /// Tokens are from [0, vocab_size()); 0: the model takes no tokens.
  virtual int64_t vocab_size() const { return 0; }
  /// Unset: the model takes tokens.
  virtual std::optional<LatentPatches> latent_patches() const { return std::nullopt; }
  /// Throws where forward cannot take a sequence whose rows are spread over so many ranks that share
  /// out its heads (Ulysses); the default cannot (Batch::sequence).
  virtual void check_sequence_ranks(int64_t ranks) const;
  /// Throws where it cannot take one in a ring; the default cannot (SequenceShard::ring).
  virtual void check_sequence_ring() const;
  /// Floating-point operations of forward and backward of `sequences` sequences; 6 per parameter
  /// and token unless a model knows better.
  virtual double training_flops(int64_t sequences, int64_t sequence_length) const;

  std::string class_name() const override { return detail::demangled_class_name(typeid(*this).name()); }
};

/// A module that acts once per training step, after the optimizer: e.g. a router whose bias balances its experts
/// (megatron.core: _update_router_expert_bias). Also called for steps that the loss scaler skips.
class EndsSteps {
 public:
  virtual ~EndsSteps() = default;
  /// Takes this rank's counts of the step, fp32 [n] on the model's device; n is the same on all ranks. TrainStep sums
  /// the counts of all modules over the data parallel ranks in one all-reduce.
  virtual at::Tensor take_counts() = 0;
  /// `sums` [n]: the counts of all ranks. Runs without autograd. Must not block the host.
  virtual void end_step(const at::Tensor& sums) = 0;
};

}  // namespace megashard
