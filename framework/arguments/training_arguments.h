#pragma once

#include <csignal>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/checkpoint_arguments.h"

namespace megashard {

struct Arguments;
struct Option;
struct RunParts;
class Mistakes;

enum class ExitSignal { kTerm = SIGTERM, kInt = SIGINT, kUsr1 = SIGUSR1, kUsr2 = SIGUSR2 };

/// Megatron's groups for the training loop, with its names and defaults. (derived): computed by validate_arguments.
struct TrainingArguments {
  std::optional<int64_t> micro_batch_size;   // per rank; (derived) 1 where nothing is trained
  std::optional<int64_t> global_batch_size;  // (derived) micro batch size * data parallel size
  std::vector<int64_t> rampup_batch_size;    // {start, increment, samples}; empty: constant
  bool decrease_batch_size_if_needed = false;
  std::optional<int64_t> train_iters;  // or train_samples; (derived) from those, 1 with skip_train
  std::optional<int64_t> train_samples;
  std::optional<int64_t> exit_interval;
  std::optional<int64_t> exit_duration_in_mins;
  bool exit_signal_handler = false;  // on exit_signal: save and exit
  ExitSignal exit_signal = ExitSignal::kTerm;
  bool check_for_nan_in_loss_and_grad = true;
  bool calculate_per_token_loss = false;
  std::vector<std::string> loss_plugin;             // libraries
  std::optional<std::string> ref_model;             // Hugging Face folder of a reference model
  HfDtype ref_model_dtype = HfDtype::kBf16;         // that it is stored and computed in
  std::string objective = "next-token";             // a value of objectives()
  std::map<std::string, double> objective_options;  // values of their flags, by flag
  bool loss_by_weights = false;
  int64_t empty_unused_memory_level = 0;
  bool deterministic_mode = false;
  bool skip_train = false;                         // evaluates only
  std::vector<std::string> callback;               // names of callbacks()
  std::map<std::string, double> callback_options;  // values of their flags, by flag
  std::vector<std::string> callback_plugin;        // libraries
};

/// Names of Progress in a checkpoint's args.
inline constexpr const char* kConsumedTrainSamples = "consumed_train_samples";
inline constexpr const char* kConsumedValidSamples = "consumed_valid_samples";

struct ValidationArguments {
  int64_t eval_iters = 100;
  int64_t eval_interval = 1000;
  bool test_mode = false;
};

namespace detail {

/// Adds the rows of these options, in the order of the help.
void add_training_options(std::vector<Option>& rows);
/// Validates run length and batch sizes. Call it after data_parallel_size is known.
void validate_training(Arguments& arguments, const RunParts& parts, Mistakes& rules);

}  // namespace detail

}  // namespace megashard
