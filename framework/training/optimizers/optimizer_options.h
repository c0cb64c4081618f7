#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "framework/arguments/optimizer_arguments.h"
#include "framework/modules/megatron_module.h"
#include "framework/training/optimizers/newton_schulz.h"

namespace megashard {

struct MuonOptions {
  double momentum = 0.9;
  bool use_nesterov = false;
  NewtonSchulzOptions newton_schulz{};
  bool split_qkv = true;
  /// Matrices that AdamW steps, by their names; null: none.
  std::function<bool(const std::string& name)> is_embedding_or_output_parameter{};
  /// MegatronModule::is_stack_of_matrices; null: there are none.
  std::function<bool(const std::string& name)> is_stack_of_matrices{};
  /// Rows of the projections in a fused matrix (MegatronModule::qkv_split_shapes); null: there are none.
  std::function<std::vector<int64_t>(const std::string& name, const std::vector<int64_t>& sizes)> qkv_split_shapes{};
};

struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kAdam;
  double lr = 1e-3;
  double weight_decay = 0.01;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  at::ScalarType exp_avg_dtype = at::kFloat;  ///< AdamW's moments of fp32 parameters: fp32 or bf16
  at::ScalarType exp_avg_sq_dtype = at::kFloat;
  double momentum = 0.9;  ///< SGD
  MuonOptions muon{};
  std::vector<ParamGroupOverride> overrides{};
  /// Gradients of another dtype than what is stepped are cast so many elements at once; a multiple
  /// of 64.
  int64_t cast_elements = int64_t{1} << 24;
};

/// Reads validated arguments.
OptimizerOptions optimizer_options(const Arguments& arguments);
/// Adds what Muon must know of a model's parameters. `model` must outlive what is made of them.
OptimizerOptions for_model(OptimizerOptions options, const MegatronModule& model);

}  // namespace megashard
