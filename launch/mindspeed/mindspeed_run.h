#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/arguments.h"
#include "framework/arguments/key_log.h"
#include "framework/mistakes.h"
#include "framework/modules/fsdp2_config.h"
#include "launch/mindspeed/preparation.h"

namespace megashard {

/// What MindSpeed-MM's configurations say beside Megatron's flags, as far as it is not an argument
/// already: --mm-data, --mm-model and --mm-tool, the same sections beside gpt_args, and the file of
/// its native route.
struct MindSpeedRun {
  bool is_native = false;
  bool model_by_flag = false, length_by_flag = false;  ///< --hf-model, --train-iters; read before the sections
  std::optional<Preparation> data, validation;
  double validation_share = 0;             ///< val_rate
  bool prepares_data = false;              ///< the data section is read
  std::string model_id, model_place;       ///< and where it stands
  bool is_from_hf = false;                 ///< init_from_hf_path: the section's sizes mean nothing
  std::map<std::string, int64_t> sizes{};  ///< "text_decoder.num_layers": of a network that the section describes
  std::optional<double> router_aux_loss_coef;
  std::optional<bool> freezes_encoder, freezes_projector, freezes_decoder;
  std::vector<std::string> recompute_modules, offload_modules;  ///< patterns
  bool recompute_reentrant = true;
  bool recomputes = true, offloads = true;  ///< whether those count
  int64_t gradient_accumulation_steps = 1;
  std::optional<int64_t> epochs;
  double warmup_ratio = 0, decay_ratio = 1;
  std::vector<std::string> unused{};  ///< keys that nothing here reads
};

/// Reads the sections that the flags and files name, `config` (the YAML file, which may have them)
/// among them. Flags that the user gave win. None: there are no such sections.
std::optional<MindSpeedRun> read_mindspeed(const std::optional<std::string>& config, Arguments& arguments,
                                           Mistakes& mistakes, KeyLog* log = nullptr);

/// Whether the file is one of the native route: the sections of training and parallelism at its top.
bool is_native_configuration(const std::string& path);

/// What depends on the number of ranks and the data, before validate_arguments. Checks that the data
/// are prepared.
void apply_mindspeed(MindSpeedRun& run, Arguments& arguments, int64_t world_size,
                     const std::function<int64_t()>& samples_of_epoch, const DiagnosticSink& sink, Mistakes& mistakes);

/// What the model section says about the sharding.
void apply_mindspeed(const MindSpeedRun& run, Fsdp2Config& config);

/// Contradictions between the model section and config.json of --hf-model. Throws UsageErrors.
void check_mindspeed_model(const MindSpeedRun& run, const Arguments& arguments);

}  // namespace megashard
