#include "framework/training/split_samples.h"

#include <algorithm>

namespace megashard {

void ask_for_samples(const Arguments& arguments, int64_t train_iters, const Progress& progress, DataOptions& data) {
  const int64_t batch = *arguments.global_batch_size;
  const int64_t interval = arguments.eval_interval;
  const int64_t evaluations = train_iters / interval + 1;
  const int64_t to_come = evaluations - std::min(progress.step, train_iters) / interval;  // the last one included
  const bool trains = !arguments.skip_train && progress.step < train_iters;
  data.train_samples = trains ? arguments.train_samples.value_or(train_iters * batch) : 0;
  const int64_t evaluation = arguments.eval_iters * batch;
  data.valid_samples =
      evaluation == 0 ? 0 : std::max(evaluations * evaluation, progress.validation_samples + to_come * evaluation);
  data.test_samples = evaluation;
}

}  // namespace megashard
