#include "framework/arguments/activation_arguments.h"

#include <algorithm>
#include <string>

#include "framework/arguments/option_group.h"
#include "framework/mistakes.h"

namespace megashard::detail {
namespace {

using A = Arguments;
using std::to_string;

constexpr const char* kPartOfExpert =
    "experts are recomputed whole, by --recompute-modules moe, or one by one by modules in the "
    "FSDP2 file";
constexpr const char* kNormsAlone =
    "the next projection keeps its output anyway; recompute_modules with recompute_save_ops "
    "[aten::mm] in the FSDP2 file recomputes norms and activations, and keeps products";

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
  rules.require(arguments.recompute_method != RecomputeMethod::kUniform || layers == 1,
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
}

}  // namespace

void add_activation_options(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("activations", rows, {.pretrain_only = true});
  group.add("--recompute-activations", &A::recompute_activations, kFree,
            "the same as --recompute-granularity selective");
  group.choice("--recompute-granularity", &A::recompute_granularity, kFree,
               {{"full", RecomputeGranularity::kFull}, {"selective", RecomputeGranularity::kSelective}},
               "full: recompute whole layers in backward; selective: --recompute-modules");
  group.choice("--recompute-method", &A::recompute_method, kFree,
               {{"uniform", RecomputeMethod::kUniform}, {"block", RecomputeMethod::kBlock}},
               "with full: uniform recomputes all layers, block the first --recompute-num-layers");
  group.add("--recompute-num-layers", &A::recompute_num_layers, kFree, "see --recompute-method");
  group.add("--recompute-modules", &A::recompute_modules, kFree, "of selective; unset: core_attn")
      .one_of({"core_attn", "mlp", "moe"})
      .refuse_values({"layernorm"}, kNormsAlone)
      .refuse_values({"moe_act"}, kPartOfExpert)
      .refuse_values({"shared_experts"}, "shared experts are recomputed with the others, by moe")
      .refuse_values({"mla_up_proj"},
                     "projections from latents are recomputed with their layer, by --recompute-granularity full");
  group
      .add("--cpu-offloading-num-layers", &A::cpu_offloading_num_layers, kFree,
           "number of first layers whose activations stay in host memory until backward")
      .at_least(0);
  group.add("--fine-grained-activation-offloading", &A::fine_grained_activation_offloading, kFree,
            "keep the activations of --offload-modules in host memory until backward");
  group
      .add("--offload-modules", &A::offload_modules, kFree,
           "parts of a layer, for --fine-grained-activation-offloading")
      .one_of({"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"})
      .refuse_values({"expert_fc1", "moe_act"}, kPartOfExpert);
  group
      .add("--min-offloaded-tensor-size", &A::min_offloaded_tensor_size, kFree,
           "tensors of fewer elements are not offloaded")
      .at_least(0);
}

void validate_activations(Arguments& arguments, const DiagnosticSink& sink, Mistakes& rules) {
  auto& granularity = arguments.recompute_granularity;
  if (arguments.recompute_activations) {
    rules.require(granularity != RecomputeGranularity::kFull,
                  "--recompute-activations means --recompute-granularity selective, but that is full; keep one of "
                  "them.");
    granularity = RecomputeGranularity::kSelective;
  }
  if (granularity == RecomputeGranularity::kFull) check_full(arguments, rules);
  if (granularity == RecomputeGranularity::kSelective) check_selective(arguments, sink, rules);
  rules.require(granularity || (!arguments.recompute_method && !arguments.recompute_num_layers &&
                                arguments.recompute_modules.empty()),
                "--recompute-method, --recompute-num-layers and --recompute-modules need "
                "--recompute-granularity full or selective; add it.");
  check_offload(arguments, rules);
}

}  // namespace megashard::detail
