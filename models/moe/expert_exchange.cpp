#include "models/moe/expert_exchange.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "parallel/copies/on_device.h"

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

ExpertExchange::ExpertExchange(ProcessGroupPtr ranks, const at::Tensor& counts) : ranks_(std::move(ranks)) {
  const int64_t size = ranks_->size(), me = ranks_->rank();
  const int64_t own = counts.size(0) / size;
  auto gathered = at::empty({size * size * own}, counts.options());
  ranks_->all_gather_into(gathered, counts.contiguous()).wait();
  const auto host = gathered.cpu();
  // of [from][expert]
  const auto count = [&](int64_t from, int64_t expert) {
    return host.const_data_ptr<int64_t>()[from * size * own + expert];
  };
  const auto slice = [&](int64_t from, int64_t to) {
    int64_t rows = 0;
    for (int64_t i = 0; i < own; ++i) rows += count(from, to * own + i);
    return rows;
  };
  int64_t largest = 1;
  for (int64_t from = 0; from < size; ++from) {
    for (int64_t to = 0; to < size; ++to) largest = std::max(largest, slice(from, to));
  }
  // Slots without a row carry the first one, which nobody takes.
  std::vector<int64_t> row_of_slot(static_cast<size_t>(size * largest), 0), slot_of_row;
  std::vector<int64_t> result_of_slot(row_of_slot), slot_of_result;
  for (int64_t to = 0; to < size; ++to) {
    for (int64_t i = 0; i < slice(me, to); ++i) {
      row_of_slot[static_cast<size_t>(to * largest + i)] = static_cast<int64_t>(slot_of_row.size());
      slot_of_row.push_back(to * largest + i);
    }
  }
  std::vector<int64_t> next(static_cast<size_t>(size));
  for (int64_t from = 0; from < size; ++from) next[static_cast<size_t>(from)] = from * largest;
  for (int64_t expert = me * own; expert < (me + 1) * own; ++expert) {
    const auto before = static_cast<int64_t>(slot_of_result.size());
    for (int64_t from = 0; from < size; ++from) {
      for (int64_t i = 0; i < count(from, expert); ++i) {
        const int64_t slot = next[static_cast<size_t>(from)]++;
        result_of_slot[static_cast<size_t>(slot)] = static_cast<int64_t>(slot_of_result.size());
        slot_of_result.push_back(slot);
      }
    }
    own_counts_.push_back(static_cast<int64_t>(slot_of_result.size()) - before);
  }
  const auto index = [&](const std::vector<int64_t>& rows) {
    return on_device(at::tensor(rows, at::kLong), counts.device());
  };
  row_of_slot_ = index(row_of_slot);
  slot_of_row_ = index(slot_of_row);
  result_of_slot_ = index(result_of_slot);
  slot_of_result_ = index(slot_of_result);
}

at::Tensor ExpertExchange::swap(const at::Tensor& rows, const at::Tensor& sent, const at::Tensor& taken) const {
  const bool nothing = rows.size(0) == 0;  // slots still have to be filled
  const auto outgoing = nothing ? at::empty({sent.size(0), rows.size(1)}, rows.options()) : rows.index_select(0, sent);
  auto incoming = at::empty_like(outgoing);
  ranks_->all_to_all_into(incoming.flatten(), outgoing.flatten()).wait();
  return incoming.index_select(0, taken);
}

at::Tensor ExpertExchange::there(const at::Tensor& rows) const { return swap(rows, row_of_slot_, slot_of_result_); }

at::Tensor ExpertExchange::back(const at::Tensor& results) const {
  return swap(results, result_of_slot_, slot_of_row_);
}

at::Tensor ExpertExchange::send(const ExchangePtr& exchange, const at::Tensor& rows) {
  return Send::apply(rows, exchange);
}

at::Tensor ExpertExchange::send_back(const ExchangePtr& exchange, const at::Tensor& results) {
  return SendBack::apply(results, exchange);
}

}  // namespace megashard
