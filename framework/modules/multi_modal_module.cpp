#include "framework/modules/multi_modal_module.h"

#include "parallel/fsdp/fully_shard.h"

namespace megashard {

double MultiModalModule::training_flops(int64_t sequences, int64_t sequence_length) const {
  double parameters = 0;
  for (const auto& parameter : this->parameters()) {
    parameters += static_cast<double>(c10::multiply_integers(global_sizes(parameter)));
  }
  return 6 * parameters * static_cast<double>(sequences * sequence_length);
}

}  // namespace megashard
