#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "framework/diagnostics.h"

namespace megashard {

struct Arguments;
struct Option;
class Mistakes;

/// The model that Megatron's flags of the network describe.
inline constexpr const char* kModelOfFlags = "gpt";

/// The model's source besides Megatron's flags.
struct ModelSourceArguments {
  std::optional<std::string> hf_model;      // Hugging Face directory
  bool from_scratch = false;                // with hf_model: its config, but freshly initialised weights
  std::optional<std::string> model_plugin;  // a library that registers models
  std::optional<std::string> model;         // a registered name; unset: by hf_model or the flags

  /// A model of a plugin takes what it likes from the flags.
  bool is_own_model() const { return model_plugin && model != kModelOfFlags; }
};

struct InitializationArguments {
  int64_t seed = 1234;
  bool data_parallel_random_init = false;
  double init_method_std = 0.02;
  bool init_method_xavier_uniform = false;
  bool perform_initialization = true;
  bool use_cpu_initialization = false;
  bool init_model_with_meta_device = false;
};

/// Dropouts of the model; weight decay and Adam are in OptimizerArguments.
struct RegularizationArguments {
  double attention_dropout = 0.1;
  double hidden_dropout = 0.1;
};

struct PrecisionArguments {
  bool bf16 = false;                  // parameters are STORED in bf16; see docs/arguments.md
  bool downcast_to_bf16 = false;      // refused, with the reason
  std::string params_dtype = "fp32";  // (derived) fp32 or bf16
};

namespace detail {

/// The rows of these options, in the order of the help.
void add_model_options(std::vector<Option>& rows);
void check_model_source(const Arguments& arguments, Mistakes& rules);
void derive_precision(Arguments& arguments, const DiagnosticSink& sink);

}  // namespace detail

}  // namespace megashard
