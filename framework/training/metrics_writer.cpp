#include "framework/training/metrics_writer.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <utility>

#include "framework/training/event_file.h"
#include "framework/training/metrics_file.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {

namespace {

/// The shortest text that reads back equal; what is not finite in Prometheus' words.
std::string number_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

/// A step's metrics that have a key, as gauges: "megashard_loss 2.25" behind its type.
std::string prometheus_text(const StepReport& report, const LoggingArguments& log) {
  std::string text;
  const auto add = [&](const Metric& metric, double value) {
    if (metric.key == nullptr) return;
    std::string name = std::string("megashard_") + metric.key;
    std::ranges::replace_if(
        name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
    text += "# TYPE " + name + " gauge\n" + name + " " + number_text(value) + "\n";
  };
  for_each_metric(report, add, &log);
  return text;
}

/// --prometheus-file: replaced at each step and never seen half written, as the textfile collector of Prometheus'
/// node_exporter reads it (its files end in .prom).
class PrometheusFile final : public MetricsWriter {
 public:
  explicit PrometheusFile(const LoggingArguments& log) : log_(log), path_(*log.prometheus_file) {}
  void write(const StepReport& report) override {
    const auto written = path_ + ".next";
    std::ofstream file(written);
    file << prometheus_text(report, log_) << std::flush;
    std::error_code error;
    if (file) std::filesystem::rename(written, path_, error);
    if (!file || error)
      throw std::runtime_error("Prometheus file " + path_ + " could not be written; is the disk full?");
  }

 private:
  const LoggingArguments& log_;
  std::string path_;
};

/// --tensorboard-dir: the metrics that have a tag, every --tensorboard-log-interval steps, by iteration and most of
/// them by samples, too, as Megatron writes them.
class TensorBoardWriter final : public MetricsWriter {
 public:
  TensorBoardWriter(const LoggingArguments& log, int64_t loaded_step) : log_(log), file_(*log.tensorboard_dir) {
    if (loaded_step > 0) file_.start_at(loaded_step + 1);
    file_.flush();
  }
  void write(const StepReport& report) override {
    const bool is_due = report.iteration % log_.tensorboard_log_interval == 0;
    if (!is_due && !report.validation_loss) return;
    const auto add = [&](const Metric& metric, double value) {
      if (metric.tag == nullptr || !(is_due || metric.of_evaluation)) return;
      file_.add_scalar(metric.tag, value, report.iteration);
      if (metric.by_samples) file_.add_scalar(metric.tag + std::string(" vs samples"), value, report.consumed_samples);
    };
    for_each_metric(report, add, &log_);
    file_.flush();
  }

 private:
  const LoggingArguments& log_;
  EventFile file_;
};

}  // namespace

MetricsFiles::MetricsFiles(const LoggingArguments& log, DiagnosticSink sink) : log_(log), sink_(std::move(sink)) {}

void MetricsFiles::open_writers(int64_t loaded_step) {
  if (log_.metrics_file) writers_.push_back(std::make_unique<MetricsFile>(*log_.metrics_file, loaded_step, &log_));
  if (log_.prometheus_file) writers_.push_back(std::make_unique<PrometheusFile>(log_));
  if (log_.tensorboard_dir) writers_.push_back(std::make_unique<TensorBoardWriter>(log_, loaded_step));
}

void MetricsFiles::open(const Arguments& arguments, const Progress& progress, const ProcessGroupPtr& world,
                        const std::function<void(const std::string& line)>& print) {
  std::string kept;
  all_or_rethrow(world, [&] {
    if (world->rank() != 0) return;
    const bool is_fresh = progress.step == 0 && !arguments.overwrite_run;
    if (log_.metrics_file && is_fresh) kept = keep_earlier_metrics(*log_.metrics_file);
    open_writers(progress.step);
  });
  if (!kept.empty()) print("the steps of another run in --metrics-file " + *log_.metrics_file + " are kept as " + kept);
  if (!log_.metrics_file || world->rank() != 0) return;
  events_.open(*log_.metrics_file, progress.step);
  events_.start(arguments, progress);
}

bool MetricsFiles::reads(int64_t step) const {
  return log_.metrics_file || log_.prometheus_file ||
         (log_.tensorboard_dir && step % log_.tensorboard_log_interval == 0);
}

void MetricsFiles::step_complete(const StepReport& step, const Requests&) {
  for (const auto& writer : writers_) {
    try {
      writer->write(step);
    } catch (const std::exception& error) {
      if (!std::exchange(has_reported_failure_, true) && sink_)
        sink_(Severity::kWarning, error_text(error) + "; training goes on, and leaves out such steps there");
    }
  }
}

void MetricsFiles::training_ended(TrainingEnd how, int64_t step) {
  constexpr const char* kNames[] = {"done", "exited", "interrupted"};
  events_.end(kNames[static_cast<size_t>(how)], step);
}

}  // namespace megashard
