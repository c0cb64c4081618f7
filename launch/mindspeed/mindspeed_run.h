#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "framework/arguments/argument_validation.h"
#include "framework/arguments/arguments.h"
#include "framework/arguments/key_log.h"
#include "framework/mistakes.h"
#include "framework/modules/fsdp2_config.h"
#include "launch/mindspeed/diffusion.h"
#include "launch/mindspeed/preparation.h"
#include "models/float8/float8_layers.h"

namespace megashard {

/// Settings of MindSpeed-MM's configurations besides Megatron's flags and those converted to arguments: --mm-data,
/// --mm-model and --mm-tool, the same sections beside gpt_args, and the file of its native route.
struct MindSpeedRun {
  bool is_native = false;
  bool model_by_flag = false, length_by_flag = false;  ///< --hf-model, --train-iters are given
  std::optional<Preparation> data, validation;
  double validation_share = 0;                  ///< val_rate
  std::optional<MindSpeedDiffusion> diffusion;  ///< set: the model section has a predictor
  bool prepares_data = false;                   ///< the data section is used
  std::string model_id, model_place;            ///< and its place in the file
  bool is_from_hf = false;                      ///< init_from_hf_path: sizes in the section are ignored
  std::string hf_folder;                        ///< that, or model_name_or_path
  std::string load;                             ///< training.load
  bool loads_hf = false;                        ///< and it holds Hugging Face weights
  std::string load_format = "auto", save_format = "auto";
  std::map<std::string, int64_t> sizes{};  ///< "text_decoder.num_layers": sizes of a network that the section describes
  /// Settings of pictures that config.json must have, too: "downsample_ratio": "0.5", and their places in the file.
  std::map<std::string, std::pair<std::string, std::string>> settings{};
  std::optional<double> router_aux_loss_coef;
  std::string loss_by_sample{};  ///< place of a loss_type per_sample_loss
  std::optional<bool> freezes_encoder, freezes_projector, freezes_audio, freezes_decoder;
  std::vector<std::string> recompute_modules, offload_modules;  ///< patterns
  bool recompute_reentrant = true;
  bool recomputes = true, offloads = true;  ///< whether those apply
  Float8Modules float8;                     ///< quantization_plan
  int64_t gradient_accumulation_steps = 1;
  std::optional<int64_t> epochs;
  double warmup_ratio = 0, decay_ratio = 1;
  std::vector<std::string> unused{};  ///< keys that are not read
};

/// Reads the sections of the files named by flags and of `config` (the YAML file, if it has any). The user's flags take
/// precedence. Nullopt if there are no such sections.
std::optional<MindSpeedRun> read_mindspeed(const std::optional<std::string>& config, Arguments& arguments,
                                           Mistakes& mistakes, KeyLog* log = nullptr);

/// True if a flag names the data, so that the data section has no part in the run.
bool has_own_data(const Arguments& arguments);

/// True for a file of the native route, which has sections of training and parallelism at the top level.
bool is_native_configuration(const std::string& path);

/// Applies the settings of these parts that depend on the number of ranks and the data. Checks that the data is
/// prepared. Call it before validate_arguments.
void apply_mindspeed(MindSpeedRun& run, Arguments& arguments, int64_t world_size,
                     const std::function<int64_t()>& samples_of_epoch, const DiagnosticSink& sink, Mistakes& mistakes,
                     const RunParts& parts = {});

/// Applies the model section to the FSDP2 configuration.
void apply_mindspeed(const MindSpeedRun& run, Fsdp2Config& config);

/// Compares the model section with config.json of --hf-model. Throws UsageErrors for contradictions.
void check_mindspeed_model(const MindSpeedRun& run, const Arguments& arguments);

}  // namespace megashard
