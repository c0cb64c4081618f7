#include "framework/modules/multi_modal_module.h"

#include <unordered_set>

#include "framework/diagnostics.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {

void MultiModalModule::check_sequence_ranks(int64_t /*ranks*/) const {
  TORCH_CHECK_VALUE(false, "the model ", class_name(),
                    " does not take a part of a sequence: leave out --context-parallel-size, or let its forward follow "
                    "Batch::sequence and override check_sequence_ranks()");
}

void MultiModalModule::check_sequence_ring() const {
  throw UsageError("the model " + class_name() +
                   " has no ring attention; give --context-parallel-algo "
                   "ulysses_cp_algo (--cp-comm-type a2a), which shares out attention heads.");
}

double MultiModalModule::training_flops(int64_t sequences, int64_t sequence_length) const {
  double parameters = 0;
  std::unordered_set<const c10::TensorImpl*> counted;  // tied ones have several names
  for (const auto& parameter : this->parameters()) {
    if (!counted.insert(parameter.unsafeGetTensorImpl()).second) continue;
    parameters += static_cast<double>(c10::multiply_integers(global_sizes(parameter)));
  }
  return 6 * parameters * static_cast<double>(sequences * sequence_length);
}

}  // namespace megashard
