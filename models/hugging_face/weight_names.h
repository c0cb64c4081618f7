#pragma once

#include <functional>
#include <string>

namespace megashard {

using WeightRenaming = std::function<std::string(const std::string& name)>;

/// Of a config.json's model_type: parameters' names ("model.visual.merger.ln_q.weight") to those
/// in the files that Hugging Face publishes ("visual.merger.ln_q.weight"), and back; names that are
/// of the other kind already stay. Null where both are the same. Today: qwen2_5_vl.
WeightRenaming to_published_names(const std::string& model_type);
WeightRenaming to_parameter_names(const std::string& model_type);

/// A model whose parameters have other names or shapes in the files that Hugging Face publishes.
/// Both are read; the published ones are written.
class PublishedNames {
 public:
  virtual ~PublishedNames() = default;
  virtual std::string published_name(const std::string& name) const = 0;
  /// Whether the files stack the experts of a layer (stack_experts_transposed).
  virtual bool stacks_experts() const { return false; }
};

}  // namespace megashard
