#include "parallel/sequence_parallel/ulysses.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "parallel/device/torch_versions.h"

namespace megashard {
namespace {

using HeadTensors = std::vector<at::Tensor>;

HeadTensors to_whole_sequence(const HeadTensors& rows, const SequenceShard& shard);
HeadTensors to_rows(const HeadTensors& heads, const SequenceShard& shard);
using SequenceExchange = HeadTensors (*)(const HeadTensors&, const SequenceShard&);

HeadTensors recorded_exchange(const char* name, const HeadTensors& inputs, const SequenceShard& shard,
                              SequenceExchange exchange, SequenceExchange inverse);

/// Backward is the inverse exchange; it is recorded for second derivatives.
class SequenceExchangeNode final : public torch::autograd::Node {
 public:
  SequenceExchangeNode(const char* name, torch::autograd::edge_list next, SequenceShard shard,
                       SequenceExchange exchange, SequenceExchange inverse)
      : Node(std::move(next)), name_(name), shard_(std::move(shard)), exchange_(exchange), inverse_(inverse) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    for (size_t i = 0; i < gradients.size(); ++i) {  // all ranks must exchange all of them
      if (!gradients[i].defined()) gradients[i] = input_metadata(i).zeros_like();
    }
    return recorded_exchange(name_, gradients, shard_, inverse_, exchange_);
  }
  std::string name() const override { return name_; }

 private:
  const char* name_;
  SequenceShard shard_;
  SequenceExchange exchange_;
  SequenceExchange inverse_;
};

HeadTensors recorded_exchange(const char* name, const HeadTensors& inputs, const SequenceShard& shard,
                              SequenceExchange exchange, SequenceExchange inverse) {
  HeadTensors outputs = exchange(inputs, shard);
  const auto needs_gradient = [](const at::Tensor& each) { return each.requires_grad(); };
  if (!c10::GradMode::is_enabled() || std::none_of(inputs.begin(), inputs.end(), needs_gradient)) return outputs;
  torch::autograd::edge_list edges;
  for (const auto& each : inputs) edges.push_back(torch::autograd::impl::gradient_edge(each));
  const auto node = make_node<SequenceExchangeNode>(name, std::move(edges), shard, exchange, inverse);
  for (auto& output : outputs) {
    output = output.detach();
    torch::autograd::impl::set_gradient_edge(output, {node, node->add_input_metadata(output)});
  }
  return outputs;
}

at::Tensor exchanged(const at::Tensor& sent, const SequenceShard& shard) {
  const at::Tensor got = at::empty_like(sent);
  shard.group->all_to_all_into(got.view({-1}), sent.view({-1})).wait();
  return got;
}

/// Buffer with one block of rows per rank: [ranks * max_rows, B, heads, D]. Rows past the end of the sequence stay
/// uninitialised and are never read.
at::Tensor blocks_for(const at::Tensor& like, int64_t heads, const SequenceShard& shard) {
  return at::empty({shard.group->size() * shard.max_rows(), like.size(0), heads, like.size(3)}, like.options());
}

/// The same buffer as [ranks, rows, B, heads, D].
at::Tensor by_rank(const at::Tensor& blocks, const SequenceShard& shard) {
  return blocks.unflatten(0, {shard.group->size(), shard.max_rows()}).narrow(1, 0, shard.rows());
}

int64_t total_heads(const HeadTensors& tensors) {
  int64_t heads = 0;
  for (const auto& each : tensors) heads += each.size(2);
  return heads;
}

HeadTensors to_whole_sequence(const HeadTensors& rows, const SequenceShard& shard) {
  const int64_t ranks = shard.group->size();
  const at::Tensor sent = blocks_for(rows[0], total_heads(rows) / ranks, shard);
  int64_t begin = 0;
  for (const auto& each : rows) {
    const int64_t heads = each.size(2) / ranks;
    by_rank(sent, shard)
        .narrow(3, begin, heads)
        .copy_(each.detach().unflatten(2, {ranks, heads}).permute({2, 1, 0, 3, 4}));
    begin += heads;
  }
  const at::Tensor whole = exchanged(sent, shard).narrow(0, 0, shard.length).transpose(0, 1);
  HeadTensors result;
  begin = 0;
  for (const auto& each : rows) {
    const int64_t heads = each.size(2) / ranks;
    result.push_back(whole.narrow(2, begin, heads));
    begin += heads;
  }
  return result;
}

HeadTensors to_rows(const HeadTensors& heads, const SequenceShard& shard) {
  const at::Tensor sent = blocks_for(heads[0], total_heads(heads), shard);
  int64_t begin = 0;
  for (const auto& each : heads) {
    sent.narrow(0, 0, shard.length).narrow(2, begin, each.size(2)).copy_(each.detach().transpose(0, 1));
    begin += each.size(2);
  }
  const at::Tensor got = by_rank(exchanged(sent, shard), shard);
  HeadTensors result;
  begin = 0;
  for (const auto& each : heads) {
    result.push_back(got.narrow(3, begin, each.size(2)).permute({2, 1, 0, 3, 4}).flatten(2, 3));
    begin += each.size(2);
  }
  return result;
}

void check_heads(const at::Tensor& each, int64_t rows, int64_t multiple) {
  TORCH_CHECK(each.dim() == 4 && each.size(1) == rows && each.size(2) % multiple == 0, "heads of sizes ", each.sizes(),
              " cannot be exchanged: expected [batch, ", rows, ", a multiple of ", multiple, ", head size]");
}

}  // namespace

std::vector<at::Tensor> gather_sequence(const std::vector<at::Tensor>& rows, const SequenceShard& shard) {
  if (shard.is_whole()) return rows;
  for (const auto& each : rows) check_heads(each, shard.rows(), shard.group->size());
  return recorded_exchange("GatherSequence", rows, shard, &to_whole_sequence, &to_rows);
}

at::Tensor scatter_sequence(const at::Tensor& heads, const SequenceShard& shard) {
  if (shard.is_whole()) return heads;
  check_heads(heads, shard.length, 1);
  return recorded_exchange("ScatterSequence", {heads}, shard, &to_rows, &to_whole_sequence)[0];
}

at::Tensor spread_heads(const at::Tensor& heads, int64_t ranks) {
  const int64_t count = heads.size(2);
  if (count % ranks == 0) return heads;
  auto sizes = heads.unsqueeze(3).sizes().vec();
  sizes[3] = ranks / count;
  return heads.unsqueeze(3).expand(sizes).flatten(2, 3);
}

void check_ulysses_heads(const std::string& model, int64_t heads, int64_t kv_heads, int64_t ranks) {
  TORCH_CHECK_VALUE(heads % ranks == 0, model, " has ", heads, " attention heads, which ", ranks,
                    " ranks of a sequence cannot share evenly: choose a context parallel (Ulysses) size that divides ",
                    heads, ", or ring attention");
  TORCH_CHECK_VALUE(kv_heads % ranks == 0 || ranks % kv_heads == 0, model, " has ", kv_heads,
                    " key and value heads, and ", ranks,
                    " ranks share a sequence: one number must be a multiple of the other");
}

}  // namespace megashard
