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
#include "framework/data/data_loader.h"
#include "framework/diagnostics.h"
#include "framework/objectives/objectives.h"
#include "framework/training/checkpoint_saver.h"
#include "framework/training/memory_log.h"
#include "framework/training/metrics_writer.h"
#include "framework/training/optimizer_param_scheduler.h"
#include "framework/training/parallel_groups.h"
#include "framework/training/run_events.h"
#include "framework/training/step_profile.h"
#include "framework/training/step_stats.h"
#include "framework/training/step_timers.h"
#include "framework/training/train_step.h"
#include "framework/training/training_checkpoint.h"
#include "parallel/fsdp/collective_order.h"

namespace megashard {

/// What the user has asked a running training for; the larger one counts.
enum class StopRequest {
  kNone,
  kExit,       ///< --exit-signal: save, and end
  kInterrupt,  ///< Ctrl-C: end
};

enum class TrainingEnd { kDone, kExited, kInterrupted };

/// How a trainer reaches the world outside. Library code neither prints nor reads the process's
/// state.
struct TrainerCallbacks {
  std::function<void(const std::string& line)> print_on_first_rank;
  std::function<void(const std::string& line)> print_on_last_rank;
  DiagnosticSink sink{};                                    ///< of warnings, on every rank; null: nobody
  std::function<StopRequest()> stop_request;                ///< of this rank
  std::function<int64_t()> peak_memory_bytes;               ///< of this rank
  std::function<int64_t()> live_memory_bytes{};             ///< MemoryLog::Sources::live_bytes, for --log-memory
  std::function<void()> before_first_step{};                ///< null: nothing
  std::function<void()> after_step{};                       ///< null: nothing
  std::function<void(const StepReport& step)> show_step{};  ///< on the first rank, after each step; null: nothing
  std::chrono::steady_clock::time_point program_start;
  std::optional<double> peak_tflops;                  ///< of one device, for mfu; the first rank's counts
  std::chrono::milliseconds progress_interval{5000};  ///< between lines of a long evaluation
};

/// The loop of Megatron's train(): steps, log lines, metrics, evaluation, checkpoints, exits. The
/// model is sharded and its weights are there; everything else is made here from the arguments.
class Trainer {
 public:
  Trainer(Arguments& arguments, MultiModalModule& model, const ParallelGroups& groups, c10::Device device,
          const DataOptions& data, TrainerCallbacks callbacks);

  /// A step of arguments.load. Collective.
  void load(const CheckpointStep& step);
  /// Saves what was loaded in --ckpt-convert-format to --ckpt-convert-save. Collective.
  void convert_checkpoint();
  /// An interrupted one has ended after a step or within an evaluation, and said so. Collective.
  TrainingEnd train();
  /// Behind train(): throws where the last checkpoint could not be saved.
  void check_last_save() const { saver_.check_last(); }
  Optimizer& optimizer() { return *optimizer_; }

 private:
  /// Control flags, OR-ed over all ranks and the steps that were read since the last step.
  struct ControlFlags {
    StopRequest stop = StopRequest::kNone;
    bool save_failed = false;  // the save in progress
    bool time_is_up = false;   // --exit-duration-in-mins
  };

  void build_data();
  std::unique_ptr<DataSampler> make_sampler(const SampleDataset& dataset, int64_t consumed) const;
  std::unique_ptr<DataLoader> make_loader(const std::shared_ptr<const SampleDataset>& dataset, int64_t consumed);
  std::vector<Batch> next_batches(DataLoader& loader, int64_t count);
  HostStats host_stats(double data_wait_seconds) const;
  /// Throws if the loss is NaN or Inf and the NaN check is on.
  StepSummary summarise(const StepOfRanks& step);
  void merge_flags(const HostStats& of_rank);
  /// Waits for the device, and counts the steps since it last did: with a scaler the schedule
  /// advances here, by those that were not skipped. Collective.
  void read_steps();
  bool line_is_due(int64_t iteration) const;
  /// Whether the host must know the numbers of that step when it ends; alike on all ranks.
  bool reads_step(int64_t iteration) const;
  enum class NotFinite { kLoss, kNorm };
  /// Throws what is to be done about `what`, which is no number, and where it comes from. Collective.
  [[noreturn]] void fail_on_nonfinite(const std::string& what, NotFinite which, const std::string& remedy);
  /// Computes the step's microbatches again: which of them has it, with its samples, in which module's output, or which
  /// parameter's gradient. Empty: it has not come again. Collective.
  std::string find_in_outputs();
  std::string find_in_gradients();
  std::string microbatch_text(size_t microbatch) const;
  /// What metrics are worked out from; the log line if it is due, as it is for the last step. The
  /// step's metrics are written after its evaluation.
  StepReport report(bool is_last);
  /// What flags ask for besides: the host waits once more, for both. Collective.
  void measure_gradients_and_weights(StepReport& report);
  enum class Announce { kNo, kYes };
  /// Of all ranks. None when stop_ has ended it.
  std::optional<double> evaluate(const std::shared_ptr<const SampleDataset>& dataset, const std::string& where,
                                 int64_t consumed, Announce announce);
  /// One that cannot be written does not end training: the first time is told.
  void write_metrics(const StepReport& report);
  void print_on_last_rank(const std::string& lines);
  /// What the last rank has printed stands before what the first one prints from now on.
  /// Collective.
  void flush_last_rank_log();
  /// `best_loss`: of the evaluation after this step, where it is the lowest so far.
  void save(std::optional<double> best_loss = std::nullopt);
  /// `path`: of a trace that was written; empty: none.
  void log_profile(const std::string& path);
  TrainingEnd end_of(TrainingEnd how);
  void prepare_training();
  void print_data() const;
  /// Gradients of the current step; compares the order of the units over the ranks where --check-collective-order
  /// asks for it.
  DeviceStats gradients(const std::vector<Batch>& batches);
  /// One iteration: batches, forward, backward, optimizer; the host reads its numbers where it
  /// must.
  void run_step();
  /// The loss, if there was an evaluation, and nothing has ended it.
  std::optional<double> evaluate_if_due();
  /// The evaluations and the save behind the last step.
  void finish_training();
  TrainingEnd interrupted();
  /// Whether an --exit flag ends training after this step.
  bool must_exit() const;
  double seconds_since_start() const;
  bool steps_to_come() const;

  Arguments& arguments_;
  MultiModalModule& model_;
  ProcessGroupPtr group_;     // the world
  ProcessGroupPtr sharding_;  // ParallelGroups'
  c10::Device device_;
  DataOptions data_options_;
  TrainerCallbacks callbacks_;
  std::unique_ptr<Optimizer> optimizer_;
  OptimizerParamScheduler schedule_;
  std::unique_ptr<GradScaler> scaler_;        // null: losses are not scaled
  std::optional<Microbatches> microbatches_;  // from the first step of this run on
  std::unique_ptr<StepTimers> timers_;        // null: --timing-log-level 0
  std::unique_ptr<MemoryLog> memory_log_;     // of the first rank with --log-memory
  std::unique_ptr<StepProfile> profile_;      // of --profile-ranks with --profile
  std::unique_ptr<Objective> objective_;
  TrainStep step_;
  TrainingState state_;
  CollectiveOrder order_;
  int64_t train_iters_ = 0, steps_of_run_ = 0;
  DataSplits splits_;
  std::unique_ptr<DataLoader> train_loader_;  // null: no step is to come
  MetricsWriters writers_;                    // of the first rank
  std::unique_ptr<RunEvents> events_;         // likewise; null: no --metrics-file
  StepInterval interval_;                     // of steps that were read: losses and tokens
  StepStats stats_;
  std::vector<Batch> batches_;                        // of the step under way
  std::vector<int64_t> unread_batches_;               // sizes of the global batches of stats_
  std::vector<std::string> metric_names_{"lm loss"};  // of the steps of stats_
  StepSummary last_read_;
  ControlFlags flags_;
  double last_lr_ = 0, last_seconds_ = 0;        // of the last step, which has used that rate
  std::string weights_from_;                     // the folder that the first weights were loaded from; or empty
  int64_t steps_read_ = 0, unlearnt_steps_ = 0;  // of this run; of the latter every label is masked
  bool has_stepped_ = false;                     // in this run
  bool has_reported_ = false;                    // a step of this run
  StopRequest stop_ = StopRequest::kNone;
  bool in_evaluation_ = false;             // where stop_ was heard of
  bool reported_metrics_failure_ = false;  // that some could not be written
  bool last_rank_printed_ = false;         // since the first one waited for it
  CheckpointSaver saver_;                  // last: a save under way ends before what it may need
};

}  // namespace megashard
