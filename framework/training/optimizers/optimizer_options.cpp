#include "framework/training/optimizers/optimizer_options.h"

#include "framework/arguments/arguments.h"

namespace megashard {

OptimizerOptions optimizer_options(const Arguments& arguments) {
  OptimizerOptions options;
  options.kind = arguments.optimizer;
  options.lr = arguments.lr.value_or(0);
  options.weight_decay = arguments.weight_decay;
  options.beta1 = arguments.adam_beta1;
  options.beta2 = arguments.adam_beta2;
  options.eps = arguments.adam_eps;
  const auto dtype_of = [](MomentDtype dtype) { return dtype == MomentDtype::kBf16 ? at::kBFloat16 : at::kFloat; };
  options.exp_avg_dtype = dtype_of(arguments.exp_avg_dtype);
  options.exp_avg_sq_dtype = dtype_of(arguments.exp_avg_sq_dtype);
  options.momentum = arguments.sgd_momentum;
  options.overrides = param_group_overrides(arguments);
  auto& muon = options.muon;
  muon.momentum = arguments.muon_momentum;
  muon.use_nesterov = arguments.muon_use_nesterov;
  muon.split_qkv = arguments.muon_split_qkv;
  muon.newton_schulz.num_ns_steps = arguments.muon_num_ns_steps;
  muon.newton_schulz.coefficients = arguments.muon_coefficient_type;
  muon.newton_schulz.scale_mode = arguments.muon_scale_mode;
  muon.newton_schulz.extra_scale_factor = arguments.muon_extra_scale_factor;
  muon.newton_schulz.tf32 = arguments.muon_fp32_matmul_prec != MatmulPrecision::kHighest;
  return options;
}

OptimizerOptions for_model(OptimizerOptions options, const MegatronModule& model) {
  MuonOptions& muon = options.muon;
  muon.is_embedding_or_output_parameter = [&model](const std::string& name) {
    return model.is_embedding_or_output_parameter(name);
  };
  muon.is_stack_of_matrices = [&model](const std::string& name) { return model.is_stack_of_matrices(name); };
  muon.qkv_split_shapes = [&model](const std::string& name, const std::vector<int64_t>& sizes) {
    return model.qkv_split_shapes(name, sizes);
  };
  return options;
}

}  // namespace megashard
