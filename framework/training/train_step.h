#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "framework/batch.h"
#include "framework/diagnostics.h"
#include "framework/modules/adapters.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/objectives/objectives.h"
#include "framework/training/optimizers/optimizer.h"
#include "framework/training/step_reader.h"
#include "framework/training/step_timers.h"
#include "parallel/collectives/process_group.h"
#include "parallel/fsdp/collective_order.h"
#include "parallel/fsdp/grad_scaler.h"

namespace megashard {

struct TrainStepOptions {
  double clip_grad = 1.0;                 ///< 0: the norm is computed, nothing is clipped
  bool needs_finite_gradients = false;    ///< true: a step whose gradient norm is not finite changes nothing
  bool calculate_per_token_loss = false;  ///< one mean over the global batch, not a mean of microbatches' means
  /// Two passes: a forward without gradients, the loss's gradient by the tokens' losses, and a pass with these as
  /// weights.
  bool loss_by_weights = false;
  size_t micro_batches_together = 1;  ///< by weights: so many neighbours have the sequences of a loss's terms
  /// false: gradients stay whole until the last microbatch's backward reduces them: less
  /// communication, more memory.
  bool reduces_each_microbatch = true;
  int64_t empty_unused_memory_level = 0;            ///< of a GPU: 1 before, 2 also after the optimizer
  std::optional<int64_t> check_collective_order{};  ///< gradients() compares the ranks: the flag's interval
  DiagnosticSink sink{};                            ///< of its warnings; null: nobody
  StepTimers* timers = nullptr;                     ///< null: nobody asks for times
  GradScaler* scaler = nullptr;  ///< null: losses are not scaled; else it needs finite gradients, too
  SequenceShard sequence{};      ///< ranks that get the same batches and share each sequence
  /// A model like the trained one, which gives kRefLogProbs; null: the data have them, or the base under adapters.
  MultiModalModule* reference = nullptr;
};

/// Forward and backward of one global batch in micro batches, then the optimizer (train_step of Megatron). Blocks the
/// host only if timers ask for it or parameters are replicated (parallel_groups.h): the statistics of a step stay
/// on the device, where StepStats reads them.
class TrainStep {
 public:
  /// `group`: the ranks that the model is sharded over (ParallelGroups::sharding).
  TrainStep(MultiModalModule& model, const Objective& objective, Optimizer& optimizer, ProcessGroupPtr group,
            c10::Device device, const TrainStepOptions& options);

  /// backward() and clip() of step number `step`. In the steps of --check-collective-order it compares the order of the
  /// units over `world`. Collective.
  DeviceStats gradients(const std::vector<Batch>& micro_batches, int64_t step, const ProcessGroupPtr& world);
  /// Computes the gradients of the batch, which replace the ones before. Returns the metrics: DeviceStats::sums.
  /// Collective.
  at::Tensor backward(const std::vector<Batch>& micro_batches);
  /// Clips these gradients. `sums`: what backward() returned. Collective.
  DeviceStats clip(const at::Tensor& sums);
  /// Steps the optimizer by the clipped gradients, at its own learning rate; if the options ask for finite gradients
  /// and the norm is not finite, no parameter changes. Then calls end_step() of the modules that have one. Collective.
  void update();
  /// The objective's metrics without gradients, of micro_batches_together: DeviceStats::sums, on the device.
  /// Collective.
  at::Tensor evaluate(const std::vector<Batch>& micro_batches);
  /// How many micro batches evaluate() takes, and backward() a multiple of.
  size_t together() const { return options_.micro_batches_together; }
  /// Copies the micro batches from `first` on whose losses are computed together.
  std::vector<Batch> parts_from(const std::vector<Batch>& micro_batches, size_t first) const;
  /// Names of the metrics of the last call: the objective's, then those of the model's aux terms.
  const std::vector<std::string>& metric_names() const { return metric_names_; }

 private:
  void empty_unused_memory(int64_t from_level);
  void end_step();
  /// With the columns of sequences, if the objective needs them. Throws for the first batch if it lacks a column that
  /// the objective needs.
  Batch with_sequences(Batch batch) const;
  /// The batch on the device, prepared, with whole sequences.
  Batch on_device(Batch batch);
  /// Runs the model on this rank's rows. Throws if it lacks an output that the objective needs.
  ModelOutput output_for(const Batch& mine);
  /// Token losses of whole sequences by a model, [all B, longest T], from a forward without gradients and dropout.
  static at::Tensor token_losses_of(MultiModalModule& model, const std::vector<Batch>& wholes);
  /// Their columns as those of one batch of whole sequences.
  static Batch joined(std::vector<Batch> parts);
  /// 1 / (what the losses of all micro batches are averaged over), where that is one number for the step; else
  /// undefined.
  at::Tensor global_scale(const std::vector<Batch>& micro_batches);
  /// Sum and count of each metric, [2 * metrics] fp64.
  at::Tensor sums_of(const std::vector<MetricSum>& metrics);
  struct Scale {
    at::Tensor global;     // global_scale()
    double micro_batches;  // counts those of the step; those together count once
  };
  /// By what the loss's sums are multiplied: a scalar or [means].
  at::Tensor factor_of(const at::Tensor& count, const Scale& scale) const;
  at::Tensor scaled(const at::Tensor& loss) const;  // by the loss scale
  /// The loss times its factor, and its metrics.
  std::pair<at::Tensor, std::vector<MetricSum>> loss_of(const ModelOutput& output, const Batch& mine,
                                                        const at::Tensor& count, const at::Tensor& factor,
                                                        const Scale& scale) const;
  /// A loss that was computed by itself.
  struct LossAhead {
    std::vector<at::Tensor> weights;  // gradients by the token losses of each micro batch, [B, T], whole
    at::Tensor count;
    std::vector<MetricSum> metrics;
  };
  /// Of micro batches together, on the device.
  LossAhead loss_ahead(const std::vector<Batch>& parts, const Scale& scale);
  /// Forward and backward of one micro batch, which is a part of those of `ahead`, unless that is null. Returns the
  /// metrics.
  std::vector<MetricSum> forward_backward(Batch whole, const Scale& scale, const LossAhead* ahead, size_t part);
  double sequence_ranks() const { return options_.sequence.is_whole() ? 1 : options_.sequence.group->size(); }

  MultiModalModule& model_;
  const Objective& objective_;
  Optimizer& optimizer_;
  std::vector<EndsSteps*> ends_;        // the model's modules that have an end of the step
  std::vector<HasAdapters*> adapters_;  // those that have adapters
  std::vector<at::Tensor> replicated_;  // parameters that fully_shard does not reduce
  ProcessGroupPtr group_;
  c10::Device device_;
  TrainStepOptions options_;
  std::vector<std::string> columns_;  // that the objective needs
  Needs needs_;
  bool needs_sequences_, needs_reference_;
  bool has_replicas_;  // HSDP: all-reduce in the last microbatch's backward only
  std::optional<CollectiveOrder> order_;
  int64_t steps_ = 0;  // of gradients()
  at::Tensor skip_;    // of the gradients that update() takes; undefined: never
  std::vector<std::string> metric_names_;
};

}  // namespace megashard
