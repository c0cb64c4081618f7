#include "framework/training/training_plan.h"

#include <utility>

#include "framework/training/loss_scale.h"

namespace megashard {

TrainingPlan plan_training(const Arguments& arguments, DataOptions sets) {
  return {.length = run_length(arguments),
          .data = training_data_options(arguments, std::move(sets)),
          .objective = arguments.objective,
          .objective_options = arguments.objective_options,
          .step = {.clip_grad = arguments.clip_grad,
                   .needs_finite_gradients = arguments.check_for_nan_in_loss_and_grad,
                   .calculate_per_token_loss = arguments.calculate_per_token_loss,
                   .loss_by_weights = arguments.loss_by_weights,
                   .reduces_each_microbatch = arguments.reduce_scatter_during_grad_accumulation,
                   .empty_unused_memory_level = arguments.empty_unused_memory_level,
                   .check_collective_order = arguments.check_collective_order},
          .optimizer = optimizer_options(arguments),
          .schedule = scheduler_options(arguments),
          .loss_scale = scaler_options(arguments),
          .sequences = arguments,
          .due = due_options(arguments),
          .saves = arguments,
          .log = arguments,
          .callbacks = arguments.callback,
          .callback_options = arguments.callback_options,
          .outputs = output_paths(arguments, /*saves=*/!arguments.skip_train),
          .first_weights = arguments.from_scratch ? "" : arguments.hf_model.value_or(""),
          .frozen_weights = arguments.lora_r ? arguments.hf_model.value_or("") : "",
          .arguments = arguments};
}

}  // namespace megashard
