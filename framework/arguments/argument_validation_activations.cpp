#include <algorithm>
#include <utility>

#include "framework/arguments/argument_validation.h"

namespace megashard::detail {

namespace {

using std::to_string;

bool names_part(const std::vector<std::string>& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void check_full(const Arguments& arguments, Mistakes& rules) {
  rules.require(arguments.recompute_method.has_value(),
                "--recompute-granularity full needs --recompute-method uniform or block.");
  rules.require(arguments.recompute_num_layers.has_value(),
                "--recompute-granularity full needs --recompute-num-layers: with block, how many layers "
                "are recomputed; with uniform, 1.");
  const int64_t layers = arguments.recompute_num_layers.value_or(1);
  rules.require(layers >= 1 && layers <= arguments.num_layers.value_or(layers),
                "--recompute-num-layers is " + to_string(layers) + "; it must be from 1 to the " +
                    to_string(arguments.num_layers.value_or(layers)) + " layers of the model.");
  rules.require(arguments.recompute_method != "uniform" || layers == 1,
                "--recompute-method uniform with --recompute-num-layers " + to_string(layers) +
                    " is refused: layers are recomputed one by one here, which needs the least memory in "
                    "backward; give 1.");
  rules.require(arguments.recompute_modules.empty(),
                "--recompute-modules belongs to --recompute-granularity selective; full recomputes whole "
                "layers.");
}

void check_selective(Arguments& arguments, const DiagnosticSink& sink, Mistakes& rules) {
  rules.require(!arguments.recompute_method,
                "--recompute-method does not go with --recompute-granularity selective, which uses all "
                "layers; leave it out.");
  rules.require(!arguments.recompute_num_layers,
                "--recompute-num-layers does not go with --recompute-granularity selective, which uses "
                "all layers; leave it out.");
  if (arguments.recompute_modules.empty()) arguments.recompute_modules = {"core_attn"};
  if (names_part(arguments.recompute_modules, "core_attn")) {
    sink(Severity::kNotice, "--recompute-modules core_attn: fused attention kernels keep no probabilities, so "
                            "recomputing them saves memory only where they are not used (attention dropout on a CPU).");
  }
}

void check_offload(const Arguments& arguments, Mistakes& rules) {
  const int64_t layers = arguments.cpu_offloading_num_layers;
  const auto& parts = arguments.offload_modules;
  const bool fine = arguments.fine_grained_activation_offloading;
  const bool some_stay = !arguments.num_layers || layers < *arguments.num_layers;
  rules.require(layers == 0 || (layers > 0 && some_stay),
                "--cpu-offloading-num-layers is " + to_string(layers) +
                    "; it must be from 0 to less than "
                    "the " +
                    to_string(arguments.num_layers.value_or(0)) +
                    " layers of the model: the last ones are needed again at once.");
  rules.require(layers == 0 || !arguments.recompute_granularity,
                "--cpu-offloading-num-layers does not go with recompute flags; to offload the inputs of "
                "recomputed modules, list them under both recompute_modules and offload_modules in the "
                "FSDP2 file.");
  rules.require(layers == 0 || !fine,
                "--cpu-offloading-num-layers and --fine-grained-activation-offloading exclude each other; "
                "give one.");
  rules.require(fine == !parts.empty(), fine ? "--fine-grained-activation-offloading needs "
                                               "--offload-modules, the parts of a layer to offload."
                                             : "--offload-modules needs "
                                               "--fine-grained-activation-offloading; add it.");
  rules.require(!names_part(parts, "attn_proj") || names_part(parts, "core_attn"),
                "--offload-modules attn_proj needs core_attn too: its input is the output of core_attn, "
                "which keeps it for its own backward.");
  rules.require(
      arguments.min_offloaded_tensor_size >= 0,
      "--min-offloaded-tensor-size is " + to_string(arguments.min_offloaded_tensor_size) + "; it must be 0 or more.");
}

}  // namespace

void validate_activations(Arguments& arguments, const DiagnosticSink& sink, Mistakes& rules) {
  auto& granularity = arguments.recompute_granularity;
  if (arguments.recompute_activations) {
    rules.require(granularity.value_or("selective") == "selective",
                  "--recompute-activations means --recompute-granularity selective, but that is " +
                      granularity.value_or("") + "; keep one of them.");
    granularity = "selective";
  }
  if (granularity == "full") check_full(arguments, rules);
  if (granularity == "selective") check_selective(arguments, sink, rules);
  rules.require(granularity || (!arguments.recompute_method && !arguments.recompute_num_layers &&
                                arguments.recompute_modules.empty()),
                "--recompute-method, --recompute-num-layers and --recompute-modules need "
                "--recompute-granularity full or selective; add it.");
  check_offload(arguments, rules);
}

}  // namespace megashard::detail
