#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/microbatches.h"
#include "framework/diagnostics.h"
#include "framework/objectives/objectives.h"
#include "framework/training/checkpoint_saver.h"
#include "framework/training/evaluation.h"
#include "framework/training/flops.h"
#include "framework/training/listener.h"
#include "framework/training/metrics_writer.h"
#include "framework/training/nonfinite_search.h"
#include "framework/training/parallel_groups.h"
#include "framework/training/step_reader.h"
#include "framework/training/step_timers.h"
#include "framework/training/train_step.h"
#include "framework/training/training_checkpoint.h"
#include "framework/training/training_data.h"
#include "framework/training/training_plan.h"

namespace megashard {

/// Environment of a trainer. Library code neither prints nor reads the process's state.
struct TrainerCallbacks {
  std::function<void(const std::string& line)> print_on_first_rank;
  DiagnosticSink sink{};                               ///< receives warnings, on every rank; null: nobody
  MultiModalModule* reference = nullptr;               ///< TrainStepOptions::reference
  std::function<StopRequest()> stop_request;           ///< returns this rank's request
  std::function<int64_t()> peak_memory_bytes;          ///< returns this rank's peak
  std::function<int64_t()> live_memory_bytes{};        ///< MemoryLog::Sources::live_bytes, for --log-memory
  std::vector<std::shared_ptr<Listener>> listeners{};  ///< called before the trainer's own
  std::chrono::steady_clock::time_point program_start;
  std::optional<double> peak_tflops;                  ///< of one device, for mfu; the first rank's counts
  std::chrono::milliseconds progress_interval{5000};  ///< between lines of a long evaluation
};

/// The loop of Megatron's train(): steps, evaluations, saves and exits; all else is done by listeners. The model is
/// sharded and has its weights; everything else is made here from the plan.
class Trainer {
 public:
  Trainer(TrainingPlan plan, MultiModalModule& model, const ParallelGroups& groups, c10::Device device,
          TrainerCallbacks callbacks);

  /// Loads a step, or its weights only. Collective.
  void load(const CheckpointStep& step, bool weights_only = false);
  /// Saves what was loaded in --ckpt-convert-format to --ckpt-convert-save. Collective.
  void convert_checkpoint() { saver_->convert(); }
  /// An interrupted one has ended after a step or within an evaluation, and said so. Collective.
  TrainingEnd train();
  /// Behind train(): throws where the last checkpoint could not be saved.
  void check_last_save() const { saver_->check_last(); }
  Optimizer& optimizer() { return *optimizer_; }

 private:
  /// State of the loop: the current step, and the reason to end.
  struct Loop {
    std::optional<Microbatches> microbatches{};  // from the first step of this run on
    int64_t train_iters = 0;
    std::vector<Batch> batches{};  // this rank's, of the current step
    int64_t samples = 0;           // of all ranks in that step
    int64_t length = 0;            // number of tokens, or patches, of a sample
    double lr = 0, seconds = 0;
    bool has_reported = false;  // a step of this run
    StopRequest stop = StopRequest::kNone;
    bool in_evaluation = false;  // when stop was set
    bool exits = false;          // after this step: --exit-interval, --exit-signal ...
  };

  void add_listeners();
  HostStats host_stats(double data_wait_seconds, const Requests& requests) const;
  Requests requests();
  template <class Hook>
  void notify(const Hook& hook) {
    for (const auto& listener : listeners_) hook(*listener);
  }
  /// Reads the steps since the last call. Subtracts what documents have saved from the FLOPs so far; with a scaler the
  /// schedule advances here, by the steps that were not skipped.
  /// Blocks the host for the device. Collective.
  void read_steps();
  bool line_is_due(int64_t iteration) const;
  /// True if step statistics must be read back at the end of that step. Same on all ranks.
  bool reads_step(int64_t iteration) const;
  /// The report of the step that has ended. A log line is due for the last step, too.
  StepReport report(bool is_last);
  /// The loss over a data set; nullopt if a stop request has ended the evaluation.
  std::optional<double> evaluate(const TrainingData::DatasetPtr& dataset, const std::string& where, int64_t consumed,
                                 bool announces);
  /// `best_loss`: of the evaluation after this step, where it is the lowest so far.
  void save(std::optional<double> best_loss = std::nullopt);
  TrainingEnd end_of(TrainingEnd how);
  void prepare_training();
  /// Waits until the next step has its data. A request to stop meanwhile ends the loop, after a save for kExit.
  void wait_for_data();
  /// One iteration: batches, forward, backward, optimizer; the host reads its numbers where it
  /// must.
  void run_step();
  /// The validation loss after a step.
  std::optional<double> evaluate_step();
  /// The evaluations and the save behind the last step.
  void finish_training();
  TrainingEnd interrupted();
  bool goes_on() const { return !loop_.exits && loop_.stop == StopRequest::kNone; }
  bool steps_to_come() const { return !plan_.length.skip_train && state_.progress.step < loop_.train_iters; }

  const TrainingPlan plan_;
  MultiModalModule& model_;
  ProcessGroupPtr world_;
  c10::Device device_;
  TrainerCallbacks callbacks_;
  std::unique_ptr<Optimizer> optimizer_;
  OptimizerParamScheduler schedule_;
  std::unique_ptr<GradScaler> scaler_;          // null: losses are not scaled
  std::unique_ptr<StepTimers> timers_;          // null: --timing-log-level 0
  std::shared_ptr<const Objective> objective_;  // shared with the threads that read data
  TrainStep step_;
  TrainingState state_;
  TrainingData data_;
  DocumentFlops document_flops_;
  NonfiniteSearch search_;
  StepReader reader_;
  Evaluation evaluation_;
  Loop loop_;
  // Last: a save in progress ends before members that it may use are destroyed.
  std::shared_ptr<MetricsFiles> metrics_files_;
  std::shared_ptr<CheckpointSaver> saver_;
  std::vector<std::shared_ptr<Listener>> listeners_;  // the saver is the last one
};

}  // namespace megashard
