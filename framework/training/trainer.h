#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "framework/arguments/arguments.h"
#include "framework/data/build_datasets.h"
#include "framework/data/microbatches.h"
#include "framework/training/lr_schedule.h"
#include "framework/training/metrics_file.h"
#include "framework/training/train_step.h"
#include "framework/training/training_checkpoint.h"
#include "framework/training/training_saves.h"

namespace megashard {

/// How a trainer reaches the world outside. Library code neither prints nor reads the process's
/// state.
struct TrainerSurroundings {
  std::function<void(const std::string& line)> print_on_first_rank;
  std::function<void(const std::string& line)> print_on_last_rank;
  std::function<bool()> stop_signal;           ///< SIGTERM came (--exit-signal-handler)
  std::function<int64_t()> peak_memory_bytes;  ///< of this rank
  std::function<void()> after_step{};          ///< null: nothing
  std::chrono::steady_clock::time_point program_start;
  std::optional<double> peak_tflops;  ///< of one device, for mfu; the first rank's counts
};

/// The loop of Megatron's train(): steps, log lines, metrics, evaluation, checkpoints, exits. The
/// model is sharded and its weights are there; everything else is made here from the arguments.
class Trainer {
 public:
  Trainer(Arguments& arguments, MultiModalModule& model, ProcessGroupPtr group, c10::Device device,
          const DataOptions& data, TrainerSurroundings surroundings);

  /// A step of arguments.load. Collective.
  void load(const CheckpointStep& step);
  /// Saves what was loaded in --ckpt-convert-format to --ckpt-convert-save. Collective.
  void convert_checkpoint();
  void train();

 private:
  struct Interval {  // since the last log line
    double loss_sum = 0;  // of the steps whose loss is a number
    double tokens_per_sample = 0;  // summed over the steps
    int64_t steps = 0;
    int64_t nan_steps = 0;
    double seconds = 0;
  };
  struct StepSummary {  // over all ranks
    double loss = 0;
    double tokens = 0;  // whose mask is not 0
    bool stop = false;
    bool save_failed = false;  // the one under way
    double peak_memory_bytes = 0;
    double data_wait_seconds = 0;
  };

  void build_data();
  std::unique_ptr<DataLoader> make_loader(const std::shared_ptr<const SampleDataset>& dataset,
                                          int64_t consumed);
  std::vector<Batch> next_batches(DataLoader& loader, int64_t count);
  StepSummary summarise(const LossSums& loss, double data_wait_seconds);
  /// The log line if it is due; the step's metrics are written after its evaluation.
  void report(const StepSummary& summary, double grad_norm, double lr_used, double seconds);
  std::optional<double> evaluate(const std::shared_ptr<const SampleDataset>& dataset,
                                 const std::string& where, int64_t consumed);
  void prepare_training();
  /// One iteration: batches, forward, backward, optimizer, log.
  StepSummary run_step();
  void evaluate_if_due();
  /// Whether an --exit flag or a signal ends training after this step. Collective.
  bool must_exit(const StepSummary& summary);
  double seconds_since_start() const;
  bool steps_to_come() const;

  Arguments& arguments_;
  MultiModalModule& model_;
  ProcessGroupPtr group_;
  c10::Device device_;
  DataOptions data_options_;
  TrainerSurroundings outside_;
  std::unique_ptr<Optimizer> optimizer_;
  OptimizerParamScheduler schedule_;
  std::optional<Microbatches> microbatches_;  // from the first step of this run on
  TrainStep step_;
  TrainingState state_;
  int64_t train_iters_ = 0;
  DataSplits splits_;
  std::unique_ptr<DataLoader> train_loader_;  // null: no step is to come
  std::unique_ptr<MetricsFile> metrics_;
  StepMetrics step_metrics_;  // of the last step, on the rank that writes them
  Interval interval_;
  TrainingSaves saves_;  // last: a save under way ends before what it may need
};

}  // namespace megashard
