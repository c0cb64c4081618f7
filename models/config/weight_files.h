#pragma once

#include <string>

namespace megashard {

/// How Hugging Face publishes a family's weights, where that is not how its parameters are.
struct WeightFiles {
  using Renaming = std::string (*)(const std::string& name);
  /// Parameters' names ("model.visual.merger.ln_q.weight") to those in the files
  /// ("visual.merger.ln_q.weight"), and back; names that are of the other kind already stay. Null:
  /// both are the same.
  Renaming to_published_names = nullptr;
  Renaming to_parameter_names = nullptr;

  /// A layer's experts: none, each by itself, or all in two tensors (moe/stacked_experts.h).
  enum class Experts { kNone, kSeparate, kStacked };
  Experts experts = Experts::kNone;
};

/// A model whose parameters may have other names or shapes in files. Both are read; the published
/// ones are written.
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
