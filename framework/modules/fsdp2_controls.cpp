#include "framework/modules/fsdp2_controls.h"

#include <unordered_set>

#include "framework/modules/megatron_module.h"
#include "parallel/collectives/agreement.h"
#include "parallel/fsdp/float8_all_gather.h"

namespace megashard::detail {

void set_communication(torch::nn::Module& model, const Fsdp2Config& config, bool on_cpu) {
  if (config.reduce_scatter_max_input_buffers > 1)
    set_reduce_scatter_max_input_buffers(model, config.reduce_scatter_max_input_buffers);
  if (config.separate_reduce_scatter_group) set_separate_reduce_scatter_group(model);
  if (!config.communication_memory || on_cpu) return;
  const auto take = [&](torch::nn::Module& module) {
    if (!is_fsdp_module(module)) return;
    if (*config.communication_memory == GroupMemory::kRegistered) {
      set_allocate_memory_from_process_group(module, true);
    } else {
      set_symm_mem_for_comm(module, true);
    }
  };
  take(model);
  for (const auto& module : model.modules(/*include_self=*/false)) take(*module);
}

void gather_in_fp8(torch::nn::Module& model, const Fsdp2Config& config, const std::vector<NamedModule>& modules,
                   const DiagnosticSink& sink) {
  if (!config.fp8_all_gather) return;
  std::unordered_set<const c10::TensorImpl*> named;
  for (const auto& each : modules) {
    for (const auto& parameter : each.module->parameters()) named.insert(parameter.unsafeGetTensorImpl());
  }
  const auto* megatron = dynamic_cast<const MegatronModule*>(&model);
  const auto is_meant = [&](const std::string& name, const at::Tensor& parameter) {
    if (!config.fp8_all_gather_modules.empty()) return named.contains(parameter.unsafeGetTensorImpl());
    return megatron == nullptr || !megatron->is_embedding_or_output_parameter(name);
  };
  const auto extension = std::make_shared<Float8AllGather>(*config.fp8_all_gather);
  int64_t count = 0;
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (parameter.dim() < 2 || !is_sharded(parameter) || !is_meant(item.key(), parameter)) continue;
    set_all_gather_extension(parameter, extension);
    ++count;
  }
  if (!sink) return;
  const auto told = std::to_string(count) + (count == 1 ? " matrix is" : " matrices are");
  sink(count == 0 ? Severity::kWarning : Severity::kNotice,
       count == 0 ? "FSDP2: fp8_all_gather has no effect: it is for matrices, and none is meant; leave it out"
                  : "FSDP2: fp8_all_gather: " + told + " gathered as float8_e4m3fn");
}

void regroup(torch::nn::Module& model, const UnitPlan& plan) {
  try {
    apply_unit_plan(model, plan);
  } catch (const c10::ValueError& error) {
    throw UsageError("--fsdp2-plan: " + error_text(error) + "; make the plan anew with auto, or change it.");
  }
}

}  // namespace megashard::detail
