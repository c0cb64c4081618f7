#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "framework/modules/multi_modal_module.h"
#include "framework/training/inference.h"
#include "framework/training/sampling.h"

namespace megashard {

struct GenerationOptions {
  int64_t max_new_tokens = 0;
  SamplingOptions sampling{};
  std::vector<int64_t> ends{};  ///< a text goes on up to one of these tokens, with it
  int64_t seed = 0;             ///< chooses the random numbers
};

/// What follows each text, on the CPU.
struct Generated {
  at::Tensor tokens;     ///< [texts, max_new_tokens] int64; behind the end a row repeats it
  at::Tensor log_probs;  ///< [texts, max_new_tokens] fp32: SampledTokens::log_probs; behind the end 0
  at::Tensor lengths;    ///< [texts] int64: tokens up to the end, with it
};

/// Continues each text token by token. `numbers`: of the texts, for their random numbers; a temperature of 0 needs
/// none. The model keeps keys and values if it can (why_recomputed), and its parameters stay unsharded until all ranks'
/// texts have ended. Texts do not change each other. Pictures are those of the texts; what is added is text. Collective
/// over InferenceRanks::all.
Generated generate(MultiModalModule& model, const InferenceBatch& batch, const std::vector<TextNumber>& numbers,
                   const GenerationOptions& options, const InferenceRanks& ranks);

/// The reason why each token takes a forward of the whole text; empty: it takes one of the token before it.
std::string why_recomputed(const MultiModalModule& model, const InferenceRanks& ranks);

}  // namespace megashard
