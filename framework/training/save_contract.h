#pragma once

#include "framework/modules/megatron_module.h"

namespace megashard {

/// state_dict_for_save_checkpoint(), checked against state_dict(): Megatron saves the one
/// and loads into the other. Throws an error that names the tensors which only one of them has,
/// or which have other sizes or another dtype there.
ShardedTensors checked_state_dict(MegatronModule& model);

}  // namespace megashard
