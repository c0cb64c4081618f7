// Loss and gradient of an objective, for test_policy.py. objective_values IN OUT NAME [FLAG VALUE]...
//
// IN: safetensors with token_losses, loss_mask and columns [B, T] float32, conversation.NAME [B]. OUT: loss, and grad
// [B, T] by the token losses. The loss of each row is computed by itself and divided by the count of all, as ranks and
// micro batches do it.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>

#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/hugging_face/safetensors.h"
#include "framework/objectives/objectives.h"
#include "framework/objectives/sequences.h"

namespace megashard {
namespace {

constexpr const char* kTokenLosses = "token_losses";
constexpr std::string_view kOfConversations = "conversation.";

Batch row_of(const SafetensorsFile& file, int64_t row) {
  Batch batch;
  for (const auto& info : file.tensors()) {
    const at::Tensor own = file.tensor(info.name).narrow(0, row, 1);
    const bool is_item = info.name.starts_with(kOfConversations);
    batch.set(is_item ? info.name.substr(kOfConversations.size()) : info.name, own,
              is_item ? Axis::kItem : Axis::kToken, /*is_input=*/false);
  }
  add_sequences(batch);
  return batch;
}

void write_values(char** words, int count) {
  const SafetensorsFile file(words[1]);
  std::map<std::string, double> options;
  for (int i = 4; i + 1 < count; i += 2) options[words[i]] = std::strtod(words[i + 1], nullptr);
  const auto objective = make_objective(words[3], options);
  const int64_t rows = file.info(kTokenLosses).sizes[0];
  at::Tensor terms, loss, sum;
  for (int64_t row = 0; row < rows; ++row) {
    const at::Tensor own = objective->count(row_of(file, row));
    terms = row == 0 ? own : terms + own;
  }
  std::vector<at::Tensor> grads;
  for (int64_t row = 0; row < rows; ++row) {
    Batch batch = row_of(file, row);
    const at::Tensor losses = batch.take(kTokenLosses).clone().requires_grad_();
    const at::Tensor own =
        ((*objective)({.token_losses = losses, .batch = batch, .mean_over_ranks = nullptr}).sum / terms).sum();
    own.backward();
    grads.push_back(losses.grad());
    sum = row == 0 ? own.detach() : sum + own.detach();
  }
  const at::Tensor grad = at::cat(grads);
  SafetensorsWriter out(words[2], {{.name = "loss", .dtype = at::kFloat, .sizes = {}},
                                   {.name = "grad", .dtype = at::kFloat, .sizes = grad.sizes().vec()}});
  for (const auto& info : out.tensors()) out.write(info.name == "loss" ? sum : grad);
  out.finish();
}

}  // namespace
}  // namespace megashard

int main(int argc, char** argv) {
  megashard::write_values(argv, argc);
  return 0;
}
