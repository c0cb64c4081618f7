#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "framework/data/data_loader.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/training/optimizer.h"
#include "framework/training/step_timers.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

struct TrainStepOptions {
  double clip_grad = 1.0;               ///< 0: the norm is computed, nothing is clipped
  bool needs_finite_gradients = false;  ///< else weights stay as they are
  bool calculate_per_token_loss =
      false;                  ///< one mean over the global batch, not a mean of microbatches' means
  bool has_replicas = false;  ///< HSDP: all-reduce in the last microbatch's backward only
  /// false: gradients stay whole until the last microbatch's backward reduces them: less
  /// communication, more memory.
  bool reduces_each_microbatch = true;
  int64_t empty_unused_memory_level = 0;  ///< of a GPU: 1 before, 2 also after the optimizer
  StepTimers* timers = nullptr;           ///< null: nobody asks for times
  ProcessGroupPtr sequence_group{};  ///< ranks that get the same batches and share each sequence
};

/// Sums over this rank's share of a global batch.
struct LossSums {
  double weighted_loss = 0;  ///< of tokens whose mask is not 0
  double tokens = 0;
};  // with a sequence group: over this rank's rows of it

struct TrainStepResult {
  LossSums loss;
  double grad_norm = 0;  ///< before clipping; the same on all ranks
  bool updated = true;   ///< false: the norm is not finite, and the options ask for a finite one
};

/// Forward and backward of one global batch in microbatches, then the optimizer (train_step of
/// Megatron).
class TrainStep {
 public:
  TrainStep(MultiModalModule& model, Optimizer& optimizer, ProcessGroupPtr group,
            c10::Device device, const TrainStepOptions& options);

  /// Collective. The learning rate is the optimizer's.
  TrainStepResult run(const std::vector<Batch>& microbatches);
  /// Loss without gradients.
  LossSums evaluate(const Batch& batch);

 private:
  void empty_unused_memory(int64_t from_level);
  /// Sums of the loss and of the tokens, [2] fp64 on the device.
  at::Tensor forward_backward(const std::vector<Batch>& microbatches);
  at::Tensor clip();
  void step_optimizer();
  TrainStepResult update(const at::Tensor& sums);
  /// What this rank's tokens lose, and their mask; `whole_mask` is that of the whole sequences.
  struct TokenLosses {
    at::Tensor losses, mask, whole_mask;
  };
  TokenLosses token_losses(const Batch& batch);

  MultiModalModule& model_;
  Optimizer& optimizer_;
  ProcessGroupPtr group_;
  c10::Device device_;
  TrainStepOptions options_;
};

}  // namespace megashard
