#pragma once

#include <string>

namespace megashard {

/// A model whose parameters have other names in the files that Hugging Face publishes. Both are
/// read; the published ones are written.
class PublishedNames {
 public:
  virtual ~PublishedNames() = default;
  /// Of the parameter `name` ("model.visual.merger.ln_q.weight"): "visual.merger.ln_q.weight".
  virtual std::string published_name(const std::string& name) const = 0;
};

}  // namespace megashard
