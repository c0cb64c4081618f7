#pragma once

#include <string>

#include "framework/training/metrics_writer.h"

namespace megashard {

/// A step's metrics that have a key, as gauges in Prometheus' text format: "megashard_loss 2.25" behind its type.
std::string prometheus_text(const StepReport& report);

/// A file that is replaced at each step and never seen half written, as the textfile collector of Prometheus'
/// node_exporter reads it (its files end in .prom).
class PrometheusFile final : public MetricsWriter {
 public:
  explicit PrometheusFile(std::string path) : path_(std::move(path)) {}
  void write(const StepReport& report) override;

 private:
  std::string path_;
};

}  // namespace megashard
