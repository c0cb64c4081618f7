#include "framework/training/tensorboard_writer.h"

namespace megashard {

TensorBoardWriter::TensorBoardWriter(const std::string& folder, int64_t loaded_step) : file_(folder) {
  if (loaded_step > 0) file_.start_at(loaded_step + 1);
  file_.flush();
}

void TensorBoardWriter::write(const StepReport& report) {
  const bool is_due = report.iteration % report.arguments.tensorboard_log_interval == 0;
  if (!is_due && !report.validation_loss) return;
  for_each_metric(report, [&](const Metric& metric, double value) {
    if (metric.tag == nullptr || !(is_due || metric.of_evaluation)) return;
    file_.add_scalar(metric.tag, value, report.iteration);
    if (metric.by_samples) file_.add_scalar(metric.tag + std::string(" vs samples"), value, report.consumed_samples);
  });
  file_.flush();
}

}  // namespace megashard
