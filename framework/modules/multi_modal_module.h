#pragma once

#include <ATen/core/Tensor.h>

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

  /// With labels: the loss of each token, [B, T] fp32. Without: logits [B, T, V].
  virtual at::Tensor forward(Batch input) = 0;
  at::Tensor operator()(Batch input) {
    if (input.plan == nullptr) prepare(input);
    return run_hooked([this](Batch& each) { return forward(each); }, std::move(input));
  }

  /// What needs values on the host (position ids, places of images); sets input.plan. Runs before
  /// forward unless it did already: a program calls it before the input moves to a device (which
  /// is waited for otherwise), and with whole sequences, before it takes the rows of a shard.
  virtual void prepare(Batch& /*input*/) const {}

  /// Tokens are from [0, vocab_size()).
  virtual int64_t vocab_size() const = 0;
  /// Throws where forward cannot take a sequence whose rows are spread over so many ranks that share
  /// out its heads (Ulysses); the default cannot (Batch::sequence).
  virtual void check_sequence_ranks(int64_t ranks) const;
  /// Throws where it cannot take one in a ring; the default cannot (SequenceShard::ring).
  virtual void check_sequence_ring() const;
  /// Floating-point operations of forward and backward of `sequences` sequences; 6 per parameter
  /// and token unless a model knows better.
  virtual double training_flops(int64_t sequences, int64_t sequence_length) const;
  /// Losses of routers (router_losses.h) that the forwards of training since the last call have added to the
  /// gradients, and not to the tokens' losses: their sums, [kRouterLosses] fp64. Undefined: there are none.
  virtual at::Tensor take_router_losses() { return {}; }

  std::string class_name() const override { return detail::demangled_class_name(typeid(*this).name()); }
};

}  // namespace megashard
