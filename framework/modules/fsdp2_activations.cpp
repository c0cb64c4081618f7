// Recompute and activation offload of FSDP2Mixin.
#include <algorithm>

#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/sharding_checks.h"
#include "framework/recompute/activation_offload.h"
#include "framework/recompute/recompute.h"
#include "parallel/collectives/device_mesh.h"

namespace megashard {

using detail::hooked_module;

std::vector<NamedModule> FSDP2Mixin::select_parts(const std::vector<std::string>& parts, std::optional<int64_t> layers,
                                                  const std::string& flag) {
  std::vector<NamedModule> modules;
  for (const auto& part : parts) {
    const auto patterns = patterns_of_part(part);
    const std::string name = dynamic_cast<const HookedModule&>(module()).class_name();
    require(!patterns.empty(), flag + ": " + name + " has no " + part + ".");
    for (auto& each : select(patterns, flag + " " + part)) modules.push_back(std::move(each));
  }
  const auto count = static_cast<int64_t>(modules.size());
  require(!layers || *layers <= count, flag + " wants " + std::to_string(layers.value_or(0)) + " layers of " +
                                           std::to_string(count) + "; give less.");
  if (layers) modules.resize(static_cast<size_t>(*layers));
  return modules;
}

void FSDP2Mixin::set_recompute_modules_to_wrap() {
  const auto& plan = request_.activations;
  const auto& in_file = request_.config.recompute_modules;
  require(plan.recompute.empty() || in_file.empty(),
          "--recompute-granularity and recompute_modules in the FSDP2 file exclude each "
          "other; keep one.");
  require(request_.config.recompute_save_ops.empty() || !in_file.empty(),
          "recompute_save_ops in the FSDP2 file needs recompute_modules there.");
  recompute_matching(in_file);
  auto parts = select_parts(plan.recompute, plan.recompute_layers, "--recompute-granularity");
  if (plan.recompute_towers) {
    auto layers =
        select_modules(module(), patterns_of_part("tower_layer"), "recompute", Strictness::kStrict, {}).modules;
    std::erase_if(layers, [](const NamedModule& layer) {
      const auto parameters = layer.module->parameters();
      return std::ranges::none_of(parameters, [](const at::Tensor& each) { return each.requires_grad(); });
    });
    if (!layers.empty() && request_.sink) {
      const std::string which = layers.size() == 1
                                    ? "the layer of the tower (" + layers.front().path + "), which is trained"
                                    : std::to_string(layers.size()) + " layers of the tower (" + layers.front().path +
                                          " .. " + layers.back().path + "), which are trained";
      request_.sink(Severity::kNotice, "FSDP2: recompute: also " + which);
    }
    parts.insert(parts.end(), layers.begin(), layers.end());
  }
  RecomputeOptions options;
  options.use_reentrant = plan.recompute_reentrant;
  for (const auto& part : parts) recompute(hooked_module(part, "--recompute-granularity"), options);
}

void FSDP2Mixin::recompute_matching(const std::vector<std::string>& patterns) {
  RecomputeOptions options;
  options.use_reentrant = request_.config.use_reentrant;
  options.save_outputs_of = request_.config.recompute_save_ops;
  for (const auto& each : select(patterns, "recompute_modules"))
    recompute(hooked_module(each, "recompute_modules"), options);
}

void FSDP2Mixin::set_activation_offload() {
  const auto& plan = request_.activations;
  const auto& in_file = request_.config.offload_modules;
  require(plan.offload.empty() || in_file.empty(),
          "offload flags and offload_modules in the FSDP2 file exclude each other; keep one.");
  auto modules = select_parts(plan.offload, plan.offload_layers, "activation offload");
  for (auto& each : select(in_file, "offload_modules")) modules.push_back(std::move(each));
  if (modules.empty()) return;
  if (options_.mesh->device().is_cpu() && request_.sink) {
    request_.sink(Severity::kWarning, "activations are offloaded to the memory where they are: on CPUs this costs time "
                                      "and memory, and is good for tests only");
  }
  ActivationOffload offload(
      {.min_elements = in_file.empty() ? plan.min_offloaded_elements : request_.config.min_offloaded_tensor_size});
  for (const auto& each : modules) offload.add(hooked_module(each, "activation offload"));
}

}  // namespace megashard
