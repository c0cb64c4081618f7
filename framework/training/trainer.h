#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/arguments.h"
#include "framework/arguments/microbatches.h"
#include "framework/data/build_datasets.h"
#include "framework/diagnostics.h"
#include "framework/objectives/objectives.h"
#include "framework/training/checkpoint_saver.h"
#include "framework/training/listener.h"
#include "framework/training/optimizer_param_scheduler.h"
#include "framework/training/parallel_groups.h"
#include "framework/training/run_events.h"
#include "framework/training/step_reader.h"
#include "framework/training/step_timers.h"
#include "framework/training/train_step.h"
#include "framework/training/training_checkpoint.h"
#include "framework/training/training_data.h"
#include "parallel/fsdp/collective_order.h"

namespace megashard {

class MetricsFiles;

/// Environment of a trainer. Library code neither prints nor reads the process's state.
struct TrainerCallbacks {
  std::function<void(const std::string& line)> print_on_first_rank;
  DiagnosticSink sink{};                               ///< receives warnings, on every rank; null: nobody
  std::function<StopRequest()> stop_request;           ///< returns this rank's request
  std::function<int64_t()> peak_memory_bytes;          ///< returns this rank's peak
  std::function<int64_t()> live_memory_bytes{};        ///< MemoryLog::Sources::live_bytes, for --log-memory
  std::vector<std::shared_ptr<Listener>> listeners{};  ///< called before the trainer's own
  std::chrono::steady_clock::time_point program_start;
  std::optional<double> peak_tflops;                  ///< of one device, for mfu; the first rank's counts
  std::chrono::milliseconds progress_interval{5000};  ///< between lines of a long evaluation
};

/// The loop of Megatron's train(): steps, evaluations, saves and exits; all else is done by listeners. The model is
/// sharded and has its weights; everything else is made here from the arguments, which must outlive the trainer.
class Trainer {
 public:
  Trainer(const Arguments& arguments, MultiModalModule& model, const ParallelGroups& groups, c10::Device device,
          const DataOptions& data, TrainerCallbacks callbacks);

  /// Loads a step, or its weights only. Collective.
  void load(const CheckpointStep& step, bool weights_only = false);
  /// Saves what was loaded in --ckpt-convert-format to --ckpt-convert-save. Collective.
  void convert_checkpoint();
  /// An interrupted one has ended after a step or within an evaluation, and said so. Collective.
  TrainingEnd train();
  /// Behind train(): throws where the last checkpoint could not be saved.
  void check_last_save() const { saver_->check_last(); }
  Optimizer& optimizer() { return *optimizer_; }

 private:
  void add_listeners();
  HostStats host_stats(double data_wait_seconds, const Requests& requests) const;
  Requests requests();
  template <class Hook>
  void notify(const Hook& hook) {
    for (const auto& listener : listeners_) hook(*listener);
  }
  /// Reads the steps since the last call. With a scaler the schedule advances here, by those that were not skipped.
  /// Blocks the host for the device. Collective.
  void read_steps();
  bool line_is_due(int64_t iteration) const;
  /// True if step statistics must be read back at the end of that step. Same on all ranks.
  bool reads_step(int64_t iteration) const;
  /// Throws an error for a NaN or Inf value, with its place and the remedy. Collective.
  [[noreturn]] void fail_on_nonfinite(const std::string& what, StepReader::NotFinite which, const std::string& remedy);
  /// Computes the step's microbatches again: which of them has it, with its samples, in which module's output, or which
  /// parameter's gradient. Empty: it has not come again. Collective.
  std::string find_in_outputs();
  std::string find_in_gradients();
  /// The report of the step that has ended. A log line is due for the last step, too.
  StepReport report(bool is_last);
  /// What flags ask for besides: the host waits once more, for both. Collective.
  void measure_gradients_and_weights(StepReport& report);
  enum class Announce { kNo, kYes };
  /// Of all ranks. None when stop_ has ended it.
  std::optional<double> evaluate(const TrainingData::DatasetPtr& dataset, const std::string& where, int64_t consumed,
                                 Announce announce);
  /// `best_loss`: of the evaluation after this step, where it is the lowest so far.
  void save(std::optional<double> best_loss = std::nullopt);
  TrainingEnd end_of(TrainingEnd how);
  void prepare_training();
  void open_metrics_files();
  /// Gradients of the current step; compares the order of the units over the ranks where --check-collective-order
  /// asks for it.
  DeviceStats gradients(const std::vector<Batch>& batches);
  /// One iteration: batches, forward, backward, optimizer; the host reads its numbers where it
  /// must.
  void run_step();
  /// The validation loss after a step; nullopt if a stop request has ended the evaluation.
  std::optional<double> evaluate_step();
  /// The evaluations and the save behind the last step.
  void finish_training();
  TrainingEnd interrupted();
  bool steps_to_come() const;

  const Arguments& arguments_;
  MultiModalModule& model_;
  ProcessGroupPtr group_;     // the world
  ProcessGroupPtr sharding_;  // ParallelGroups'
  c10::Device device_;
  TrainerCallbacks callbacks_;
  std::unique_ptr<Optimizer> optimizer_;
  OptimizerParamScheduler schedule_;
  std::unique_ptr<GradScaler> scaler_;        // null: losses are not scaled
  std::optional<Microbatches> microbatches_;  // from the first step of this run on
  std::unique_ptr<StepTimers> timers_;        // null: --timing-log-level 0
  std::unique_ptr<Objective> objective_;
  TrainStep step_;
  TrainingState state_;
  CollectiveOrder order_;
  int64_t train_iters_ = 0, steps_of_run_ = 0;
  TrainingData data_;
  RunEvents events_;  // open on the first rank with --metrics-file
  StepReader reader_;
  std::vector<Batch> batches_;             // of the step under way
  double last_lr_ = 0, last_seconds_ = 0;  // of the last step, which has used that rate
  std::string weights_from_;               // the folder that the first weights were loaded from; or empty
  bool has_stepped_ = false;               // in this run
  bool has_reported_ = false;              // a step of this run
  StopRequest stop_ = StopRequest::kNone;
  bool in_evaluation_ = false;  // when stop_ was set
  bool exits_ = false;          // after this step: --exit-interval, --exit-signal ...
  // Last: a save in progress ends before members that it may use are destroyed.
  std::shared_ptr<CheckpointSaver> saver_;
  std::shared_ptr<MetricsFiles> metrics_files_;
  std::vector<std::shared_ptr<Listener>> listeners_;  // the saver is the last one
};

}  // namespace megashard
