#include "models/layers/vocabulary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "models/kernels/fused_ops.h"
#include "parallel/tensor_parallel_layout.h"

namespace megashard {

Embedding::Embedding(int64_t rows, int64_t width, std::optional<int64_t> padding_index, TensorParallelRanksPtr ranks)
    : rows_(rows), padding_index_(padding_index), ranks_(std::move(ranks)) {
  if (ranks_ != nullptr && ranks_->size() == 1) ranks_ = nullptr;
  const int64_t own = ranks_ == nullptr ? rows : rows / ranks_->size();
  if (ranks_ != nullptr) first_row_ = own * ranks_->rank();
  if (padding_index_) *padding_index_ -= first_row_;
  if (padding_index_ && (*padding_index_ < 0 || *padding_index_ >= own)) padding_index_.reset();
  weight = register_parameter("weight", at::empty({own, width}));
}

void Embedding::declare_cut(const DeviceMeshPtr& mesh) {
  if (ranks_ != nullptr) set_tensor_parallel(weight, mesh, Placement::shard(0));
}

at::Tensor Embedding::forward(const at::Tensor& indices) {
  TORCH_CHECK(indices.scalar_type() == at::kLong, "embedding indices must be int64, got ", indices.scalar_type());
  if (indices.device().is_cpu()) {  // a check would block the host on a GPU; the kernel asserts instead
    const auto flat = indices.contiguous();
    const auto* index = flat.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < flat.numel(); ++i) {
      TORCH_CHECK(index[i] >= 0 && index[i] < rows_, "token or position ", index[i], " lies outside an embedding of ",
                  rows_,
                  " rows: the data were tokenised with another tokenizer than the model's, or are too long for it");
    }
  }
  if (ranks_ == nullptr) return at::embedding(weight, indices, padding_index_.value_or(-1));
  const auto own = indices - first_row_;
  const auto others = own.lt(0).logical_or(own.ge(weight.size(0)));
  const auto rows = at::embedding(weight, own.masked_fill(others, 0), padding_index_.value_or(-1));
  return ranks_->leave(rows.masked_fill(others.unsqueeze(-1), 0));
}

void Embedding::init_own_weights(const WeightInit& init) {
  if (ranks_ == nullptr) {
    weight.normal_(0, init.std, init.generator);
  } else {
    draw_weight(weight, {weight.size(0) * ranks_->size(), weight.size(1)}, 0, *ranks_, init.std, init);
  }
  if (padding_index_) weight.select(0, *padding_index_).zero_();
}

at::Tensor Head::own_weight() const { return tied_ ? with_own_gradient(weight) : weight; }

at::Tensor Head::forward(const at::Tensor& x) { return product(x, own_weight(), bias); }

TokenLosses Head::token_losses(const at::Tensor& x, const at::Tensor& labels, const at::Tensor& loss_weights,
                               std::optional<int64_t> at_once) {
  const auto group = ranks()->size() == 1 ? nullptr : ranks()->group();
  if (!is_plain() || bias.defined()) return {vocab_parallel_cross_entropy(forward(x), labels, group), {}};
  return linear_cross_entropy(x, own_weight(), labels, group, loss_weights, at_once);
}

}  // namespace megashard
