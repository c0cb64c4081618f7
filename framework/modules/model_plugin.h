#pragma once

#include <torch/version.h>

#include <cstddef>
#include <cstdint>

#include "framework/arguments/arguments.h"
#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/model_registry.h"
#include "framework/modules/multi_modal_module.h"

namespace megashard {

/// What a library for --model-plugin exports, by one C function of the name kModelPluginSymbol:
///
///   extern "C" const megashard::ModelPlugin* megashard_model_plugin() {
///     static const megashard::ModelPlugin plugin{.add_models = [](megashard::ModelRegistry&
///     models) {
///       models.add("mine", [](const megashard::Arguments& arguments) {
///         return std::make_shared<MyModel>(arguments); });
///     }};
///     return &plugin;
///   }
///
/// All fields but add_models keep the values that they have when the plugin is compiled: by them
/// the program knows a plugin that was built against another megashard or another LibTorch.
struct ModelPlugin {
  /// Changes with this struct; read before anything else.
  uint32_t version = 1;
  const char* libtorch = TORCH_VERSION;
  /// Layouts that the plugin and the program share.
  size_t arguments_bytes = sizeof(Arguments);
  size_t batch_bytes = sizeof(Batch);
  size_t model_bytes = sizeof(MultiModalModule);
  size_t mixin_bytes = sizeof(FSDP2Mixin);
  /// Called once, before the model is made.
  void (*add_models)(ModelRegistry& models) = nullptr;
};

inline constexpr const char* kModelPluginSymbol = "megashard_model_plugin";

}  // namespace megashard
