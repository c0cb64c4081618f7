#include "framework/arguments/expert_arguments.h"

#include <string>

#include "framework/arguments/option_group.h"
#include "framework/mistakes.h"

namespace megashard::detail {

void add_expert_options(std::vector<Option>& rows) {
  using enum OnResume;
  using A = Arguments;
  OptionGroup group("experts", rows, {.pretrain_only = true});
  group
      .choice("--moe-router-load-balancing-type", &A::moe_router_load_balancing_type, kReport,
              {{"aux_loss", RouterBalance::kMicrobatch},
               {"seq_aux_loss", RouterBalance::kSequence},
               {"none", RouterBalance::kNone}},
              "what the loss of --moe-aux-loss-coeff is computed over: a microbatch, each sequence, or nothing")
      .nargs_of(Option::kAnyNumber)
      .refuse_values({"global_aux_loss"}, "balance is over a microbatch or a sequence of a rank; use aux_loss or "
                                          "seq_aux_loss")
      .refuse_values({"sinkhorn"}, "routers take the largest softmax values; use aux_loss");
  group
      .add("--moe-aux-loss-coeff", &A::moe_aux_loss_coeff, kReport,
           "coefficient of Megatron's load-balancing loss of each layer with experts, instead of config.json's "
           "(router_aux_loss_coef)")
      .nargs_of(Option::kAnyNumber)
      .at_least(0);
  group
      .add("--moe-z-loss-coeff", &A::moe_z_loss_coeff, kReport,
           "coefficient of the z-loss of each layer with experts, which keeps its router's logits small")
      .at_least(0);
}

void check_experts(const Arguments& arguments, Mistakes& rules) {
  const bool has_losses = arguments.moe_aux_loss_coeff != 0 || arguments.moe_z_loss_coeff.value_or(0) != 0;
  rules.require(!has_losses || arguments.hf_model,
                std::string(arguments.moe_aux_loss_coeff != 0 ? "--moe-aux-loss-coeff" : "--moe-z-loss-coeff") +
                    " needs a model with experts, which --hf-model gives; leave it out.");
  rules.require(
      arguments.moe_router_load_balancing_type != RouterBalance::kSequence || arguments.is_given("moe_aux_loss_coeff"),
      "--moe-router-load-balancing-type seq_aux_loss needs --moe-aux-loss-coeff, its coefficient.");
}

}  // namespace megashard::detail
