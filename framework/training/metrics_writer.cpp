#include "framework/training/metrics_writer.h"

#include "framework/training/metrics_file.h"
#include "framework/training/prometheus_file.h"
#include "framework/training/tensorboard_writer.h"

namespace megashard {

MetricsWriters make_metrics_writers(const Arguments& arguments, int64_t loaded_step) {
  MetricsWriters writers;
  if (arguments.metrics_file) writers.push_back(std::make_unique<MetricsFile>(*arguments.metrics_file, loaded_step));
  if (arguments.prometheus_file) writers.push_back(std::make_unique<PrometheusFile>(*arguments.prometheus_file));
  if (arguments.tensorboard_dir)
    writers.push_back(std::make_unique<TensorBoardWriter>(*arguments.tensorboard_dir, loaded_step));
  return writers;
}

bool writers_take(const Arguments& arguments, int64_t iteration) {
  return arguments.metrics_file || arguments.prometheus_file ||
         (arguments.tensorboard_dir && iteration % arguments.tensorboard_log_interval == 0);
}

}  // namespace megashard
