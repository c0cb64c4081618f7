#include "framework/training/inference.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace megashard {
namespace {

/// The texts as rows of one tensor, filled up with token 0; one row of it when there are none, so
/// that a rank without texts runs the same gathers.
at::Tensor padded(const TokenLists& texts, int64_t length) {
  at::Tensor rows =
      at::zeros({std::max<int64_t>(1, static_cast<int64_t>(texts.size())), length}, at::kLong);
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto size = static_cast<int64_t>(texts[i].size());
    TORCH_CHECK(size >= 1 && size <= length, "a text has ", size, " tokens; it must have 1 to ", length);
    std::copy(texts[i].begin(), texts[i].end(),
              rows[static_cast<int64_t>(i)].mutable_data_ptr<int64_t>());
  }
  return rows;
}

at::Tensor lengths_of(const TokenLists& texts) {
  std::vector<int64_t> lengths;
  for (const auto& text : texts) lengths.push_back(static_cast<int64_t>(text.size()));
  if (lengths.empty()) lengths.push_back(1);
  return at::tensor(lengths, at::kLong);
}

void move_to(at::Tensor& tensor, c10::Device device) {
  if (tensor.defined()) tensor = tensor.to(device);
}

void move_to(std::map<std::string, at::Tensor>& tensors, c10::Device device) {
  for (auto& [name, tensor] : tensors) move_to(tensor, device);
}

}  // namespace

at::Tensor log_probabilities(MultiModalModule& model, const TokenLists& texts, int64_t length,
                             c10::Device device, std::map<std::string, at::Tensor> extra) {
  const c10::NoGradGuard no_grad;
  const at::Tensor rows = padded(texts, length + 1);
  ModelInput input;
  input.tokens = rows.narrow(1, 0, length).contiguous();
  input.labels = rows.narrow(1, 1, length).contiguous();
  input.extra = std::move(extra);
  model.prepare(input);
  input.visit_tensors([&](auto& part) { move_to(part, device); });
  const at::Tensor losses = model(std::move(input)).cpu();
  const at::Tensor wanted = at::arange(1, length + 1).unsqueeze(0) < lengths_of(texts).unsqueeze(1);
  return at::where(wanted, losses.neg(), at::zeros({}, losses.options()))
      .narrow(0, 0, static_cast<int64_t>(texts.size()));
}

at::Tensor greedy_continuations(MultiModalModule& model, const TokenLists& texts, int64_t count,
                                int64_t end, c10::Device device) {
  const c10::NoGradGuard no_grad;
  at::Tensor at_end = lengths_of(texts).to(device);  // where each row goes on
  const int64_t longest = at_end.max().item<int64_t>();
  const at::Tensor rows = padded(texts, longest + count).to(device);
  const at::Tensor row_numbers = at::arange(rows.size(0), at_end.options());
  at::Tensor ended = at::zeros({rows.size(0)}, at_end.options().dtype(at::kBool));
  std::vector<at::Tensor> chosen;
  for (int64_t step = 0; step < count; ++step) {
    // Tokens behind a row's end are seen by no token before them.
    ModelInput input;
    input.tokens = rows.narrow(1, 0, longest + step).contiguous();
    const at::Tensor logits = model(std::move(input));  // [B, T, V]
    at::Tensor next = logits.index({row_numbers, at_end - 1}).argmax(-1);
    if (end >= 0) {
      next = at::where(ended, at::full({}, end, next.options()), next);
      ended = ended.logical_or(next == end);
    }
    rows.index_put_({row_numbers, at_end}, next);
    at_end = at_end + 1;
    chosen.push_back(next);
  }
  if (chosen.empty()) return at::zeros({static_cast<int64_t>(texts.size()), 0}, at::kLong);
  return at::stack(chosen, 1).cpu().narrow(0, 0, static_cast<int64_t>(texts.size()));
}

}  // namespace megashard
