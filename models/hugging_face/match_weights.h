#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/values/tensor_info.h"
#include "models/moe/stacked_experts.h"

namespace megashard {

/// A parameter of a model, and what files have for it.
struct WeightTarget {
  at::Tensor parameter;
  std::vector<std::string> names;          ///< that it may have in files; more than one: tied
  std::string source{};                    ///< its name in the files; empty: they lack it
  std::vector<std::string> others{};       ///< further names that the files have for it
  std::optional<StackedWeight> stacked{};  ///< where in it
};

/// How the weights in files differ from a model's.
struct WeightMismatch {
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  std::vector<std::string> integers;  ///< they may be quantised
  std::vector<std::string> sizes;     ///< "lm_head.weight [8, 4] for lm_head.weight [8, 6]"
  std::string hint{};                 ///< where what is unexpected may come from
  std::vector<std::string> unused{};  ///< no difference: what follows from config.json

  /// "; missing: a; unexpected: b"; empty: they do not differ.
  std::string text() const;
};

inline constexpr const char* kHeadWeight = "lm_head.weight";
/// A head of its own that the files lack: it takes the embeddings.
bool is_borrowed_head(const WeightTarget& target);
/// Whether the files call the weight as a decoder without a head does (transformers' AutoModel): "layers.0...." and
/// not "model.layers.0....".
bool is_bare_name(const WeightTarget& target);

/// The module's parameters, each once, adapters left out, and their sources among `stored`, by the
/// rules of load_hf_weights.
std::vector<WeightTarget> match_weights(const torch::nn::Module& module, const std::vector<TensorInfo>& stored,
                                        WeightMismatch& mismatch);

}  // namespace megashard
