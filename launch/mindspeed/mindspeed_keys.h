#pragma once

#include <span>
#include <vector>

#include "framework/arguments/yaml_value.h"
#include "launch/mindspeed/mindspeed_run.h"

namespace megashard {

/// A key of one section of MindSpeed-MM's files.
struct MindSpeedKey {
  using Take = void (*)(const YamlValue& value, MindSpeedRun& run, Arguments& arguments);

  const char* name;
  Take take = nullptr;       ///< null: nothing here reads it
  const char* only = "";     ///< without `take`: values that ask for nothing that is missing, by commas
  const char* why = "";      ///< others are refused with this reason; "": all are let through
  bool null_counts = false;  ///< `take` gets null too, which elsewhere is as if the key were absent
};

/// What an unknown key means in a section.
enum class UnknownKey { kError, kErrorIfMisspelt };

struct MindSpeedSection {
  const char* path;  ///< "data.dataset_param.attr"
  std::span<const MindSpeedKey> keys;
  UnknownKey unknown = UnknownKey::kError;  ///< misspelt only: of sections that describe a network
};

std::span<const MindSpeedSection> mindspeed_data_sections();      ///< below data
std::span<const MindSpeedSection> mindspeed_model_sections();     ///< below model
std::span<const MindSpeedSection> mindspeed_training_sections();  ///< training and features of the native route
std::span<const MindSpeedKey> mindspeed_loss_keys();              ///< of loss_cfg, in model or in features

/// A value for a flag that the user did not give.
void set_unless_given(const char* flag, const YamlValue& value, Arguments& arguments);
template <const char* flag>
void mindspeed_flag(const YamlValue& value, MindSpeedRun&, Arguments& arguments) {
  set_unless_given(flag, value, arguments);
}

/// A model of MindSpeed-MM that is here, under the name of its files.
struct MindSpeedModel {
  const char* id;
  const char* model_type;  ///< of config.json
  std::vector<const char*> encoder;
  std::vector<const char*> projector;
  bool always_recomputes;  ///< it recomputes its blocks and layers whatever the FSDP2 file says
};
std::span<const MindSpeedModel> mindspeed_models();
/// Null: it is not here.
const MindSpeedModel* find_mindspeed_model(const std::string& id);

}  // namespace megashard
