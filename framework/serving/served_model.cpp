#include "framework/serving/served_model.h"

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "framework/training/parallel_groups.h"

namespace megashard {
namespace {

constexpr const char* kLogProbWeights = "weights";
constexpr const char* kValueWeights = "value_weights";
constexpr const char* kEntropyWeights = "entropy_weights";

at::Tensor weights_column(const Message& request, const char* name, const ServedRows& rows) {
  const at::Tensor weights = request.column(name, at::kFloat, rows.tokens());
  return weights.defined() ? rows.in_batch(weights) : weights;
}

}  // namespace

ServedModel::ServedModel(MultiModalModule& model, Optimizer& optimizer, const Options& options)
    : model_(model),
      optimizer_(optimizer),
      options_(options),
      objective_(make_objective(kNextToken, {})),
      step_(model, *objective_, optimizer, options.sharding, options.device, options.step),
      replicated_(replicated_parameters(optimizer.parameters())) {
  for (const auto& module : model_.modules(/*include_self=*/false)) {
    auto* adapted = dynamic_cast<HasAdapters*>(module.get());
    if (adapted != nullptr && adapted->has_adapters()) adapters_.push_back(adapted);
  }
  model_.train();
  optimizer_.zero_grad();
}

void ServedModel::check(const Message& request) const {
  const std::string command = request.word("command");
  if (command == "step") {
    TORCH_CHECK_VALUE(has_gradients_, "there are no gradients to step by; send backward or forward_backward first");
  } else if (command == "backward") {
    TORCH_CHECK_VALUE(kept_, "there is no forward to go back from; send forward with \"keep\" first");
    const Weights weights = weights_of(request, kept_->rows);
    TORCH_CHECK_VALUE(weights.has_any(), "backward needs \"weights\", \"value_weights\" or \"entropy_weights\"");
    const ModelOutput& output = kept_->output;
    TORCH_CHECK_VALUE((!weights.entropies.defined() || output.entropies.defined()) &&
                          weights.values.defined() == output.values.defined() &&
                          (!weights.log_probs.defined() || output.token_losses.defined()),
                      "backward has weights of other numbers than its forward gave");
  } else {
    const ServedRows rows(request, options_.rows);
    const Weights weights = weights_of(request, rows);
    TORCH_CHECK_VALUE(weights.has_any() == (command == "forward_backward"), command,
                      weights.has_any() ? " takes no weights; send forward_backward" : " needs \"weights\"");
    TORCH_CHECK_VALUE(!weights.entropies.defined() || request.is_set("entropies"),
                      "\"entropy_weights\" need the field \"entropies\"");
    const bool is_base = request.is_set("base");
    TORCH_CHECK_VALUE(!is_base || !adapters_.empty(),
                      "\"base\" needs --lora-r: the model has no adapters to leave out");
    TORCH_CHECK_VALUE(!is_base || (command == "forward" && !request.is_set("keep")),
                      "\"base\" is for a forward without gradients; leave it out");
  }
}

ServedModel::Weights ServedModel::weights_of(const Message& request, const ServedRows& rows) const {
  return {.log_probs = weights_column(request, kLogProbWeights, rows),
          .values = weights_column(request, kValueWeights, rows),
          .entropies = weights_column(request, kEntropyWeights, rows),
          .aux = request.number("aux", 1)};
}

at::Tensor ServedModel::scaled(const at::Tensor& weights, const SequenceShard& sequence) const {
  const double ranks = sequence.is_whole() ? 1 : sequence.group->size();
  const at::Tensor all = weights.to(options_.device) * ranks;
  return options_.step.scaler == nullptr ? all : all * options_.step.scaler->scale_tensor();
}

void ServedModel::accumulate(const Forward& forward, const Weights& weights) {
  const ModelOutput& output = forward.output;
  at::Tensor total = output.weighted_loss;
  const auto add = [&](const at::Tensor& numbers, const at::Tensor& of_sequences, double sign) {
    if (!of_sequences.defined()) return;
    TORCH_CHECK(
        numbers.defined(), "a client has weights of numbers that ", model_.class_name(),
        " does not give: \"weights\" and \"entropy_weights\" are for a model with lm_head, \"value_weights\" for "
        "one with the head `score`");
    const at::Tensor own = forward.sequence.rows_of(scaled(of_sequences, forward.sequence), 1);
    const at::Tensor term = (numbers * own).sum() * sign;
    total = total.defined() ? total + term : term;
  };
  if (!total.defined()) add(output.token_losses, weights.log_probs, -1);
  add(output.values, weights.values, 1);
  add(output.entropies, weights.entropies, 1);
  for (const AuxTerm& term : output.aux) {
    const at::Tensor value = term.value * weights.aux;
    total = total + (options_.step.scaler == nullptr ? value : value * options_.step.scaler->scale_tensor());
  }
  total.backward();
  has_gradients_ = true;
}

Message ServedModel::reply_of(const Forward& forward) const {
  Message reply;
  const auto put = [&](const char* name, const at::Tensor& own, double sign) {
    if (!own.defined()) return;
    const at::Tensor whole = whole_of_rows(own.detach().contiguous(), 1, forward.sequence).to(at::kCPU, at::kFloat);
    reply.tensors[name] = forward.rows.of_tokens(whole * sign);
  };
  put("log_probs", forward.output.token_losses, -1);
  put("values", forward.output.values, 1);
  put("entropies", forward.output.entropies, 1);
  for (const AuxTerm& term : forward.output.aux)
    reply.tensors["aux." + term.name] = term.metric.detach().to(at::kCPU, at::kFloat);
  return reply;
}

Message ServedModel::forward(const Message& request) {
  kept_.reset();
  ServedRows rows(request, options_.rows);
  Weights weights = weights_of(request, rows);
  Batch batch = rows.batch();
  const SequenceShard sequence = options_.step.sequence.with_length(batch.tokens().size(1));
  batch.sequence = sequence;
  batch.asked.entropies = request.is_set("entropies");
  Batch whole = to_device(model_.prepared(std::move(batch)), options_.device);
  // A model that knows the weights before makes the head's gradients in forward.
  if (weights.log_probs.defined())
    whole.set(kLossWeights, -scaled(weights.log_probs, sequence), Axis::kToken, /*is_input=*/false);
  const bool has_gradient = weights.has_any() || request.is_set("keep"), is_base = request.is_set("base");
  const c10::AutoGradMode grad_mode(has_gradient);
  if (!has_gradient) model_.eval();
  for (HasAdapters* each : adapters_) each->use_adapters(!is_base);
  Forward done{.rows = std::move(rows), .sequence = sequence, .output = model_(rows_of_rank(std::move(whole)))};
  for (HasAdapters* each : adapters_) each->use_adapters(true);
  model_.train();
  if (weights.has_any()) accumulate(done, weights);
  Message reply = reply_of(done);
  if (request.is_set("keep")) kept_.emplace(std::move(done));
  return reply;
}

Message ServedModel::backward(const Message& request) {
  const Forward forward = std::move(*kept_);
  kept_.reset();
  accumulate(forward, weights_of(request, forward.rows));
  return {};
}

DeviceStats ServedModel::clip() {
  kept_.reset();
  reduce_replicated_gradients(replicated_, *options_.sharding);
  return step_.clip({});
}

void ServedModel::update() {
  step_.update();
  zero_grad();
}

void ServedModel::zero_grad() {
  kept_.reset();
  optimizer_.zero_grad();
  has_gradients_ = false;
}

}  // namespace megashard
