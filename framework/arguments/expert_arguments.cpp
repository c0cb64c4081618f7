#include "framework/arguments/expert_arguments.h"

#include <array>
#include <string>

#include "framework/arguments/layer_frequency.h"
#include "framework/arguments/option_group.h"
#include "framework/mistakes.h"

namespace megashard::detail {
namespace {

using A = Arguments;
using std::to_string;

/// The flags that describe a network's experts.
constexpr std::array kOfExperts = {"moe_layer_freq",
                                   "moe_ffn_hidden_size",
                                   "moe_router_topk",
                                   "moe_router_score_function",
                                   "moe_router_pre_softmax",
                                   "moe_router_topk_scaling_factor",
                                   "moe_router_num_groups",
                                   "moe_router_group_topk",
                                   "moe_router_dtype",
                                   "moe_shared_expert_intermediate_size",
                                   "moe_shared_expert_gate",
                                   "moe_latent_size",
                                   "moe_router_enable_expert_bias"};

void check_router(const Arguments& arguments, Mistakes& rules) {
  rules.require(!arguments.add_bias_linear, "--num-experts needs --disable-bias-linear: experts have no biases.");
  const int64_t experts = *arguments.num_experts, chosen = arguments.moe_router_topk;
  const bool by_softmax = arguments.moe_router_score_function == RouterScoreFunction::kSoftmax;
  rules.require(chosen <= experts, "--moe-router-topk " + to_string(chosen) + " is more than --num-experts " +
                                       to_string(experts) + "; change one of them.");
  rules.require(chosen > 1 || !by_softmax || arguments.moe_router_pre_softmax,
                "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax over one expert is 1.");
  rules.require(by_softmax || !arguments.moe_router_pre_softmax,
                "--moe-router-pre-softmax belongs to --moe-router-score-function softmax; leave one of them out.");
  rules.require(!by_softmax || !arguments.moe_router_enable_expert_bias,
                "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid.");
  const auto groups = arguments.moe_router_num_groups, of_token = arguments.moe_router_group_topk;
  if (!rules.require(groups.has_value() == of_token.has_value(),
                     "--moe-router-num-groups and --moe-router-group-topk need each other; give both.") ||
      !groups || *groups <= 0 || *of_token <= 0)
    return;
  const bool divides = rules.require(experts % *groups == 0, "--num-experts " + to_string(experts) +
                                                                 " is not divisible by --moe-router-num-groups " +
                                                                 to_string(*groups) + "; change one of them.");
  if (!divides) return;
  rules.require(*of_token <= *groups && chosen % *of_token == 0 && chosen / *of_token <= experts / *groups,
                "--moe-router-topk " + to_string(chosen) + " experts of --moe-router-group-topk " +
                    to_string(*of_token) + " groups must be as many from each group, which has " +
                    to_string(experts / *groups) + "; change one of them.");
}

}  // namespace

void add_expert_options(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("experts", rows, {.from_checkpoint = true});
  group.add("--num-experts", &A::num_experts, kMustMatch, "experts of a layer, instead of an MLP; unset: none")
      .above(0);
  group
      .add("--moe-layer-freq", &A::moe_layer_freq, kMustMatch,
           "layers with experts: every N-th from the first on, or 0 and 1 for each layer, as [0]*1+[1]*26")
      .shown_as("N|LIST");
  group
      .add("--moe-ffn-hidden-size", &A::moe_ffn_hidden_size, kMustMatch, "width of an expert; unset: --ffn-hidden-size")
      .above(0);
  group.add("--moe-router-topk", &A::moe_router_topk, kMustMatch, "experts of a token").above(0);
  group.choice("--moe-router-score-function", &A::moe_router_score_function, kMustMatch,
               {{"softmax", RouterScoreFunction::kSoftmax}, {"sigmoid", RouterScoreFunction::kSigmoid}},
               "turns a router's logits into scores");
  group.add("--moe-router-pre-softmax", &A::moe_router_pre_softmax, kMustMatch,
            "softmax over all experts, instead of those of a token");
  group.add("--moe-router-topk-scaling-factor", &A::moe_router_topk_scaling_factor, kMustMatch,
            "multiplies the experts' weights");
  group
      .add("--moe-router-num-groups", &A::moe_router_num_groups, kMustMatch,
           "groups of experts, of which a token chooses --moe-router-group-topk")
      .above(0);
  group.add("--moe-router-group-topk", &A::moe_router_group_topk, kMustMatch, "groups of a token").above(0);
  group
      .choice("--moe-router-dtype", &A::moe_router_dtype, kReport, {{"fp32", RouterDtype::kFp32}},
              "keeps routers' weights and computes their logits in fp32")
      .refuse_values({"fp64"}, "routers compute in fp32 at most; use fp32");
  group
      .add("--moe-shared-expert-intermediate-size", &A::moe_shared_expert_intermediate_size, kMustMatch,
           "width of an MLP beside the experts, for all tokens; unset: none")
      .above(0);
  group.add("--moe-shared-expert-gate", &A::moe_shared_expert_gate, kMustMatch,
            "multiplies that MLP's output by a sigmoid of the token");
  group
      .add("--moe-latent-size", &A::moe_latent_size, kMustMatch,
           "width of a latent that experts map to itself, between two linear layers; unset: none")
      .above(0);
  group.add("--moe-router-enable-expert-bias", &A::moe_router_enable_expert_bias, kReport,
            "after each step, moves the bias by which routers choose experts against each expert's load; a model of "
            "--hf-model must have one (e_score_correction_bias)");
  OptionGroup balance("experts", rows, {.pretrain_only = true});
  balance
      .choice("--moe-router-load-balancing-type", &A::moe_router_load_balancing_type, kReport,
              {{"aux_loss", RouterBalance::kMicrobatch},
               {"seq_aux_loss", RouterBalance::kSequence},
               {"none", RouterBalance::kNone}},
              "what the loss of --moe-aux-loss-coeff is computed over: a microbatch, each sequence, or nothing")
      .nargs_of(Option::kAnyNumber)
      .refuse_values({"global_aux_loss"}, "balance is over a microbatch or a sequence of a rank; use aux_loss or "
                                          "seq_aux_loss")
      .refuse_values({"sinkhorn"}, "routers take the largest softmax values; use aux_loss");
  balance
      .add("--moe-aux-loss-coeff", &A::moe_aux_loss_coeff, kReport,
           "coefficient of Megatron's load-balancing loss of each layer with experts, instead of config.json's "
           "(router_aux_loss_coef)")
      .nargs_of(Option::kAnyNumber)
      .at_least(0);
  balance
      .add("--moe-z-loss-coeff", &A::moe_z_loss_coeff, kReport,
           "coefficient of the z-loss of each layer with experts, which keeps its router's logits small")
      .at_least(0);
  balance
      .add("--moe-router-bias-update-rate", &A::moe_router_bias_update_rate, kReport,
           "by how much --moe-router-enable-expert-bias moves it")
      .above(0);
}

void derive_expert_sizes(Arguments& arguments, Mistakes& rules) {
  if (!arguments.num_experts) return;
  if (!arguments.moe_ffn_hidden_size) arguments.moe_ffn_hidden_size = arguments.ffn_hidden_size;
  if (!arguments.num_layers) return;
  rules.attempt([&] { expand_layer_frequency(kMoeLayerFreq, arguments.moe_layer_freq, *arguments.num_layers); });
}

void check_experts(const Arguments& arguments, Mistakes& rules) {
  std::vector<std::string> given;
  for (const char* name : kOfExperts) {
    if (arguments.is_given(name)) given.push_back(find_argument(name)->flag);
  }
  if (arguments.moe_aux_loss_coeff != 0) given.emplace_back("--moe-aux-loss-coeff");
  if (arguments.moe_z_loss_coeff.value_or(0) != 0) given.emplace_back("--moe-z-loss-coeff");
  const bool may_have_experts = arguments.num_experts || arguments.hf_model || arguments.is_own_model();
  for (const auto& flag : given) {
    rules.require(may_have_experts, flag + " needs a model with experts: give --num-experts or --hf-model, or leave it "
                                           "out.");
  }
  rules.require(
      !arguments.moe_shared_expert_gate || arguments.moe_shared_expert_intermediate_size || arguments.hf_model,
      "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size.");
  if (arguments.num_experts.value_or(0) > 0 && !arguments.hf_model) check_router(arguments, rules);
  rules.require(
      arguments.moe_router_load_balancing_type != RouterBalance::kSequence || arguments.is_given("moe_aux_loss_coeff"),
      "--moe-router-load-balancing-type seq_aux_loss needs --moe-aux-loss-coeff, its coefficient.");
  rules.require(!arguments.is_given("moe_router_bias_update_rate") || arguments.moe_router_enable_expert_bias,
                "--moe-router-bias-update-rate needs --moe-router-enable-expert-bias; give both, or neither.");
}

}  // namespace megashard::detail
