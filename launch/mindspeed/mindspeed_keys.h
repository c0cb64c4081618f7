#pragma once

#include <span>
#include <string>
#include <vector>

#include "framework/arguments/yaml_value.h"
#include "launch/mindspeed/mindspeed_run.h"

namespace megashard {

/// A key of a section of MindSpeed-MM's files.
struct MindSpeedKey {
  using Take = void (*)(const YamlValue& value, MindSpeedRun& run, Arguments& arguments);

  const char* name;
  Take take = nullptr;       ///< null: not read
  const char* only = "";     ///< without `take`: accepted values, comma-separated
  const char* why = "";      ///< reason for refusing other values; "": all are accepted
  bool null_counts = false;  ///< `take` receives null too, which otherwise means an absent key
};

/// Handling of unknown keys in a section.
enum class UnknownKey { kError, kErrorIfMisspelt };

struct MindSpeedSection {
  const char* path;  ///< "data.dataset_param.attr"
  std::span<const MindSpeedKey> keys;
  UnknownKey unknown = UnknownKey::kError;  ///< misspelt only: sections that describe a network
};

std::span<const MindSpeedSection> mindspeed_data_sections();       ///< below data
std::span<const MindSpeedSection> mindspeed_model_sections();      ///< below model
std::span<const MindSpeedSection> mindspeed_diffusion_sections();  ///< below model, of one with a predictor
std::span<const MindSpeedSection> mindspeed_feature_sections();    ///< below data, beside such a model
std::span<const MindSpeedSection> mindspeed_ltx2_sections();       ///< below model, of LTX-2
std::span<const MindSpeedSection> mindspeed_ltx2_data_sections();  ///< below data, beside it
std::span<const MindSpeedSection> mindspeed_training_sections();   ///< training and features of the native route
std::span<const MindSpeedKey> mindspeed_loss_keys();               ///< of loss_cfg, in model or features

/// Templates by which launch/preprocess prepares conversations turn by turn.
const std::vector<std::string>& turn_templates();

/// Sets a flag that the user did not give.
void set_unless_given(const char* flag, const YamlValue& value, Arguments& arguments);
template <const char* flag>
void mindspeed_flag(const YamlValue& value, MindSpeedRun&, Arguments& arguments) {
  set_unless_given(flag, value, arguments);
}

/// A supported model of MindSpeed-MM, by the name in its files.
struct MindSpeedModel {
  const char* id;
  const char* model_type;  ///< in config.json; several: comma-separated
  std::vector<const char*> encoder;
  std::vector<const char*> projector;
  bool always_recomputes;  ///< recomputes its blocks and layers regardless of the FSDP2 file
  std::vector<const char*> audio{};
};
std::span<const MindSpeedModel> mindspeed_models();
/// Null if the model is not supported.
const MindSpeedModel* find_mindspeed_model(const std::string& id);

}  // namespace megashard
