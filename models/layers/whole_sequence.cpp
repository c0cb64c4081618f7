#include "models/layers/whole_sequence.h"

#include "parallel/sequence_parallel/ulysses.h"

namespace megashard {

WholeSequence::WholeSequence(const Pass& pass)
    : rows_(pass.span.sequence.of_place()), documents_(pass.span.documents) {}

std::vector<at::Tensor> WholeSequence::gather(const std::vector<at::Tensor>& rows) const {
  if (rows_.is_whole()) return rows;
  std::vector<at::Tensor> channels;  // as heads of one channel, since widths differ
  for (const auto& each : rows) channels.push_back(each.flatten(2).unsqueeze(-1));
  auto whole = gather_sequence(channels, rows_);
  for (size_t i = 0; i < rows.size(); ++i) whole[i] = whole[i].squeeze(-1).unflatten(2, {-1, rows[i].size(3)});
  return whole;
}

at::Tensor WholeSequence::scatter(const at::Tensor& heads) const { return scatter_sequence(heads, rows_); }

at::Tensor WholeSequence::of_rank(const at::Tensor& parameters) const {
  if (rows_.is_whole()) return parameters;
  const int64_t count = parameters.size(0) / rows_.group->size();
  return parameters.narrow(0, rows_.group->rank() * count, count);
}

at::Tensor WholeSequence::begins(const at::Tensor& gathered) const {
  return documents_ ? documents_->token_begins(gathered.size(0), gathered.size(1), gathered.device()) : at::Tensor();
}

}  // namespace megashard
