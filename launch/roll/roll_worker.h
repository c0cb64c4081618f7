#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/arguments.h"
#include "framework/arguments/key_log.h"
#include "framework/modules/fsdp2_config.h"

namespace megashard {

/// One worker of a ROLL configuration (strategies fsdp2_train and fsdp2_infer) as far as it is not
/// an argument already. Defaults are ROLL's.
struct RollWorker {
  std::string role;      ///< "actor_train"
  bool trains = true;    ///< strategy_name: fsdp2_train; else fsdp2_infer
  Fsdp2Config sharding;  ///< strategy_config; sharding_size follows from fsdp_size
  int64_t fsdp_size = 1;
  std::vector<int64_t> device_mapping;  ///< the GPU of each rank, modulo those of its host; empty: any
  std::optional<int64_t> world_size;    ///< as written
  int64_t gradient_accumulation_steps = 1;
  double epochs = 1;
  int64_t max_steps = -1;  ///< above 0 instead of epochs
  int64_t warmup_steps = 0;
  double warmup_ratio = 0;  ///< counts when there are no warmup_steps
  bool recompute = true;    ///< every layer, those of towers too
  bool recompute_reentrant = false;
  int64_t infer_batch_size = 16;
  int64_t efsdp_size = 1;  ///< ranks that share one of the experts that ep_size spreads
  /// --image-max-pixels and its like, which the data must have been prepared with.
  std::map<std::string, int64_t> image_pixels{};
  std::optional<int64_t> lora_rank, lora_r;    ///< count where there are --lora-target-modules
  std::optional<double> lora_alpha;            ///< unset: twice the rank
  std::vector<std::string> unused;             ///< "exp_name", "actor_train.data_args": read by nothing here
  std::vector<std::string> dropped_by_roll{};  ///< "actor_train.model_args.lora_r": count here alone
};

/// Reads the worker `role`: what has a flag of ours goes to `arguments`, together with ROLL's
/// defaults, before the flags of the command line. `${name}` is replaced by that key's value, and
/// the files of Hydra's `defaults:` are merged.
/// Throws UsageError with file and line for unknown keys, wrong values, and keys whose function is
/// missing here.
RollWorker read_roll_worker(const std::string& path, const std::string& role, Arguments& arguments,
                            KeyLog* log = nullptr);
RollWorker parse_roll_worker(const std::string& text, const std::string& path, const std::string& role,
                             Arguments& arguments, KeyLog* log = nullptr);

/// What depends on the number of ranks, the data and the flags of the command line, which win:
/// sharding, batches, length and warm-up of the training, recompute. `samples_of_epoch` is called
/// only when epochs count. Checks device_mapping against `world_size`. Before validate_arguments.
void apply_roll_worker(RollWorker& worker, Arguments& arguments, int64_t world_size,
                       const std::function<int64_t()>& samples_of_epoch, const DiagnosticSink& sink);

/// "list(range(0,16))", "[0, 1, 2]" or sums of such -> the devices. Parsed, never evaluated. None:
/// neither of these, or a device twice.
std::optional<std::vector<int64_t>> parse_device_mapping(const std::string& text);

}  // namespace megashard
