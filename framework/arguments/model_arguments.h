#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "framework/diagnostics.h"

namespace megashard {

struct Arguments;
struct Option;
struct RunParts;
class Mistakes;

/// Name of the model that Megatron's network flags describe.
inline constexpr const char* kModelOfFlags = "gpt";

/// Sources of the model besides Megatron's flags.
struct ModelSourceArguments {
  std::optional<std::string> hf_model;                    // Hugging Face directory
  bool from_scratch = false;                              // with hf_model: use its config, but initialise the weights
  std::optional<std::string> model_plugin;                // shared library that registers models
  std::optional<std::string> model;                       // a registered name; unset: chosen by hf_model or the flags
  std::optional<std::string> mm_data, mm_model, mm_tool;  // MindSpeed-MM's JSON files

  /// True for a plugin's model, which reads only the network flags that it needs.
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

/// Dropout of the model; weight decay and Adam are in OptimizerArguments.
struct RegularizationArguments {
  double attention_dropout = 0.1;
  double hidden_dropout = 0.1;
};

enum class Fp8Format { kE4m3, kHybrid };
enum class Fp8Recipe { kDelayed, kTensorwise, kMxfp8 };
enum class Fp4Format { kE2m1 };
enum class Fp4Recipe { kNvfp4 };

struct PrecisionArguments {
  bool fp16 = false;                  // parameters are STORED in fp16; see docs/arguments.md
  bool bf16 = false;                  // parameters are stored in bf16
  bool downcast_to_bf16 = false;      // rounds loaded weights to bf16
  std::string params_dtype = "fp32";  // (derived) fp32, fp16 or bf16
  bool gradients_in_fp16 = false;     // (derived) fp16, or set by the program if the FSDP2 file has fp16
  std::optional<double> loss_scale;   // constant; unset or 0: dynamic if gradients use fp16
  double initial_loss_scale = 4294967296;
  double min_loss_scale = 1;
  int64_t loss_scale_window = 1000;
  int64_t hysteresis = 2;
  std::optional<Fp8Format> fp8_format;         // unset: no fp8
  Fp8Recipe fp8_recipe = Fp8Recipe::kDelayed;  // Megatron's default, which --fp8-format refuses
  std::optional<Fp4Format> fp4_format;         // unset: no fp4
  Fp4Recipe fp4_recipe = Fp4Recipe::kNvfp4;
  bool first_last_layers_bf16 = false;
  int64_t num_layers_at_start_in_bf16 = 1, num_layers_at_end_in_bf16 = 1;

  bool has_constant_loss_scale() const { return loss_scale.value_or(0) != 0; }
};

namespace detail {

/// Adds the rows of these options, in the order of the help.
void add_model_options(std::vector<Option>& rows);
void check_model_source(const Arguments& arguments, Mistakes& rules);
void check_precision(const Arguments& arguments, Mistakes& rules);
void derive_precision(Arguments& arguments, const RunParts& parts, const DiagnosticSink& sink);

}  // namespace detail

}  // namespace megashard
