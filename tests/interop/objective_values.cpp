// Loss and gradients of an objective, for test_policy.py and others. objective_values IN OUT NAME [FLAG VALUE]...
//
// IN: safetensors with token_losses, loss_mask and columns [B, T] or [K, B, T], conversation.NAME [B], and the model's
// other outputs as output.NAME. OUT: loss, grad by the token losses, and grad.NAME by each other output. The loss of
// each row is computed by itself and divided by the count of all, as ranks and micro batches do it.
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
constexpr std::string_view kOfConversations = "conversation.", kOfModel = "output.";

at::Tensor row_in(const SafetensorsFile& file, const std::string& name, int64_t row) {
  const at::Tensor whole = file.tensor(name);
  return whole.narrow(whole.dim() == 3 ? 1 : 0, row, 1);
}

Batch row_of(const SafetensorsFile& file, int64_t row) {
  Batch batch;
  for (const auto& info : file.tensors()) {
    if (info.name == kTokenLosses || info.name.starts_with(kOfModel)) continue;
    const bool is_item = info.name.starts_with(kOfConversations);
    batch.set(is_item ? info.name.substr(kOfConversations.size()) : info.name, row_in(file, info.name, row),
              is_item ? Axis::kItem : Axis::kToken, /*is_input=*/false);
  }
  add_sequences(batch);
  return batch;
}

/// The model's outputs, of which the gradients are taken, by their names in the file of results.
std::map<std::string, at::Tensor> outputs_of(const SafetensorsFile& file, int64_t row) {
  std::map<std::string, at::Tensor> outputs;
  for (const auto& info : file.tensors()) {
    const bool is_loss = info.name == kTokenLosses;
    if (!is_loss && !info.name.starts_with(kOfModel)) continue;
    outputs[is_loss ? "grad" : "grad." + info.name.substr(kOfModel.size())] =
        row_in(file, info.name, row).clone().requires_grad_();
  }
  return outputs;
}

void write_values(char** words, int count) {
  const SafetensorsFile file(words[1]);
  std::map<std::string, double> options;
  for (int i = 4; i + 1 < count; i += 2) options[words[i]] = std::strtod(words[i + 1], nullptr);
  const auto objective = make_objective(words[3], options);
  const int64_t rows = file.info(kLossMask).sizes[0];
  at::Tensor terms, sum;
  for (int64_t row = 0; row < rows; ++row) {
    const at::Tensor own = objective->count(row_of(file, row));
    terms = row == 0 ? own : terms + own;
  }
  std::map<std::string, std::vector<at::Tensor>> grads;
  for (int64_t row = 0; row < rows; ++row) {
    const Batch batch = row_of(file, row);
    auto outputs = outputs_of(file, row);
    const LossInputs in{.token_losses = outputs["grad"],
                        .batch = batch,
                        .mean_over_ranks = nullptr,
                        .values = outputs["grad.values"],
                        .entropies = outputs["grad.entropies"],
                        .teacher_log_probs = outputs["grad.teacher_log_probs"]};
    const at::Tensor own = ((*objective)(in).sum / terms).sum();
    own.backward();
    for (const auto& [name, output] : outputs) {
      if (output.defined() && output.grad().defined()) grads[name].push_back(output.grad());
    }
    sum = row == 0 ? own.detach() : sum + own.detach();
  }
  std::map<std::string, at::Tensor> results{{"loss", sum}};
  for (const auto& [name, of_rows] : grads) results[name] = at::cat(of_rows, -2);
  std::vector<TensorInfo> infos;
  for (const auto& [name, result] : results)
    infos.push_back({.name = name, .dtype = at::kFloat, .sizes = result.sizes().vec()});
  SafetensorsWriter out(words[2], infos);
  for (const auto& info : out.tensors()) out.write(results.at(info.name));
  out.finish();
}

}  // namespace
}  // namespace megashard

int main(int argc, char** argv) {
  megashard::write_values(argv, argc);
  return 0;
}
