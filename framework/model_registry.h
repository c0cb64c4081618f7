#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "framework/arguments.h"
#include "framework/multi_modal_module.h"

namespace megashard {

/// Names to factories. A program fills one by register_models() (models/register_models.h) and by
/// its own add().
class ModelRegistry {
 public:
  /// From validated arguments: --hf-model's config.json, or the flags of the network. The model's
  /// parameters have sizes but no values: load weights or call init_weights().
  using Factory = std::function<std::shared_ptr<MultiModalModule>(const Arguments&)>;

  /// Throws if the name is taken.
  void add(std::string name, Factory factory);
  /// `name` empty: config.json's architectures[0], else its model_type; "gpt" without --hf-model.
  /// An unknown name is an error that lists the known ones.
  std::shared_ptr<MultiModalModule> create(const Arguments& arguments, std::string name = "") const;
  std::vector<std::string> names() const;

 private:
  std::map<std::string, Factory> factories_;
};

}  // namespace megashard
