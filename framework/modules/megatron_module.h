#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/weights/weight_map.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Base class of all models (megatron.core.transformer.MegatronModule): a module that defines its checkpoint.
class MegatronModule : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;

  /// This rank's shards of all parameters and persistent buffers by fully qualified name. No communication. The tensors
  /// alias the model, so reading a checkpoint into them loads it.
  virtual ShardedTensors state_dict();
  /// Makes state_dict() leave out frozen parameters, which are loaded from their original source.
  void keep_trained_only() { trained_only_ = true; }
  bool keeps_trained_only() const { return trained_only_; }
  /// All parameters and persistent buffers, regardless of keep_trained_only().
  ShardedTensors whole_state_dict();
  /// Additional names of shared parameters, with the name in state_dict(): {"lm_head.weight",
  /// "model.embed_tokens.weight"}. PyTorch's state_dict() has all names.
  std::vector<std::pair<std::string, std::string>> tied_names() const;
  /// Tensors stored in a checkpoint; must have the same names as state_dict().
  virtual ShardedTensors state_dict_for_save_checkpoint() { return state_dict(); }
  /// Tensors that --ckpt-format torch_dist stores and loads, by their names in the checkpoint. An override may rename,
  /// add or omit tensors. They alias the model, like those of state_dict(). The format stacks layers of a list with
  /// equal tensors (torch_dist_places). Optimizer state keeps the parameters' names.
  virtual ShardedTensors sharded_state_dict() { return state_dict_for_save_checkpoint(); }
  /// How Hugging Face's files, and checkpoints of earlier versions, have its tensors, where that is not as here.
  virtual WeightMap weight_map() const { return {}; }
  /// Matrices, by name, for which --optimizer muon uses AdamW (Megatron's attribute of a parameter). The default
  /// matches the usual names: embed_tokens, word_embeddings, lm_head, output_layer, ...
  virtual bool is_embedding_or_output_parameter(const std::string& name) const;
  /// True for a parameter that stacks matrices over its leading dimensions (experts), which --optimizer muon
  /// orthogonalises one by one.
  virtual bool is_stack_of_matrices(const std::string& /*name*/) const { return false; }
  /// For a matrix with several projections: rows of each projection per group (Megatron's query groups, concatenated);
  /// empty for a single projection.
  virtual std::vector<int64_t> qkv_split_shapes(const std::string& /*name*/,
                                                const std::vector<int64_t>& /*sizes*/) const {
    return {};
  }

 private:
  bool trained_only_ = false;
};

/// state_dict_for_save_checkpoint(), checked against state_dict(): Megatron saves the one
/// and loads into the other. Throws an error that names the tensors which only one of them has,
/// or which have other sizes or another dtype there.
ShardedTensors checked_state_dict(MegatronModule& model);

}  // namespace megashard
