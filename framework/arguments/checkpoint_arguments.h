#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/dcp/checkpoint_format.h"

namespace megashard {

struct Arguments;
struct Option;
class Mistakes;

/// Handling of names that only one side has, with Megatron's values. "Unexpected" ones concern only names that the
/// checkpoint lacks.
enum class StrictHandling {
  kAssumeOkUnexpected,
  kLogUnexpected,
  kLogAll,
  kRaiseUnexpected,
  kRaiseAll,
  kReturnUnexpected,
  kReturnAll,
  kIgnoreAll,
};

enum class HfDtype { kFp32, kFp16, kBf16 };

struct CheckpointArguments {
  std::optional<std::string> save;
  std::optional<int64_t> save_interval;
  bool async_save = false;
  int64_t max_failed_saves = 3;                 // consecutive failures that end the run
  std::optional<int64_t> most_recent_k;         // number of steps kept
  std::optional<int64_t> save_retain_interval;  // multiples kept
  bool save_best = false;                       // also keeps the step with the lowest validation loss
  std::optional<std::string> load;
  std::optional<std::string> resume_key;  // foreign config key that set `load`; the checkpoint must exist
  bool no_save_optim = false;
  bool no_save_rng = false;
  bool no_load_optim = false;
  bool no_load_rng = false;
  bool finetune = false;  // loads weights only, starts at iteration 0
  std::optional<std::string> pretrained_checkpoint;
  std::optional<int64_t> ckpt_step;
  bool verify_checkpoint = true;  // reads every byte before loading
  bool use_checkpoint_args = false;
  std::optional<StrictHandling> dist_ckpt_strictness;  // unset: all names must match
  bool exit_on_missing_checkpoint = false;
  bool auto_detect_ckpt_format = false;
  CheckpointFormat ckpt_format = CheckpointFormat::kTorchDist;
  bool ckpt_bare_names = false;                         // torch_dcp: weights without the "model." prefix
  std::optional<CheckpointFormat> ckpt_convert_format;  // converts `load` to this format and exits
  std::optional<std::string> ckpt_convert_save;         // output folder of the conversion
  std::optional<std::string> save_hf;                   // output folder for Hugging Face files, at the end
  std::optional<HfDtype> save_hf_dtype;                 // dtype of its floats; unset: as --hf-model's files
  bool save_hf_stacked_experts = false;                 // writes a layer's experts as two tensors
  std::optional<std::string> publish_weights;           // folder of step_0, step_N, ... for inference engines
  int64_t publish_interval = 1;                         // steps between them
  int64_t publish_full_interval = 1;                    // every so many are whole, the others changes alone
  bool overwrite = false;                               // --save-hf may replace the content of its folder
  bool overwrite_run = false;                           // a new run may write into another run's directory
};

namespace detail {

/// Adds the rows of these options, in the order of the help.
void add_checkpoint_options(std::vector<Option>& rows);
void check_checkpointing(const Arguments& arguments, Mistakes& rules);

}  // namespace detail

}  // namespace megashard
