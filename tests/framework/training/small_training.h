#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <utility>

#include "framework/arguments/argument_validation.h"
#include "framework/training/trainer.h"
#include "parallel/fsdp/fully_shard.h"
#include "tests/framework/training/small_run.h"
#include "tests/support/diagnostics.h"

namespace megashard::testing {

/// A training without output, which nothing stops.
inline TrainerCallbacks quiet_callbacks() {
  return {.print_on_first_rank = [](const std::string&) {},
          .stop_request = [] { return StopRequest::kNone; },
          .peak_memory_bytes = [] { return int64_t{1}; },
          .program_start = std::chrono::steady_clock::now(),
          .peak_tflops = {}};
}

/// A training of small_run(), as a test has changed it, on ranks that are threads.
struct SmallTraining {
  SmallTraining(Arguments given, int ranks) : arguments(std::move(given)) {
    arguments.world_size = ranks;
    CollectedDiagnostics collected;
    validate_arguments(arguments, {.world_size = ranks}, collected.sink());
    told = collected.text();
    data.data_path = arguments.data_path;
    data.split = *arguments.split;
    data.seq_length = *arguments.seq_length;
    data.vocab_size = 200;
  }

  /// On one of the ranks: `model`, sharded over all of them with --use-torch-fsdp2, in a trainer, which `use` gets.
  void on_rank(
      const ProcessGroupPtr& world, MultiModalModule& model, TrainerCallbacks callbacks,
      const std::function<void(Trainer& trainer)>& use = [](Trainer& trainer) { trainer.train(); }) const {
    if (arguments.use_torch_fsdp2)
      fully_shard(model, {.mesh = std::make_shared<DeviceMesh>(world, std::vector<int>{world->size()})});
    Trainer trainer(plan_training(arguments, data), model, world, world->device(), std::move(callbacks));
    use(trainer);
  }

  Arguments arguments;  // valid
  DataOptions data{};
  std::string told{};  // by the validation
};

}  // namespace megashard::testing
