#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "framework/batch.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/training/optimizer.h"
#include "framework/training/step_timers.h"
#include "parallel/collectives/process_group.h"
#include "parallel/fsdp/grad_scaler.h"

namespace megashard {

struct TrainStepOptions {
  double clip_grad = 1.0;                 ///< 0: the norm is computed, nothing is clipped
  bool needs_finite_gradients = false;    ///< true: a step whose gradient norm is not finite changes nothing
  bool calculate_per_token_loss = false;  ///< one mean over the global batch, not a mean of microbatches' means
  bool has_replicas = false;              ///< HSDP: all-reduce in the last microbatch's backward only
  /// false: gradients stay whole until the last microbatch's backward reduces them: less
  /// communication, more memory.
  bool reduces_each_microbatch = true;
  int64_t empty_unused_memory_level = 0;  ///< of a GPU: 1 before, 2 also after the optimizer
  StepTimers* timers = nullptr;           ///< null: nobody asks for times
  GradScaler* scaler = nullptr;           ///< null: losses are not scaled; else it needs finite gradients, too
  SequenceShard sequence{};               ///< ranks that get the same batches and share each sequence
};

/// Forward and backward of one global batch in microbatches, then the optimizer (train_step of
/// Megatron). The host waits for no device, unless timers ask for it or parameters are replicated
/// (replicated_gradients.h): what is known of a step comes back as a tensor, which StepNumbers reads.
class TrainStep {
 public:
  /// `group`: the ranks that the model is sharded over (ParallelGroups::sharding).
  TrainStep(MultiModalModule& model, Optimizer& optimizer, ProcessGroupPtr group, c10::Device device,
            const TrainStepOptions& options);

  /// Clipped gradients of the batch. Returns what is then known of the step, [4 or more] fp64 on the
  /// device: over this rank's share the loss summed over tokens whose mask is not 0, and how many
  /// these are (of sequences that ranks share: over this rank's rows of it); the norm before clipping,
  /// and the loss scale of the next step (1 without a scaler), which are the same on all ranks. Behind these, of a
  /// model that has them, the means over the microbatches of take_router_losses(). Collective.
  at::Tensor gradients(const std::vector<Batch>& microbatches);
  /// Those of one microbatch alone, not clipped, on the parameters. Collective.
  void gradients_of(const Batch& microbatch);
  /// Steps the optimizer, at its own learning rate, by these gradients. Where the options ask for a
  /// finite norm and it is none, the device leaves all as it is.
  void update();
  /// Without gradients: loss and tokens as above, [2].
  at::Tensor evaluate(const Batch& batch);

 private:
  void empty_unused_memory(int64_t from_level);
  /// Sums of the loss and of the tokens, [2] fp64 on the device.
  at::Tensor forward_backward(const std::vector<Batch>& microbatches);
  /// What this rank's tokens lose, their mask, and their Batch::loss_weights.
  struct TokenLosses {
    at::Tensor losses, mask, weights;
  };
  TokenLosses token_losses(Batch batch);

  MultiModalModule& model_;
  Optimizer& optimizer_;
  std::vector<at::Tensor> replicated_;  // parameters that fully_shard does not reduce
  ProcessGroupPtr group_;
  c10::Device device_;
  TrainStepOptions options_;
  at::Tensor skip_;  // of the gradients that update() takes; undefined: never
};

}  // namespace megashard
