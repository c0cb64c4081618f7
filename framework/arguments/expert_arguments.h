#pragma once

#include <optional>
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

/// Megatron's router losses, for a model with experts (--hf-model).
struct ExpertArguments {
  RouterBalance moe_router_load_balancing_type = RouterBalance::kMicrobatch;
  double moe_aux_loss_coeff = 0;           // coefficient of the balancing loss
  std::optional<double> moe_z_loss_coeff;  // of the squared log-sum-exp of router logits
};

namespace detail {

/// Adds the rows of these options, in the order of the help.
void add_expert_options(std::vector<Option>& rows);
void check_experts(const Arguments& arguments, Mistakes& rules);

}  // namespace detail

}  // namespace megashard
