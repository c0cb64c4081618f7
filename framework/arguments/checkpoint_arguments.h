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

/// What becomes of names that only one side has, by Megatron's values. Those of "unexpected" are of names that only the
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
  int64_t max_failed_saves = 3;                 // in a row, that end the run
  std::optional<int64_t> most_recent_k;         // steps that stay
  std::optional<int64_t> save_retain_interval;  // multiples that stay
  bool save_best = false;                       // and keep the step with the lowest validation loss
  std::optional<std::string> load;
  std::optional<std::string> resume_key;  // of a file, not of ours: names `load`, where a checkpoint must be
  bool no_save_optim = false;
  bool no_save_rng = false;
  bool no_load_optim = false;
  bool no_load_rng = false;
  bool finetune = false;  // weights only, from iteration 0
  std::optional<std::string> pretrained_checkpoint;
  std::optional<int64_t> ckpt_step;
  bool verify_checkpoint = true;  // read every byte before loading
  bool use_checkpoint_args = false;
  std::optional<StrictHandling> dist_ckpt_strictness;  // unset: all must fit
  bool exit_on_missing_checkpoint = false;
  bool auto_detect_ckpt_format = false;
  CheckpointFormat ckpt_format = CheckpointFormat::kTorchDist;
  bool ckpt_bare_names = false;                         // weights at the top of a torch_dcp step
  std::optional<CheckpointFormat> ckpt_convert_format;  // load, save in this one, exit
  std::optional<std::string> ckpt_convert_save;         // folder for it
  std::optional<std::string> save_hf;                   // folder for Hugging Face files, at the end
  std::optional<HfDtype> save_hf_dtype;                 // of its floating weights; unset: that of --hf-model's files
  bool save_hf_stacked_experts = false;                 // a layer's experts in two tensors there
  bool overwrite = false;                               // --save-hf may replace what its folder holds
  bool overwrite_run = false;                           // a new run may write among another's steps
};

namespace detail {

/// The rows of these options, in the order of the help.
void add_checkpoint_options(std::vector<Option>& rows);
void check_checkpointing(const Arguments& arguments, Mistakes& rules);

}  // namespace detail

}  // namespace megashard
