#include "models/kernels/head_parts.h"

#include <ATen/ops/empty_like.h>

#include "framework/matrix_product.h"
#include "models/kernels/cross_entropy.h"

namespace megashard {

int64_t rows_of_part(int64_t rows, int64_t most) {
  const auto divided = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t even = divided(rows, divided(rows, most)), whole_tiles = divided(even, 128) * 128;
  return whole_tiles <= most ? whole_tiles : even;
}

at::Tensor flat_labels(const at::Tensor& labels, int64_t vocabulary) {
  TORCH_CHECK(labels.scalar_type() == at::kLong, "labels must be int64, got ", labels.scalar_type());
  const auto flat = labels.reshape({-1}).contiguous();
  if (flat.device().is_cpu()) {  // a check would block the host on a GPU; the kernel asserts instead
    const auto* label = flat.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < flat.numel(); ++i) {
      TORCH_CHECK(label[i] == kIgnoredLabel || (label[i] >= 0 && label[i] < vocabulary), "label ", label[i],
                  " lies outside the model's vocabulary of ", vocabulary,
                  ": the data were tokenised with another tokenizer than the model's");
    }
  }
  return flat;
}

at::Tensor labels_of_piece(const at::Tensor& labels, int64_t width, const ProcessGroupPtr& ranks) {
  if (ranks == nullptr || ranks->size() == 1) return labels;
  const auto own = labels - ranks->rank() * width;
  const auto others = own.lt(0).logical_or(own.ge(width));
  return own.masked_fill(others, kLabelOfOtherRank).masked_fill(labels.eq(kIgnoredLabel), kIgnoredLabel);
}

at::Tensor log_sums(const at::Tensor& stats) {
  return stats.dim() == 2 ? stats.sum(1) : stats;  // a kernel's: the largest logit, and the log of the sum behind it
}

HeadGradients::HeadGradients(const at::Tensor& hidden, const at::Tensor& weight, bool of_hidden, bool of_weight)
    : weight_(weight), widens_(by_way_of_fp32(hidden)), of_weight_(of_weight) {
  if (of_hidden) grad_hidden_ = at::empty_like(hidden);
}

void HeadGradients::add(const at::Tensor& grad_logits, const at::Tensor& hidden, int64_t row) {
  const auto grad = operand(grad_logits);
  if (grad_hidden_.defined()) {
    grad_hidden_.narrow(0, row, grad.size(0)).copy_(matrix_product(grad, operand(weight_)));
  }
  if (!of_weight_) return;
  const auto rows = operand(hidden);
  if (grad_weight_.defined()) {
    add_matrix_product_(grad_weight_, grad.t(), rows);
  } else {
    grad_weight_ = matrix_product(grad.t(), rows);
  }
}

at::Tensor HeadGradients::of_weight() const {
  return grad_weight_.defined() ? grad_weight_.to(weight_.scalar_type()) : grad_weight_;
}

}  // namespace megashard
