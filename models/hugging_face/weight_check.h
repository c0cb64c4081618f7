#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/values/tensor_info.h"
#include "framework/modules/multi_modal_module.h"

namespace megashard {

/// The weights that a Hugging Face directory's config.json asks for, to compare others with before
/// they are read or written. Settings that change neither names nor sizes do not matter: models
/// that are not computed here are compared too.
class WeightCheck {
 public:
  /// Builds the model on meta. Throws for a config.json that is none, or lacks sizes.
  explicit WeightCheck(const std::string& directory);

  /// Why nothing can be compared: no config.json, or a model that is not known here. Empty: it can.
  const std::string& unknown() const { return unknown_; }

  /// All names that the model's weights may have; empty: unknown().
  std::vector<std::string> names() const;

  /// Weights of a step on their way into files. Throws an error with the remedy when they are
  /// adapters, or, unless unknown(), not those of config.json in names and sizes. `step` is where
  /// they come from.
  void check_step(const std::vector<TensorInfo>& weights, const std::string& step) const;
  /// Those of the directory's own files. `are_renamed`: on their way into a step; else names without "model.", which
  /// a step must have, are an error, too.
  void check_files(const std::vector<TensorInfo>& weights, bool are_renamed) const;

 private:
  struct Problem {
    std::string text{};  // empty: none
    bool is_vocabulary = false;
    bool lacks_head = false;    // and nothing else
    bool lacks_prefix = false;  // "model." before the names
  };
  Problem problem_of(const std::vector<TensorInfo>& weights) const;

  std::string directory_;
  std::string unknown_;
  std::shared_ptr<MultiModalModule> model_;
};

}  // namespace megashard
