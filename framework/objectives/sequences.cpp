#include "framework/objectives/sequences.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace megashard {

void add_sequences(Batch& batch) {
  const at::Tensor& mask = batch.at(kLossMask);
  const auto pins = [&](at::ScalarType type) { return at::TensorOptions(type).pinned_memory(mask.is_pinned()); };
  at::Tensor counts = at::empty({mask.size(0)}, pins(at::kFloat));
  if (!batch.document_lengths.defined()) {
    counts.copy_(mask.sum(1));
  } else {
    at::Tensor ids = at::empty(mask.sizes(), pins(at::kLong));
    const at::Tensor tokens = batch.token_mask().flatten();
    auto* id = ids.mutable_data_ptr<int64_t>();
    const auto* is_token = tokens.const_data_ptr<bool>();
    const auto* length = batch.document_lengths.const_data_ptr<int64_t>();
    int64_t sequences = 0;
    for (const auto* end = length + batch.document_lengths.size(0); length != end; id += *length, is_token += *length++)
      std::fill_n(id, *length, *is_token ? sequences++ : -1);
    ids.masked_fill_(ids < 0, sequences);
    counts = at::empty({sequences}, pins(at::kFloat));
    counts.copy_(at::zeros({sequences + 1}).index_add(0, ids.flatten(), mask.flatten()).narrow(0, 0, sequences));
    batch.set(kSequenceIds, ids, Axis::kToken, /*is_input=*/false);
  }
  batch.set(kLabelCounts, counts, Axis::kItem, /*is_input=*/false);
}

at::Tensor Sequences::sums(const at::Tensor& x) const {
  const at::Tensor ids = batch_.find(kSequenceIds);
  if (!ids.defined()) return sum_over_sequence(x.sum(1), batch_.sequence);
  const int64_t count = label_counts().size(0);
  const at::Tensor mine = at::zeros({count + 1}, x.options()).index_add(0, ids.flatten(), x.flatten());
  return sum_over_sequence(mine.narrow(0, 0, count), batch_.sequence);
}

at::Tensor Sequences::of_tokens(const at::Tensor& of_sequences) const {
  const at::Tensor ids = batch_.find(kSequenceIds);
  if (!ids.defined()) return of_sequences.unsqueeze(1);
  const at::Tensor padding = at::zeros({1}, of_sequences.options());
  return at::cat({of_sequences, padding}).index_select(0, ids.flatten()).view_as(ids);
}

}  // namespace megashard
