#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "checkpoint/values/tensor_info.h"
#include "checkpoint/weights/weight_map.h"

namespace megashard {

/// A parameter or buffer of a model and its tensors in the files.
struct WeightTarget {
  at::Tensor parameter;
  std::vector<std::string> names;     ///< possible names in files, if it is stored as it is; several if tied
  std::vector<WeightPart> parts{};    ///< its location in the files, by their names; empty: missing
  std::vector<std::string> others{};  ///< additional names in the files
  bool is_bare = false;               ///< files have the name of a decoder without head: "layers.0...."
};

/// Differences between weights in files and a model's.
struct WeightMismatch {
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  std::vector<std::string> integers;      ///< maybe quantised weights
  std::vector<std::string> sizes;         ///< "lm_head.weight [8, 4] for lm_head.weight [8, 6]"
  std::string hint{};                     ///< possible origin of unexpected names
  std::vector<std::string> predicting{};  ///< not a difference: layers of multi-token prediction, which are not read
  std::vector<std::string> unused{};      ///< not a difference: follows from config.json
  std::vector<std::string> heads{};       ///< not a difference: lm_head's, of a model whose head is `score`
  std::vector<std::string> of_others{};   ///< not a difference: of a model beside this one

  /// "; missing: a; unexpected: b"; empty if there are no differences.
  std::string text() const;
};

/// True for an untied head that is missing in the files and is copied from the embeddings.
bool is_borrowed_head(const WeightTarget& target);

/// True for `score` where the files are those of a language model: it begins with new values.
bool is_new_score(const WeightTarget& target);

/// The module's parameters and buffers without duplicates and adapters, with their sources among `stored`, by the rules
/// of load_hf_weights.
std::vector<WeightTarget> match_weights(const torch::nn::Module& module, const std::vector<TensorInfo>& stored,
                                        WeightMismatch& mismatch);

}  // namespace megashard
