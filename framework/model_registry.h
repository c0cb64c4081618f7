#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "framework/decoder_options.h"
#include "framework/multi_modal_module.h"

namespace megashard {

/// A network flag that the user wrote, with its value: compared with config.json.
struct ExplicitFlag {
  std::string name;  ///< "--num-layers"
  std::variant<bool, int64_t, double, std::string> value;
};

/// What a model is built from: a Hugging Face directory, or Megatron's flags.
struct ModelContext {
  std::filesystem::path hf_dir{};  ///< holds config.json; empty: `options` describe the network
  DecoderOptions options{};        ///< unused with hf_dir
  std::vector<ExplicitFlag> explicit_flags{};  ///< with hf_dir: a contradiction is an error
  bool untie_embeddings = false;  ///< with hf_dir: a head of its own, whatever config.json says
  std::optional<double> init_method_std{};  ///< with hf_dir: beats config.json's initializer_range
};

/// Names to factories. A program fills one by register_models() (models/register_models.h) and by
/// its own add().
class ModelRegistry {
 public:
  /// The model's parameters have sizes but no values: load weights or call init_weights().
  using Factory = std::function<std::shared_ptr<MultiModalModule>(const ModelContext&)>;

  /// Throws if the name is taken.
  void add(std::string name, Factory factory);
  /// `name` empty: config.json's architectures[0], else its model_type; "gpt" without hf_dir. An
  /// unknown name is an error that lists the known ones.
  std::shared_ptr<MultiModalModule> create(const ModelContext& context,
                                           std::string name = "") const;
  std::vector<std::string> names() const;

 private:
  std::map<std::string, Factory> factories_;
};

}  // namespace megashard
