#include "models/moe/moe.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sort.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "framework/mistakes.h"
#include "models/kernels/chosen_rows.h"
#include "models/moe/expert_parallel.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// index_select of rows, for an index that takes each row of x equally often; `back` [rows, times]: positions in the
/// index. The gradient is a gather, too, so it has the same bits in each run on a GPU, unlike index_select's.
struct TakeRows : torch::autograd::Function<TakeRows> {
  static Variable forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& index,
                          const at::Tensor& back) {
    context->save_for_backward({back});
    return x.index_select(0, index);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return {sum_of_rows(grads[0], context->get_saved_variables()[0]), Variable(), Variable()};
  }
};

/// Order by expert of the rows of `experts` [N, K], one for each token and choice.
struct RowOrder {
  at::Tensor token;   // [N * K], of each sorted row
  at::Tensor choice;  // [N * K], of each sorted row: its place in experts.flatten()
  at::Tensor place;   // [N, K]: the sorted row
  at::Tensor counts;  // [experts] of rows, which lie side by side

  RowOrder(const at::Tensor& experts, int64_t num_experts) {
    const auto flat = experts.flatten();
    const auto [sorted, order] = at::sort(flat, /*stable=*/std::optional<bool>(true), /*dim=*/0);
    choice = order;
    token = order.div(experts.size(1), "floor");
    place = at::empty_like(order);
    place.scatter_(0, order, at::arange(order.size(0), order.options()));
    place = place.view(experts.sizes());
    const auto bounds = at::searchsorted(sorted, at::arange(num_experts + 1, order.options()));  // first rows
    counts = bounds.slice(0, 1) - bounds.slice(0, 0, num_experts);
  }
};

class ExpertsPart final : public PartSpec {
 public:
  explicit ExpertsPart(MoeSpec spec) : spec_(std::move(spec)) {}

  std::shared_ptr<Part> build(const BuildContext& context) const override {
    return std::make_shared<PartOf<SparseMoeBlock>>(spec_, context);
  }
  /// The experts that a token passes.
  double training_flops(int64_t /*sequence_length*/) const override {
    const auto latent = spec_.expert.hidden_size == spec_.hidden_size ? 0 : spec_.expert.hidden_size;
    return megashard::training_flops(spec_.expert) * static_cast<double>(spec_.moe.experts_per_token) +
           12.0 * static_cast<double>(spec_.hidden_size * latent) +
           (spec_.shared ? megashard::training_flops(spec_.shared->mlp) : 0);
  }
  std::vector<SharedSize> sizes_over_ranks() const override {
    std::vector<SharedSize> sizes{{spec_.expert.intermediate_size, "channels of an expert"}};
    if (spec_.shared) sizes.push_back({spec_.shared->mlp.intermediate_size, "channels of a shared expert"});
    return sizes;
  }
  void check_tensor_ranks(const std::string& model) const override {
    require(!spec_.expert.bias, model +
                                    " has experts with biases, which --tensor-model-parallel-size does not cut; leave "
                                    "it out.");
  }
  std::vector<std::string> paths_of(const std::string& megatron_part) const override {
    return megatron_part == "moe" ? std::vector<std::string>{""} : std::vector<std::string>{};
  }
  std::vector<std::string> names_in_fp32() const override {
    auto names = spec_.router->names_in_fp32();
    for (auto& each : names) each.insert(0, spec_.router->name() + ".");
    return names;
  }
  std::vector<WeightGroup> weight_forms(const std::string& path, const WeightFiles& files) const override {
    const ExpertSizes sizes{.experts = spec_.moe.num_experts,
                            .hidden = spec_.expert.hidden_size,
                            .intermediate = spec_.expert.intermediate_size,
                            .gated = spec_.expert.gated,
                            .bias = spec_.expert.bias};
    return {expert_forms(path + "experts.", sizes, files.experts)};
  }
  bool continues_from_cache() const override { return true; }
  std::string norm_before() const override { return "mlp_norm"; }

 private:
  MoeSpec spec_;
};

}  // namespace

PartSpecPtr experts_part(MoeSpec spec) { return std::make_shared<ExpertsPart>(std::move(spec)); }

SparseMoeBlock::SparseMoeBlock(const MoeSpec& spec, const BuildContext& context)
    : class_name_(spec.class_name),
      num_experts_(spec.moe.num_experts),
      weighs_inputs_(spec.moe.weighs_inputs),
      placement_(context.experts),
      tensor_parallel_(context.tensor_parallel) {
  router_ = spec.router->build(spec.hidden_size, spec.moe);
  register_module(spec.router->name(), router_->module());
  experts_ = register_module("experts",
                             std::make_shared<Hooked<Experts>>(spec.expert, num_experts_, spec.experts_class, context));
  if (spec.expert.hidden_size != spec.hidden_size) {
    const auto linear = [&](const char* name, int64_t in, int64_t out, double init_scale) {
      const Linear::Options options{.in = in, .out = out, .bias = spec.latent_bias, .init_scale = init_scale};
      return register_module(name, std::make_shared<Hooked<Linear>>(options));
    };
    to_latent_ = linear("fc1_latent_proj", spec.hidden_size, spec.expert.hidden_size, 1);
    from_latent_ = linear("fc2_latent_proj", spec.expert.hidden_size, spec.hidden_size, spec.expert.output_init_scale);
  }
  const auto norm = [&](const auto& each) { return register_norm(*this, each, context.tensor_parallel); };
  before_ = norm(spec.before);
  after_ = norm(spec.after);
  if (!spec.shared) return;
  before_shared_ = norm(spec.shared->before);
  after_shared_ = norm(spec.shared->after);
  shared_ = register_module(spec.shared->name, std::make_shared<Hooked<Mlp>>(spec.shared->mlp, context));
  if (!spec.shared->gated) return;
  const Linear::Options options{.in = spec.hidden_size, .out = 1};
  shared_gate_ = register_module("shared_expert_gate",
                                 std::make_shared<Hooked<ReplicatedLinear>>(options, context.tensor_parallel));
}

LayerOutput SparseMoeBlock::forward(const at::Tensor& own_states, const Pass& pass) {
  const auto& token_mask = pass.token_mask;
  const auto hidden = tensor_parallel_->whole_sequence(own_states);
  auto tokens = hidden.reshape({-1, hidden.size(-1)});
  const auto routing =
      router_->route(tokens, token_mask.defined() ? token_mask.flatten() : at::Tensor(), hidden.size(0));
  if (before_) tokens = tensor_parallel_->whole_sequence(before_->forward(own_states)).reshape(tokens.sizes());
  if (to_latent_) tokens = to_latent_->forward(tokens);
  const RowOrder order(routing.experts, num_experts_);
  auto rows = TakeRows::apply(tokens, order.token, order.place);
  if (weighs_inputs_) rows = rows * routing.weights.flatten().index_select(0, order.choice).unsqueeze(-1);
  at::Tensor sorted;
  if (placement_.ranks == 1) {
    sorted = run_experts(rows, c10::make_intrusive<RowGroups>(order.counts, rows.size(0)));
  } else {
    TORCH_CHECK(ranks_ != nullptr, "the other experts of ", class_name_,
                " are on ranks that it does not know: shard the model by FSDP2Mixin::fully_shard first");
    const auto exchange = c10::make_intrusive<ExpertExchange>(ranks_, order.counts, rows.size(0));
    const auto own = ExpertExchange::send(exchange, rows);
    sorted = ExpertExchange::send_back(exchange, run_experts(own, exchange->own_rows()));
  }
  const auto results = weighs_inputs_
                           ? sorted.index_select(0, order.place.flatten()).unflatten(0, order.place.sizes()).sum(1)
                           : weighted_sum_of_rows(sorted, order.place, routing.weights);
  auto sums = results.to(hidden.scalar_type());
  if (from_latent_) sums = from_latent_->forward(sums);
  auto mixed = tensor_parallel_->own_rows(sums.view(hidden.sizes()));
  if (after_) mixed = after_->forward(mixed);
  if (shared_) mixed = mixed + run_shared(own_states);
  return {std::move(mixed), routing.balance, routing.z};
}

at::Tensor SparseMoeBlock::run_shared(const at::Tensor& own_states) {
  auto output = shared_->forward(before_shared_ ? before_shared_->forward(own_states) : own_states);
  if (after_shared_) output = after_shared_->forward(output);
  return shared_gate_ ? at::sigmoid(shared_gate_->forward(own_states)) * output : output;
}

at::Tensor SparseMoeBlock::run_experts(const at::Tensor& rows, const RowGroupsPtr& groups) {
  return tensor_parallel_->sum(experts_->forward(tensor_parallel_->with_summed_gradient(rows), groups));
}

}  // namespace megashard
