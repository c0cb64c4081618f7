#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/convert/weight_layout.h"
#include "framework/arguments/arguments.h"
#include "framework/modules/multi_modal_module.h"

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

  /// Where the weights that a Hugging Face directory's config.json describes lie in Megatron's
  /// model, its vocabulary padded until `vocab_divisor` divides it.
  using LayoutFactory = std::function<WeightLayout(const std::filesystem::path& hf_dir, int64_t vocab_divisor)>;

  /// For a family of that name, registered or not; throws if it has a layout already.
  void add_layout(std::string name, LayoutFactory factory);
  /// Chosen as by create(); an architecture without a layout is an error that lists those with one.
  WeightLayout layout(const std::filesystem::path& hf_dir, int64_t vocab_divisor) const;

 private:
  std::map<std::string, Factory> factories_;
  std::map<std::string, LayoutFactory> layouts_;
};

}  // namespace megashard
