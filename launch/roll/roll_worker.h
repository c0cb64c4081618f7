#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/argument_validation.h"
#include "framework/arguments/arguments.h"
#include "framework/arguments/key_log.h"
#include "framework/modules/fsdp2_config.h"
#include "launch/roll/roll_loss.h"

namespace megashard {

/// A worker of a ROLL configuration (strategies fsdp2_train and fsdp2_infer): settings that are not arguments. Defaults
/// are ROLL's.
struct RollWorker {
  std::string role;    ///< "actor_train"
  bool trains = true;  ///< strategy_name: fsdp2_train; else fsdp2_infer
  RollLoss loss{};
  Fsdp2Config sharding;  ///< strategy_config; sharding_size is derived from fsdp_size
  int64_t fsdp_size = 1;
  std::vector<int64_t> device_mapping;  ///< GPU of each rank, modulo its host's number; empty: any
  std::optional<int64_t> world_size;    ///< as in the file
  int64_t gradient_accumulation_steps = 1;
  double epochs = 1;
  int64_t prompt_length = 1024;
  std::optional<int64_t> response_length{};  ///< used without sequence_length
  int64_t max_steps = -1;                    ///< if above 0, replaces epochs
  int64_t warmup_steps = 0;
  double warmup_ratio = 0;  ///< used without warmup_steps
  bool recompute = true;    ///< all layers, including those of towers
  bool recompute_reentrant = false;
  int64_t infer_batch_size = 16;
  int64_t efsdp_size = 1;  ///< shard group size of experts distributed with ep_size
  /// --image-max-pixels and similar flags with which the data must have been prepared.
  std::map<std::string, int64_t> image_pixels{};
  std::optional<int64_t> lora_rank, lora_r;    ///< used with --lora-target-modules
  std::optional<double> lora_alpha;            ///< unset: twice the rank
  std::vector<std::string> unused;             ///< "exp_name", "actor_train.data_args": not read
  std::vector<std::string> dropped_by_roll{};  ///< "actor_train.model_args.lora_r": used here, but not by ROLL
};

/// Reads the worker `role`. Keys with a flag of ours, and ROLL's defaults, go to `arguments`, before the flags of the
/// command line. `${name}` is replaced by that key's value, and the files of Hydra's `defaults:` are merged. Throws
/// UsageError with file and line for unknown keys, wrong values, and unsupported features.
RollWorker read_roll_worker(const std::string& path, const std::string& role, Arguments& arguments,
                            KeyLog* log = nullptr);
RollWorker parse_roll_worker(const std::string& text, const std::string& path, const std::string& role,
                             Arguments& arguments, KeyLog* log = nullptr);

/// Applies settings of these parts that depend on the number of ranks, the data and the flags of the command line,
/// which take precedence: sharding, loss, batch sizes, length and warm-up of the training, recompute. Calls
/// `samples_of_epoch` only if epochs are used. Checks device_mapping against `world_size`. Call it before
/// validate_arguments.
void apply_roll_worker(RollWorker& worker, Arguments& arguments, int64_t world_size,
                       const std::function<int64_t()>& samples_of_epoch, const DiagnosticSink& sink,
                       const RunParts& parts = {});

/// Parses "list(range(0,16))", "[0, 1, 2]" or sums of these to device numbers, without evaluating them. Nullopt for
/// other text, or if a device is repeated.
std::optional<std::vector<int64_t>> parse_device_mapping(const std::string& text);

}  // namespace megashard
