#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "checkpoint/dcp/step_names.h"
#include "checkpoint/values/tensor_info.h"
#include "framework/modules/multi_modal_module.h"

namespace megashard {

/// The weights described by a Hugging Face directory's config.json, for checks before others are read or written.
/// Settings that change neither names nor sizes are ignored, so unsupported models can be checked too.
class WeightCheck {
 public:
  /// Builds the model on meta. Throws for an invalid config.json, or if sizes are missing.
  explicit WeightCheck(const std::string& directory);

  /// Reason why nothing can be checked: no config.json, or an unknown model. Empty if it can.
  const std::string& unknown() const { return unknown_; }

  /// Names of the model's weights in steps; empty if unknown().
  ModelNames names() const;
  /// Stem of the weights' file names (HfSaveOptions::stem).
  const std::string& stem() const { return stem_; }
  /// ModelFamily::write_part; null: config.json is right for these weights alone.
  std::function<void(nlohmann::ordered_json& config)> change_config() const { return change_config_; }
  /// How files have the weights; the default if the family is unknown.
  const WeightMap& weights() const { return weights_; }

  /// Checks weights of a step before they are written to files. Throws an error with the remedy for adapters and,
  /// unless unknown(), for names and sizes that differ from config.json. `step` is their source.
  void check_step(const std::vector<TensorInfo>& weights, const std::string& step) const;
  /// Checks the directory's own weights. Unless `are_renamed` (when they are converted to a step), names without
  /// "model.", which a step requires, are errors too.
  void check_files(const std::vector<TensorInfo>& weights, bool are_renamed) const;

 private:
  struct Problem {
    std::string text{};  // empty: none
    bool is_vocabulary = false;
    bool lacks_head = false;    // and nothing else is missing
    bool lacks_prefix = false;  // names lack "model."
  };
  Problem problem_of(const std::vector<TensorInfo>& weights) const;

  std::string directory_;
  std::string stem_;
  std::string unknown_;
  std::function<void(nlohmann::ordered_json& config)> change_config_;
  std::shared_ptr<MultiModalModule> model_;  // null: unknown
  WeightMap weights_;
};

}  // namespace megashard
