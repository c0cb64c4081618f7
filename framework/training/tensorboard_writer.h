#pragma once

#include <string>

#include "framework/training/event_file.h"
#include "framework/training/metrics_writer.h"

namespace megashard {

/// --tensorboard-dir: the metrics that have a tag, every --tensorboard-log-interval steps, by iteration and most of
/// them by samples, too, as Megatron writes them.
class TensorBoardWriter final : public MetricsWriter {
 public:
  TensorBoardWriter(const std::string& folder, int64_t loaded_step);
  void write(const StepReport& report) override;

 private:
  EventFile file_;
};

}  // namespace megashard
