#pragma once

#include "framework/modules/multi_modal_module.h"

namespace megashard::testing {

/// A batch of two columns. Omits undefined labels.
inline Batch tokens_and_labels(const at::Tensor& tokens, const at::Tensor& labels = {}) {
  Batch batch;
  batch.set(kTokens, tokens);
  batch.set(kLabels, labels);
  return batch;
}

/// This rank's rows of a batch with whole sequences, prepared and on `device`, as in TrainStep.
inline Batch rows_on(const MultiModalModule& model, Batch whole, c10::Device device) {
  return rows_of_rank(to_device(model.prepared(std::move(whole)), device));
}

/// Logits of a batch without labels; else the losses of the tokens, with all aux terms added to each.
inline at::Tensor result_of(MultiModalModule& model, Batch input) {
  const ModelOutput output = model(std::move(input));
  if (output.logits.defined()) return output.logits;
  at::Tensor losses = output.token_losses;
  for (const AuxTerm& term : output.aux) losses = losses + term.value;
  return losses;
}

}  // namespace megashard::testing
