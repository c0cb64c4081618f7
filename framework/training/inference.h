#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "framework/modules/multi_modal_module.h"

namespace megashard {

using TokenLists = std::vector<std::vector<int64_t>>;

/// Texts that a model is run over, of 1 token at least each.
struct InferenceBatch {
  TokenLists texts;
  Batch items{};  ///< columns of their pictures and other items (add_items), on the host
};

/// Where it runs. log_probabilities() and generate() call the model equally often on every rank, with an empty batch
/// too, as a sharded model needs it.
struct InferenceRanks {
  c10::Device device{c10::kCPU};
  SequenceShard sequence{};  ///< of ranks that share the sequences
  ProcessGroupPtr all{};     ///< all ranks of the model, which stop generating together; null: one rank
};

/// Log-probability of each token given those before it: [texts, length] fp32 on the CPU, row i
/// holding those of texts[i][1], texts[i][2], ... and then zeros. Texts have at most length + 1
/// tokens; an empty batch gives no rows. One forward, without gradients.
at::Tensor log_probabilities(MultiModalModule& model, InferenceBatch batch, int64_t length,
                             const InferenceRanks& ranks);

/// What a score head makes of each text, at its last token: [texts, 1] fp32 on the CPU. One forward, without gradients.
at::Tensor scores(MultiModalModule& model, InferenceBatch batch, const InferenceRanks& ranks);

}  // namespace megashard
