#pragma once

#include <torch/nn/module.h>

#include "parallel/sharded_tensor.h"

namespace megashard {

/// Base of every model (megatron.core.transformer.MegatronModule): a module that says how it is
/// checkpointed.
class MegatronModule : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;

  /// This rank's pieces of all parameters and persistent buffers by fully qualified name, without
  /// communication. The tensors alias the model: reading a checkpoint into them loads it.
  virtual ShardedTensors sharded_state_dict();
  /// What a torch_dcp checkpoint stores; must name the same tensors as sharded_state_dict().
  virtual ShardedTensors state_dict_for_save_checkpoint() { return sharded_state_dict(); }
};

}  // namespace megashard
