#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parallel/fsdp/grad_norm.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Base of every model (megatron.core.transformer.MegatronModule): a module that says how it is
/// checkpointed.
class MegatronModule : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;

  /// This rank's pieces of all parameters and persistent buffers by fully qualified name, without
  /// communication. The tensors alias the model: reading a checkpoint into them loads it.
  virtual ShardedTensors state_dict();
  /// From now on state_dict() leaves out what is not trained: it comes from where it came before.
  void keep_trained_only() { trained_only_ = true; }
  bool keeps_trained_only() const { return trained_only_; }
  /// All parameters and persistent buffers, whatever state_dict() keeps.
  ShardedTensors whole_state_dict();
  /// The further names of shared parameters, each with the name that state_dict() has:
  /// {"lm_head.weight", "model.embed_tokens.weight"}. PyTorch's state_dict() has all of them.
  std::vector<std::pair<std::string, std::string>> tied_names() const;
  /// What a checkpoint stores; must name the same tensors as state_dict().
  virtual ShardedTensors state_dict_for_save_checkpoint() { return state_dict(); }
  /// What --ckpt-format torch_dist stores of the model and loads into it, by the names in the checkpoint: an override
  /// may rename tensors, add some and leave some out. They alias the model, as those of state_dict(). The format stacks
  /// what it gives for the layers of a list, where they are alike (torch_dist_places). The optimizer's state keeps the
  /// parameters' own names.
  virtual ShardedTensors sharded_state_dict() { return state_dict_for_save_checkpoint(); }
  /// Whether a checkpoint's key names a weight, or optimizer state of one, that only other ranks
  /// have: experts.
  virtual bool is_on_other_rank(const std::string& /*key*/) const { return false; }
  /// A model that says so of any names the ranks which have them all together, and its own.
  virtual ExpertParallelInfo expert_parallel_info() const { return {}; }
  /// Matrices that --optimizer muon leaves to AdamW, by name (Megatron's attribute of a parameter). The default knows
  /// the usual names: embed_tokens, word_embeddings, lm_head, output_layer, ...
  virtual bool is_embedding_or_output_parameter(const std::string& name) const;
  /// Of a matrix that holds several projections: the rows that each of them has in a group of rows (Megatron's query
  /// groups, one behind the other); empty: it is one projection.
  virtual std::vector<int64_t> qkv_split_shapes(const std::string& /*name*/,
                                                const std::vector<int64_t>& /*sizes*/) const {
    return {};
  }

 private:
  bool trained_only_ = false;
};

}  // namespace megashard
