#include <c10/util/StringUtil.h>

#include <cmath>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/argument_validation.h"
#include "launch/roll/roll_worker.h"

namespace megashard {
namespace {

using std::to_string;

void check_devices(const RollWorker& worker, int64_t world_size) {
  const auto check = [&](const std::optional<int64_t>& count, const std::string& key) {
    require(!count || *count == world_size,
            worker.role + "." + key + " is for " + to_string(count.value_or(0)) + " devices, but the run has " +
                to_string(world_size) + " ranks; start as many ranks as the configuration has devices, or change it.");
  };
  const auto devices = static_cast<int64_t>(worker.device_mapping.size());
  check(devices == 0 ? std::nullopt : std::optional(devices), "device_mapping");
  check(worker.world_size, "world_size");
}

/// Applies expert parallelism.
void apply_experts(RollWorker& worker, const Arguments& arguments, int64_t world_size) {
  const int64_t spread = arguments.expert_model_parallel_size;
  require(spread >= 1, worker.role + ": ep_size is " + to_string(spread) + "; it is a number of ranks, so at least 1.");
  if (spread == 1) {
    if (worker.efsdp_size > 1) worker.unused.push_back(worker.role + ": efsdp_size, for ep_size is 1");
    return;
  }
  const std::string sizes = worker.role + ": ep_size " + to_string(spread);
  require(world_size % spread == 0,
          sizes + " must divide the number of ranks, " + to_string(world_size) + "; change one of them.");
  const int64_t holders = world_size / spread;
  require(holders % worker.efsdp_size == 0, sizes + " on " + to_string(world_size) + " ranks leaves " +
                                                to_string(holders) + " with the same experts; efsdp_size, which is " +
                                                to_string(worker.efsdp_size) + ", must divide that.");
  worker.sharding.expert_shard_size = static_cast<int>(worker.efsdp_size);
}

void apply_length(const RollWorker& worker, Arguments& arguments, const std::function<int64_t()>& samples_of_epoch,
                  const DiagnosticSink& sink) {
  const int64_t batch = *arguments.global_batch_size;
  if (arguments.train_iters || arguments.train_samples) return;
  const auto of_epochs = [&] {
    const int64_t samples = samples_of_epoch();
    const int64_t steps = std::max<int64_t>(1, samples / batch);
    const auto iterations = static_cast<int64_t>(std::ceil(worker.epochs * static_cast<double>(steps)));
    sink(Severity::kNotice, "ROLL: " + worker.role + ": num_train_epochs " + argument_text(worker.epochs) + " of " +
                                to_string(samples) + " sequences, " + to_string(batch) + " an iteration, are " +
                                to_string(iterations) + " iterations");
    return iterations;
  };
  if (!is_roll_loss_replaced(worker, arguments))
    arguments.train_iters = roll_pipeline_steps(worker, batch, of_epochs, sink);
  if (!arguments.train_iters) arguments.train_iters = worker.max_steps > 0 ? worker.max_steps : of_epochs();
}

void derive_global_batch(const RollWorker& worker, Arguments& arguments, int64_t world_size,
                         const DiagnosticSink& sink) {
  if (arguments.global_batch_size) return;
  const int64_t shared = arguments.context_parallel_size;
  require(shared >= 1 && world_size % shared == 0, worker.role + ": ulysses_size " + to_string(shared) +
                                                       " must divide the number of ranks, " + to_string(world_size) +
                                                       "; change one of them.");
  const int64_t ranks = world_size / shared;
  const int64_t micro = *arguments.micro_batch_size, steps = worker.gradient_accumulation_steps;
  require(micro >= 1,
          worker.role + ": per_device_train_batch_size is " + to_string(micro) + "; it must be at least 1.");
  arguments.global_batch_size = micro * steps * ranks;
  sink(Severity::kNotice, "ROLL: " + worker.role + ": per_device_train_batch_size " + to_string(micro) +
                              " * gradient_accumulation_steps " + to_string(steps) + " * " + to_string(ranks) +
                              " ranks are a global batch of " + to_string(*arguments.global_batch_size));
}

void apply_batches(const RollWorker& worker, Arguments& arguments, int64_t world_size, const DiagnosticSink& sink) {
  derive_global_batch(worker, arguments, world_size, sink);
  const int64_t batch = *arguments.global_batch_size;
  require(batch >= 1,
          worker.role + ": the global batch has " + to_string(batch) + " sequences; it must have at least 1.");
}

void apply_warmup(const RollWorker& worker, Arguments& arguments) {
  const bool flags = arguments.lr_warmup_fraction || arguments.lr_warmup_iters != 0 || arguments.lr_warmup_samples != 0;
  if (flags || arguments.train_samples) return;
  arguments.lr_warmup_iters =
      worker.warmup_steps > 0
          ? worker.warmup_steps
          : static_cast<int64_t>(std::ceil(worker.warmup_ratio * static_cast<double>(*arguments.train_iters)));
  // ROLL's schedule may end before its warm-up: then the decay begins after the run.
  if (!arguments.lr_decay_iters && arguments.lr_warmup_iters >= *arguments.train_iters)
    arguments.lr_decay_iters = arguments.lr_warmup_iters + 1;
}

/// ROLL's AdamW decays every parameter.
void apply_decay(Arguments& arguments) {
  if (arguments.weight_decay == 0) return;
  auto& overrides = arguments.param_group_overrides;
  overrides.insert(overrides.begin(), "*:wd_mult=1");
}

void apply_recompute(RollWorker& worker, Arguments& arguments) {
  const bool flags = arguments.recompute_granularity || arguments.recompute_activations;
  worker.recompute = worker.recompute && !flags;
  if (!worker.recompute) return;
  arguments.recompute_granularity = RecomputeGranularity::kFull;
  arguments.recompute_method = RecomputeMethod::kUniform;
  arguments.recompute_num_layers = 1;
}

}  // namespace

void apply_roll_worker(RollWorker& worker, Arguments& arguments, int64_t world_size,
                       const std::function<int64_t()>& samples_of_epoch, const DiagnosticSink& sink,
                       const RunParts& parts) {
  check_devices(worker, world_size);
  const bool all = worker.fsdp_size <= 1 || worker.fsdp_size >= world_size;
  require(all || world_size % worker.fsdp_size == 0, worker.role + ": fsdp_size " + to_string(worker.fsdp_size) +
                                                         " must divide the number of ranks, " + to_string(world_size) +
                                                         "; change it, or write 1 to shard over all of them.");
  if (!all) worker.sharding.sharding_size = static_cast<int>(worker.fsdp_size);
  apply_experts(worker, arguments, world_size);
  if (worker.trains) {
    apply_batches(worker, arguments, world_size, sink);
    check_roll_loss(worker, arguments, sink);
    if (parts.schedule) {
      apply_length(worker, arguments, samples_of_epoch, sink);
      apply_warmup(worker, arguments);
    }
    apply_decay(arguments);
    apply_recompute(worker, arguments);
  }
  if (!arguments.save) {  // the file's intervals and retention apply with --save only
    arguments.async_save = false;
    arguments.save_interval.reset();
  }
  if (!worker.dropped_by_roll.empty())
    sink(Severity::kNotice,
         "ROLL: read here, though ROLL itself drops them: " + c10::Join(", ", worker.dropped_by_roll));
  if (!worker.unused.empty()) sink(Severity::kNotice, "ROLL: not used here: " + c10::Join(", ", worker.unused));
}

}  // namespace megashard
