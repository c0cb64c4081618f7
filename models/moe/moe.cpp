#include "models/moe/moe.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/container/modulelist.h>

#include "models/kernels/fused_ops.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// Row i of the result is row index[i] of x, where each row of x is taken as often as any other.
/// `back` [rows, times] says where. Unlike index_select's, the gradient is a gather too: the same
/// bits in each run on a GPU.
struct TakeRows : torch::autograd::Function<TakeRows> {
  static Variable forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& index,
                          const at::Tensor& back) {
    context->save_for_backward({back});
    return x.index_select(0, index);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto back = context->get_saved_variables()[0];
    const auto rows = grads[0].index_select(0, back.flatten()).view({back.size(0), back.size(1), grads[0].size(1)});
    return {rows.sum(1), Variable(), Variable()};
  }
};

/// The rows of `experts` [N, K], one for each token and choice, sorted by expert.
struct RowOrder {
  at::Tensor token;   // [N * K], of each sorted row
  at::Tensor place;   // [N, K]: the sorted row
  at::Tensor counts;  // [experts] of rows, which lie side by side

  RowOrder(const at::Tensor& experts, int64_t num_experts) {
    const auto flat = experts.flatten();
    const auto [sorted, order] = at::sort(flat, /*stable=*/std::optional<bool>(true), /*dim=*/0);
    token = order.div(experts.size(1), "floor");
    place = at::empty_like(order);
    place.scatter_(0, order, at::arange(order.size(0), order.options()));
    place = place.view(experts.sizes());
    const auto bounds = at::searchsorted(sorted, at::arange(num_experts + 1, order.options()));  // first rows
    counts = bounds.slice(0, 1) - bounds.slice(0, 0, num_experts);
  }
};

/// `probabilities` and `experts` are the router's; transformers' loss has its own softmax in the
/// dtype of the logits, which in fp32 is the same; Megatron's has the router's. `mask` [N]: as Routing's.
at::Tensor balance_of(const at::Tensor& logits, at::Tensor probabilities, at::Tensor experts, const at::Tensor& mask,
                      int64_t sequences, bool as_transformers) {
  if (logits.scalar_type() != at::kFloat && as_transformers) {
    const auto own = at::softmax(logits, -1);
    experts = std::get<1>(at::topk(own, experts.size(1), -1));
    probabilities = own.to(at::kFloat);
  }
  const int64_t tokens = logits.size(0), num_experts = logits.size(1);
  auto counts = at::zeros({sequences * num_experts}, logits.options().dtype(at::kFloat));
  auto each = at::ones_like(experts, counts.options());
  if (mask.defined()) {
    each = each * mask.unsqueeze(1);
    probabilities = probabilities * mask.unsqueeze(1);
  }
  if (sequences > 1) {
    const auto sequence = at::arange(tokens, experts.options()).div(tokens / sequences, "floor");
    experts = experts + (sequence * num_experts).unsqueeze(1);
  }
  counts.scatter_add_(0, experts.flatten(), each.flatten());
  return at::stack({counts.view({sequences, num_experts}), probabilities.view({sequences, -1, num_experts}).sum(1)});
}

at::Tensor squared_sums(const at::Tensor& logits, const at::Tensor& mask) {
  const auto squares = at::logsumexp(logits.to(at::kFloat), -1).square();
  return (mask.defined() ? squares * mask : squares).sum();
}

}  // namespace

TopKRouter::TopKRouter(const DecoderConfig& config) : class_name_(config.names.router), config_(config.moe) {
  weight = register_parameter("weight", at::empty({config_.num_experts, config.hidden_size}));
}

Routing TopKRouter::forward(const at::Tensor& tokens, const at::Tensor& mask, int64_t sequences) {
  const auto logits = linear(tokens, weight, at::Tensor());
  const auto probabilities = at::softmax(logits, -1, at::kFloat);
  auto [weights, experts] = at::topk(probabilities, config_.experts_per_token, -1);
  if (config_.normalise_weights) weights = weights / weights.sum(-1, /*keepdim=*/true);
  const bool is_megatrons = config_.has_megatron_losses() && is_training();
  const bool counts = config_.aux_loss_coef != 0 || is_megatrons;
  return {
      weights.to(logits.scalar_type()), experts,
      counts ? balance_of(logits, probabilities, experts, mask, sequences, config_.aux_loss_coef != 0) : at::Tensor(),
      is_megatrons && config_.z_loss_coef != 0 ? squared_sums(logits, mask) : at::Tensor()};
}

void TopKRouter::init_own_weights(const WeightInit& init) { weight.normal_(0, init.std, init.generator); }

std::shared_ptr<Hooked<Mlp>> RemoteExpert::expert() const { return Mlp::expert(config_); }

void RemoteExpert::init_own_weights(const WeightInit& init) {
  for (const auto& projection : expert()->children())
    dynamic_cast<SelfInitializing&>(*projection).init_own_weights(init);
}

SparseMoeBlock::SparseMoeBlock(const DecoderConfig& config)
    : class_name_(config.names.moe), config_(config.moe), tensor_parallel_(config.tensor_parallel) {
  gate_ = register_module("gate", std::make_shared<Hooked<TopKRouter>>(config));
  const auto list = register_module("experts", std::make_shared<torch::nn::ModuleListImpl>());
  for (int64_t i = 0; i < config_.num_experts; ++i) {
    if (!config_.has_expert(i)) {
      list->push_back(std::make_shared<RemoteExpert>(config));
      continue;
    }
    experts_.push_back(Mlp::expert(config));
    list->push_back(experts_.back());
  }
  grouped_experts_ = GroupedExperts(experts_);
}

RoutedStates SparseMoeBlock::forward(const at::Tensor& own_states, const at::Tensor& token_mask) {
  const auto hidden = tensor_parallel_->whole_sequence(own_states);
  const auto tokens = hidden.reshape({-1, hidden.size(-1)});
  const auto routing =
      gate_->forward(tokens, token_mask.defined() ? token_mask.flatten() : at::Tensor(), hidden.size(0));
  const RowOrder order(routing.experts, config_.num_experts);
  const auto rows = TakeRows::apply(tokens, order.token, order.place);
  at::Tensor sorted;
  if (config_.ep_size == 1) {
    sorted = run_experts(rows, c10::make_intrusive<RowGroups>(order.counts, rows.size(0)));
  } else {
    TORCH_CHECK(ranks_ != nullptr, "the other experts of ", class_name_,
                " are on ranks that it does not know: shard the model by FSDP2Mixin::fully_shard first");
    const auto exchange = c10::make_intrusive<ExpertExchange>(ranks_, order.counts, rows.size(0));
    const auto own = ExpertExchange::send(exchange, rows);
    sorted = ExpertExchange::send_back(exchange, run_experts(own, exchange->own_rows()));
  }
  const auto results = sorted.index_select(0, order.place.flatten());
  const auto weighted =
      results.view({tokens.size(0), config_.experts_per_token, tokens.size(1)}) * routing.weights.unsqueeze(-1);
  return {tensor_parallel_->own_rows(weighted.sum(1).view(hidden.sizes())), routing.balance, routing.z};
}

at::Tensor SparseMoeBlock::run_experts(const at::Tensor& rows, const RowGroupsPtr& groups) {
  return tensor_parallel_->sum(grouped_experts_.forward(tensor_parallel_->with_summed_gradient(rows), groups));
}

}  // namespace megashard
