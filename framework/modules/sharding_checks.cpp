#include "framework/modules/sharding_checks.h"

#include <torch/nn/modules/batchnorm.h>

#include <algorithm>
#include <unordered_set>

#include "framework/arguments/argument_value.h"

namespace megashard::detail {
namespace {

constexpr size_t kNamed = 3;  // parameters listed in a message

/// "a.weight, b.weight, c.weight and 2 more"
std::string first_names(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < std::min(kNamed, names.size()); ++i) text += (i == 0 ? "" : ", ") + names[i];
  return names.size() > kNamed ? text + " and " + std::to_string(names.size() - kNamed) + " more" : text;
}

bool is_batch_norm(const torch::nn::Module& module) {
  using namespace torch::nn;
  return dynamic_cast<const BatchNorm1dImpl*>(&module) != nullptr ||
         dynamic_cast<const BatchNorm2dImpl*>(&module) != nullptr ||
         dynamic_cast<const BatchNorm3dImpl*>(&module) != nullptr;
}

std::string name_of(at::ScalarType dtype) {
  for (const char* name : {"fp16", "bf16", "fp32", "fp64"}) {
    if (parse_dtype(name) == dtype) return name;
  }
  return at::toString(dtype);
}

/// A module that cannot process the output of an earlier wrapped one; empty if there is none.
struct Clash {
  std::string path;
  at::ScalarType computes_in = at::kFloat;
};

Clash find_clash(const torch::nn::Module& model, const std::vector<NamedModule>& wrapped,
                 const MixedPrecisionPolicy& policy) {
  const bool casts = policy.param_dtype && policy.cast_forward_inputs;
  std::unordered_set<const torch::nn::Module*> inside;  // modules that get inputs of the right dtype
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    const torch::nn::Module& module = *item.value();
    if (&module != wrapped.front().module && !(casts && is_fsdp_module(module))) continue;
    for (const auto& part : module.modules()) inside.insert(part.get());
  }
  bool behind = false;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    const torch::nn::Module* module = item.value().get();
    behind = behind || module == wrapped.front().module;
    if (!behind || inside.contains(module)) continue;
    for (const auto& parameter : module->parameters(/*recurse=*/false)) {
      const auto computes_in = policy.param_dtype.value_or(parameter.scalar_type());
      if (parameter.is_floating_point() && computes_in != *policy.output_dtype) return {item.key(), computes_in};
    }
  }
  return {};
}

}  // namespace

HookedModule& hooked_module(const NamedModule& named, const std::string& key) {
  auto* hooked = dynamic_cast<HookedModule*>(named.module);
  require(hooked != nullptr, key + " names '" + named.path + "', which runs no hooks: make it a Hooked<M>.");
  return *hooked;
}

void warn_of_keys_without_effect(const Fsdp2Config& config, bool on_cpu, const DiagnosticSink& sink) {
  if (!sink) return;
  const Fsdp2Config defaults;
  const auto warn = [&](bool changed, const std::string& key, const std::string& why) {
    if (changed)
      sink(Severity::kWarning, "FSDP2: " + key_in_file(config, key) + " has no effect: " + why + "; leave it out");
  };
  const auto& dtypes = config.mixed_precision;
  warn(config.align_fsdp_param_groups, "align_fsdp_param_groups", "every parameter keeps its own place in the buffers");
  warn(config.reshard_local_experts != defaults.reshard_local_experts, "reshard_local_experts",
       "experts are sharded over all ranks that have them");
  warn(config.offload_to_cpu && on_cpu, "offload_to_cpu",
       "there is no GPU, and the parameters are in the CPU's memory");
  warn(config.pin_memory != defaults.pin_memory && !config.offload_to_cpu, "pin_memory",
       "it belongs to offload_to_cpu, which is false");
  warn(!dtypes.cast_forward_inputs && !dtypes.param_dtype, "cast_forward_inputs",
       "inputs are cast to param_dtype, which is not set");
  warn(config.min_offloaded_tensor_size != defaults.min_offloaded_tensor_size && config.offload_modules.empty(),
       "min_offloaded_tensor_size", "it belongs to offload_modules, which names none");
  warn(config.use_reentrant != defaults.use_reentrant && !config.native_patterns && config.recompute_modules.empty() &&
           config.recompute_save_ops.empty(),
       "use_reentrant", "it belongs to recompute_modules, which names none");
  warn(config.communication_memory.has_value() && on_cpu, "communication_memory",
       "it is NCCL's, which needs GPUs, and there is none");
  warn(!config.fp8_all_gather_modules.empty() && !config.fp8_all_gather, "fp8_all_gather_modules",
       "it belongs to fp8_all_gather, which is false");
  warn(config.ignored_modules_replicated && config.ignored_modules.empty(), "ignored_modules_replicated",
       "it belongs to ignored_modules, which names none");
}

void check_reshard(const Fsdp2Config& config, int shard) {
  const auto& reshard = config.reshard_after_forward;
  const bool fits =
      reshard.kind != ReshardAfterForward::Kind::kTo || (reshard.ranks <= shard && shard % reshard.ranks == 0);
  require(fits, "reshard_after_forward: " + std::to_string(reshard.ranks) + " in the FSDP2 file does not divide the " +
                    std::to_string(shard) +
                    " ranks that share the parameters; give true, false or a number that does.");
}

void check_output_dtype(const torch::nn::Module& model, const std::vector<NamedModule>& wrapped,
                        const MixedPrecisionPolicy& policy) {
  if (!policy.output_dtype || wrapped.empty()) return;
  const Clash clash = find_clash(model, wrapped, policy);
  if (clash.path.empty()) return;
  const std::string output = name_of(*policy.output_dtype);
  const std::string remedy =
      policy.param_dtype ? "wrap that too (sub_modules_to_wrap)" : "set param_dtype: " + output + " as well";
  throw UsageError("output_dtype: " + output + " in the FSDP2 file makes " + wrapped.front().path + " return " +
                   output + ", but " + clash.path + " behind it computes in " + name_of(clash.computes_in) + "; " +
                   remedy + ", or leave output_dtype out.");
}

void check_batch_norms(const torch::nn::Module& model, const MixedPrecisionPolicy& policy) {
  if (!policy.param_dtype) return;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    const auto weights = item.value()->named_parameters(/*recurse=*/false);
    const auto statistics = item.value()->named_buffers(/*recurse=*/false);
    const auto* mean = statistics.find("running_mean");
    if (!is_batch_norm(*item.value()) || weights.is_empty() || mean == nullptr || !mean->defined()) continue;
    if (!is_sharded(weights.front().value()) || mean->scalar_type() == *policy.param_dtype) continue;
    const std::string computed = name_of(*policy.param_dtype);
    throw UsageError("param_dtype: " + computed + " in the FSDP2 file does not go with " + item.key() +
                     ", a batch norm whose running statistics are in " + name_of(mean->scalar_type()) +
                     ": on a CPU it takes weights and statistics of one dtype only; give buffer_dtype: " + computed +
                     " as well, or name it in ignored_modules.");
  }
}

void warn_of_whole_parameters(const torch::nn::Module& model, const std::vector<at::Tensor>& ignored,
                              const DiagnosticSink& sink) {
  if (!sink) return;
  std::vector<std::string> names;
  for (const auto& item : model.named_parameters()) {
    const bool is_ignored =
        std::ranges::any_of(ignored, [&](const at::Tensor& each) { return each.is_same(item.value()); });
    if (!is_ignored && !is_sharded(item.value())) names.push_back(item.key());
  }
  if (names.empty()) return;
  const bool one = names.size() == 1;
  sink(Severity::kWarning, "FSDP2: " + std::to_string(names.size()) + (one ? " parameter is" : " parameters are") +
                               " in no unit (" + first_names(names) + "): every rank holds " + (one ? "it" : "them") +
                               " whole, with the optimizer's state; end _fully_shard with fully_shard(*this, "
                               "options()), which takes what is left");
}

void check_ignored_parameters(const NamedParameters& ignored, const Fsdp2Config& config, int ranks,
                              const DiagnosticSink& sink) {
  std::vector<std::string> trained;
  size_t of_other_dtype = 0;
  for (const auto& [name, parameter] : ignored) {
    const auto& dtype = config.mixed_precision.param_dtype;
    if (dtype && parameter.is_floating_point() && parameter.scalar_type() != *dtype) ++of_other_dtype;
    if (parameter.requires_grad()) trained.push_back(name);
  }
  if (of_other_dtype > 0 && sink) {
    sink(Severity::kWarning, "FSDP2: ignored_modules keep the dtype of their parameters, which is not "
                             "param_dtype: such a module must cast its inputs itself");
  }
  require(trained.empty() || ranks == 1 || config.ignored_modules_replicated,
          "ignored_modules of the FSDP2 file leaves " + std::to_string(trained.size()) +
              (trained.size() == 1 ? " trainable parameter" : " trainable parameters") + " out of every reduction (" +
              first_names(trained) + "), so each of the " + std::to_string(ranks) +
              " ranks would train its own copy; give ignored_modules_replicated: true, which "
              "averages their gradients, freeze them, or do not ignore them.");
}

}  // namespace megashard::detail
