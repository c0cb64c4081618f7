#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

struct Arguments;
struct Option;
class Mistakes;

/// Set of tokens over which the load of experts is balanced.
enum class RouterBalance {
  kNone,
  kMicrobatch,  ///< Megatron's aux_loss
  kSequence,    ///< Megatron's seq_aux_loss
};

enum class RouterScoreFunction { kSoftmax, kSigmoid };
enum class RouterDtype { kFp32 };

/// Megatron's group "moe". The first part describes the network, which with --hf-model config.json does. (derived):
/// computed by validate_arguments.
struct ExpertArguments {
  std::optional<int64_t> num_experts;          // unset: no layer has experts
  std::string moe_layer_freq = "1";            // see layer_frequency.h
  std::optional<int64_t> moe_ffn_hidden_size;  // (derived) ffn_hidden_size
  int64_t moe_router_topk = 2;
  RouterScoreFunction moe_router_score_function = RouterScoreFunction::kSoftmax;
  bool moe_router_pre_softmax = false;  // softmax over all experts; else over those of a token
  std::optional<double> moe_router_topk_scaling_factor;
  std::optional<int64_t> moe_router_num_groups, moe_router_group_topk;
  std::optional<RouterDtype> moe_router_dtype;  // unset: the hidden states'
  std::optional<int64_t> moe_shared_expert_intermediate_size;
  bool moe_shared_expert_gate = false;
  std::optional<int64_t> moe_latent_size;  // unset: experts map the hidden states

  RouterBalance moe_router_load_balancing_type = RouterBalance::kMicrobatch;
  double moe_aux_loss_coeff = 0;           // coefficient of the balancing loss
  std::optional<double> moe_z_loss_coeff;  // coefficient of the squared log-sum-exp of router logits
  bool moe_router_enable_expert_bias = false;
  double moe_router_bias_update_rate = 1e-3;  // step of that bias
};

namespace detail {

/// Adds the rows of these options, in the order of the help.
void add_expert_options(std::vector<Option>& rows);
/// Computes derived sizes of a network described by flags.
void derive_expert_sizes(Arguments& arguments, Mistakes& rules);
void check_experts(const Arguments& arguments, Mistakes& rules);

}  // namespace detail

}  // namespace megashard
