#pragma once

#include <cstdint>
#include <ctime>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "framework/arguments/logging_arguments.h"
#include "framework/training/metrics.h"

namespace megashard {

/// The texts that Megatron prints, as pure functions: scripts cut them at ':' and '|', so
/// the order of fields is a contract.

/// "2026-01-31 08:05:09"
std::string log_time(const std::tm& local_time);
std::string log_time_now();

/// The training line, printed by the last rank every log_interval steps: `time` is log_time(), what follows are those
/// of the metrics that have a text.
std::string training_log_line(const std::string& time, const StepReport& report, const LoggingArguments& log);

/// Times of the ranks by the name of a part, in milliseconds, as Megatron's timers show them.
using PartTimes = std::vector<std::pair<std::string, std::vector<double>>>;
/// `option`: of --timing-log-option. Parts that took no time on any rank are left out; empty when
/// all are.
std::string timer_log_lines(const PartTimes& times, TimingLogOption option);

/// Three lines: dashes, the loss with its perplexity and the further metrics, dashes. `where`: "iteration 10",
/// "iteration 10 on validation set", "iteration 10 on test set".
std::string evaluation_log_lines(const std::string& where, const std::vector<std::pair<std::string, double>>& metrics);

/// "[after dataloaders are built] datetime: ..."
std::string datetime_line(const std::string& after_what, const std::string& time);
/// "Evaluating on 80 samples"
std::string evaluating_line(int64_t samples);
/// "Evaluating iter 3/10"
std::string evaluation_progress_line(int64_t iteration, int64_t iterations);
/// "[exiting program at iteration 10] datetime: ..."
std::string exit_line(int64_t iteration, const std::string& time);

/// Where Ctrl-C has stopped a run, and what of it can be gone on with.
struct Interruption {
  int64_t iteration = 0;
  int64_t train_iters = 0;
  bool in_evaluation = false;
  std::optional<std::string> save{};    ///< --save
  std::optional<int64_t> saved_step{};  ///< the last one in that folder
};
std::string interruption_line(const Interruption& interruption);

// Steps in which every label is masked.
std::string unlearnt_batch_line();  ///< at the first one
std::string unlearnt_steps_line(int64_t unlearnt, int64_t steps);

// Checkpoints.
std::string saving_line(int64_t iteration, const std::string& directory, const std::string& format);
std::string saved_line(int64_t iteration, const std::string& directory);
/// "  the best checkpoint so far is that of iteration       40, with the validation loss 4.020619E+00"
std::string best_line(int64_t iteration, double validation_loss);
/// Without an iteration: a "release" checkpoint, which has none.
std::string loading_line(const std::string& directory, std::optional<int64_t> iteration);
std::string loaded_line(const std::string& directory, int64_t iteration);
/// Two lines, for a folder without a tracker file.
std::string missing_checkpoint_lines(const std::string& tracker_file, const std::string& weights);

}  // namespace megashard
