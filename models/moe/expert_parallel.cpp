#include "models/moe/expert_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>

#include "models/moe/moe.h"
#include "models/moe/router.h"
#include "parallel/collectives/device_mesh.h"
#include "parallel/copies/on_device.h"
#include "parallel/tensor_parallel_layout.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using ExchangePtr = c10::intrusive_ptr<ExpertExchange>;

const ExpertExchange& exchange_of(AutogradContext* context) {
  return static_cast<const ExpertExchange&>(*context->saved_data["exchange"].toCapsule());
}

struct Send : torch::autograd::Function<Send> {
  static Variable forward(AutogradContext* context, const at::Tensor& rows, const ExchangePtr& exchange) {
    context->saved_data["exchange"] = c10::IValue::make_capsule(exchange);
    return exchange->there(rows);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto& exchange = exchange_of(context);
    return {exchange.back(grads[0]) * exchange.ranks(), Variable()};
  }
};

struct SendBack : torch::autograd::Function<SendBack> {
  static Variable forward(AutogradContext* context, const at::Tensor& results, const ExchangePtr& exchange) {
    context->saved_data["exchange"] = c10::IValue::make_capsule(exchange);
    return exchange->back(results);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto& exchange = exchange_of(context);
    return {exchange.there(grads[0]) / exchange.ranks(), Variable()};
  }
};

}  // namespace

ExpertExchange::ExpertExchange(ProcessGroupPtr ranks, const at::Tensor& counts, int64_t rows)
    : ranks_(std::move(ranks)) {
  const int64_t size = ranks_->size(), me = ranks_->rank();
  const int64_t own = counts.size(0) / size;
  auto gathered = at::empty({size * size * own}, counts.options());
  ranks_->all_gather_into(gathered, counts.contiguous()).wait();
  const std::vector<int64_t> host = counts_on_host(gathered, size * rows);
  // of [from][expert]
  const auto count = [&](int64_t from, int64_t expert) {
    return host[static_cast<size_t>(from * size * own + expert)];
  };
  for (int64_t other = 0; other < size; ++other) {
    sent_.push_back(0);
    received_.push_back(0);
    for (int64_t i = 0; i < own; ++i) {
      sent_.back() += count(me, other * own + i);
      received_.back() += count(other, me * own + i);
    }
  }
  std::vector<int64_t> next(static_cast<size_t>(size), 0);  // of each rank's rows, where they arrive
  std::partial_sum(received_.begin(), received_.end() - 1, next.begin() + 1);
  std::vector<int64_t> by_expert, own_counts;
  for (int64_t expert = me * own; expert < (me + 1) * own; ++expert) {
    const auto before = static_cast<int64_t>(by_expert.size());
    for (int64_t from = 0; from < size; ++from) {
      for (int64_t i = 0; i < count(from, expert); ++i) by_expert.push_back(next[static_cast<size_t>(from)]++);
    }
    own_counts.push_back(static_cast<int64_t>(by_expert.size()) - before);
  }
  own_rows_ = c10::make_intrusive<RowGroups>(gathered.view({size, size * own}).narrow(1, me * own, own).sum(0),
                                             static_cast<int64_t>(by_expert.size()), std::move(own_counts));
  if (own == 1) return;
  std::vector<int64_t> by_rank(by_expert.size());
  for (size_t i = 0; i < by_expert.size(); ++i) by_rank[static_cast<size_t>(by_expert[i])] = static_cast<int64_t>(i);
  by_expert_ = on_device(at::tensor(by_expert, at::kLong), counts.device());
  by_rank_ = on_device(at::tensor(by_rank, at::kLong), counts.device());
}

at::Tensor ExpertExchange::swap(const at::Tensor& rows, const std::vector<int64_t>& sent,
                                const std::vector<int64_t>& received) const {
  const int64_t width = rows.size(1), arriving = std::accumulate(received.begin(), received.end(), int64_t{0});
  auto arrived = at::empty({arriving, width}, rows.options());
  const auto elements = [width](std::vector<int64_t> counts) {
    for (auto& each : counts) each *= width;
    return counts;
  };
  ranks_->all_to_all_into(arrived, rows.contiguous(), {elements(received), elements(sent)}).wait();
  return arrived;
}

at::Tensor ExpertExchange::there(const at::Tensor& rows) const {
  const auto arrived = swap(rows, sent_, received_);
  return by_expert_.defined() ? arrived.index_select(0, by_expert_) : arrived;
}

at::Tensor ExpertExchange::back(const at::Tensor& results) const {
  return swap(by_rank_.defined() ? results.index_select(0, by_rank_) : results, received_, sent_);
}

at::Tensor ExpertExchange::send(const ExchangePtr& exchange, const at::Tensor& rows) {
  return Send::apply(rows, exchange);
}

at::Tensor ExpertExchange::send_back(const ExchangePtr& exchange, const at::Tensor& results) {
  return SendBack::apply(results, exchange);
}

int expert_shard_size(int world, int shard, int ep_size, std::optional<int> wanted) {
  TORCH_CHECK(world % ep_size == 0, "--expert-model-parallel-size ", ep_size, " does not divide the ", world,
              " ranks; change one of them");
  const int holders = world / ep_size;
  if (wanted) {
    TORCH_CHECK(*wanted > 0 && holders % *wanted == 0, "expert_fully_shard_parallel_size is ", *wanted,
                ", which does not divide the ", holders, " ranks that have an expert (", world,
                " ranks / --expert-model-parallel-size ", ep_size, "); change one of them");
    return *wanted;
  }
  TORCH_CHECK(shard % ep_size == 0 || ep_size % shard == 0, "sharding_size ", shard,
              " and --expert-model-parallel-size ", ep_size,
              " have no multiple in common use: one must divide the other, or give expert_fully_shard_parallel_size in "
              "the FSDP2 file");
  return std::max(1, shard / ep_size);
}

bool ExpertParallelModule::is_stack_of_matrices(const std::string& name) const {
  const auto parameters = named_parameters();
  const auto* found = parameters.find(name);
  return found != nullptr && stacked_parameters().contains(found->unsafeGetTensorImpl());
}

std::vector<AuxTerm> ExpertParallelModule::router_terms(const LayerOutput& states, const SequenceShard& shard) const {
  if (!states.balance.defined()) return {};
  const auto z = states.z.defined() ? sum_over_sequence(states.z, shard) : at::Tensor();
  return router_losses({.hidden = {}, .balance = sum_over_sequence(states.balance, shard), .z = z}, moe_config());
}

std::vector<SparseMoeBlock*> ExpertParallelModule::sparse_blocks() const {
  std::vector<SparseMoeBlock*> blocks;
  for (const auto& each : modules(/*include_self=*/false)) {
    if (auto* block = dynamic_cast<SparseMoeBlock*>(each.get())) blocks.push_back(block);
  }
  return blocks;
}

std::unordered_set<const c10::TensorImpl*> ExpertParallelModule::stacked_parameters() const {
  std::unordered_set<const c10::TensorImpl*> parameters;
  for (auto* block : sparse_blocks()) {
    for (const auto& parameter : block->experts().parameters()) parameters.insert(parameter.unsafeGetTensorImpl());
  }
  return parameters;
}

void ExpertParallelModule::_init_ep_model() {
  const auto ep_size = static_cast<int>(context().experts.ranks);
  const auto& config = request().config;
  TORCH_CHECK(config.expert_parallel_size == 1 || config.expert_parallel_size == ep_size, "expert_parallel_size is ",
              config.expert_parallel_size, " in the FSDP2 file, and --expert-model-parallel-size ", ep_size,
              ": give the flag, and the same number or none in the file");
  if (ep_size == 1 && !config.expert_shard_size) return;
  const auto& world = request().process_group;  // without other tensor-parallel pieces
  const auto& dense = *options().mesh;
  const int shard = expert_shard_size(world->size(), dense.size(dense.ndim() - 1), ep_size, config.expert_shard_size);
  TORCH_CHECK(world->rank() % ep_size == context().experts.rank, "the model has part ", context().experts.rank, " of ",
              ep_size, " of the experts, which is not that of rank ", world->rank(), ": make it on this rank");
  const int replicas = world->size() / ep_size / shard;
  const DeviceMesh ranks(world, {replicas, shard, ep_size}, {"Expert_Replicate", "Expert_Shard", "EP"});
  const auto ep = ranks.submesh({"EP"});
  for (auto* block : sparse_blocks()) {
    block->set_ranks(ep->group(0));
    for (const auto& parameter : block->experts().parameters()) set_tensor_parallel(parameter, ep, Placement::shard(0));
  }
  const auto mesh =
      replicas == 1 ? ranks.submesh({"Expert_Shard"}) : ranks.submesh({"Expert_Replicate", "Expert_Shard"});
  shard_over(mesh, [parameters = stacked_parameters()](const at::Tensor& parameter) {
    return parameters.contains(parameter.unsafeGetTensorImpl());
  });
}

}  // namespace megashard
