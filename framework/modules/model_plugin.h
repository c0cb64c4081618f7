#pragma once

#include <torch/version.h>

#include <cstddef>
#include <cstdint>

#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/model_registry.h"
#include "framework/modules/multi_modal_module.h"

namespace megashard {

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
