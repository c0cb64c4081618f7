#pragma once

#include <torch/version.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/convert/tensor_stream.h"
#include "framework/arguments/argument_view.h"
#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/multi_modal_module.h"

namespace megashard {

class HfConfig;

/// Maps names to factories. Filled by register_models() (models/register_models.h) and by a program's add().
class ModelRegistry {
 public:
  /// Creates a model from validated arguments: --hf-model's config.json or the network flags. Parameters have sizes but
  /// no values: load weights or call init_weights().
  using Factory = std::function<std::shared_ptr<MultiModalModule>(const Arguments&)>;

  /// The same for a model that config.json describes; `config`: null without --hf-model.
  using ConfigFactory = std::function<std::shared_ptr<MultiModalModule>(const Arguments&, const HfConfig* config)>;

  /// The same for a model that is compiled on its own (ModelPlugin).
  using PluginFactory = std::function<std::shared_ptr<MultiModalModule>(const ArgumentView&)>;

  /// Throw if the name is taken.
  void add(std::string name, ConfigFactory factory);
  void add(std::string name, Factory factory);
  void add(std::string name, PluginFactory factory);
  /// `name` empty: config.json's architectures[0], else its model_type or _class_name; "gpt" without --hf-model. Throws
  /// an error that lists the known names if it is unknown.
  /// `config`: --hf-model's, if it is read already.
  std::shared_ptr<MultiModalModule> create(const Arguments& arguments, std::string name = "",
                                           const HfConfig* config = nullptr) const;
  std::vector<std::string> names() const;

  /// Mapping of the weights that a Hugging Face config.json describes to Megatron's model, with the vocabulary padded
  /// to a multiple of `vocab_divisor`.
  using LayoutFactory = std::function<MegatronLayout(const HfConfig& config, int64_t vocab_divisor)>;

  /// Adds the layout of a family, registered or not. Throws if it has one already.
  void add_layout(std::string name, LayoutFactory factory);
  /// Selected as by create(). Throws an error that lists the supported architectures if there is no layout.
  MegatronLayout layout(const std::filesystem::path& hf_dir, int64_t vocab_divisor) const;

 private:
  std::map<std::string, ConfigFactory> factories_;
  std::map<std::string, LayoutFactory> layouts_;
};

/// Exported by a library for --model-plugin through a C function named kModelPluginSymbol:
///
///   extern "C" const megashard::ModelPlugin* megashard_model_plugin() {
///     static const megashard::ModelPlugin plugin{.add_models = [](megashard::ModelRegistry&
///     models) {
///       models.add("mine", [](const megashard::ArgumentView& arguments) {
///         return std::make_shared<MyModel>(arguments); });
///     }};
///     return &plugin;
///   }
///
/// All fields except add_models keep the values from the plugin's compilation, so that the program detects a plugin
/// built against another megashard or LibTorch. Arguments are read by name, so their structs may differ.
struct ModelPlugin {
  /// Changes with this struct. Read before other fields.
  uint32_t version = 2;
  const char* libtorch = TORCH_VERSION;
  /// Sizes of structs that plugin and program share.
  size_t batch_bytes = sizeof(Batch);
  size_t model_bytes = sizeof(MultiModalModule);
  size_t mixin_bytes = sizeof(FSDP2Mixin);
  /// Called once before the model is created.
  void (*add_models)(ModelRegistry& models) = nullptr;
};

inline constexpr const char* kModelPluginSymbol = "megashard_model_plugin";

}  // namespace megashard
