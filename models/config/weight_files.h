#pragma once

#include <string>

namespace megashard {

/// Published names and shapes of a family's weights, if they differ from its parameters.
struct WeightFiles {
  using Renaming = std::string (*)(const std::string& name);
  /// Convert parameter names ("model.visual.merger.ln_q.weight") to names in the files ("visual.merger.ln_q.weight"),
  /// and back. Names already in the result's form are unchanged. Null: both are equal.
  Renaming to_published_names = nullptr;
  Renaming to_parameter_names = nullptr;

  /// Storage of a layer's experts: none, separate, or all in two tensors (moe/stacked_experts.h).
  enum class Experts { kNone, kSeparate, kStacked };
  Experts experts = Experts::kNone;
};

/// A model whose parameters may have other names or shapes in files. Both forms can be read; the published one is
/// written.
class PublishedWeights {
 public:
  virtual ~PublishedWeights() = default;
  virtual const WeightFiles& weight_files() const = 0;
  std::string published_name(const std::string& name) const {
    const auto rename = weight_files().to_published_names;
    return rename == nullptr ? name : rename(name);
  }
};

}  // namespace megashard
