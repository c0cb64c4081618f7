#include "launch/output/status_line.h"

#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "launch/output/short_text.h"
#include "launch/output/terminal.h"

namespace megashard {
namespace {

constexpr double kLeastSeconds = 0.05;  // before that the rate is meaningless

std::string amount_text(double amount, const char* unit) { return unit ? short_number(amount) : byte_text(amount); }

}  // namespace

std::string progress_text(const WorkProgress& progress, double seconds) {
  const auto done = static_cast<double>(progress.done), total = static_cast<double>(progress.total);
  const std::string unit = progress.unit == nullptr ? "" : std::string(" ") + progress.unit;
  std::string text = std::string(progress.name) + ": " + amount_text(done, progress.unit) + " of " +
                     amount_text(total, progress.unit) + unit;
  if (progress.total > 0) text += ", " + percent_text(done / total);
  if (progress.done == 0 || seconds < kLeastSeconds) return text;
  const double rate = done / seconds;
  text += ", " + amount_text(rate, progress.unit) + unit + "/s";
  if (progress.done < progress.total) text += ", " + duration_text((total - done) / rate) + " left";
  return text;
}

ProgressLine::ProgressLine(std::function<void(const std::string& line)> say, Intervals intervals)
    : say_(std::move(say)), intervals_(intervals), watch_([this](const WorkProgress& progress) { show(progress); }) {}

void ProgressLine::show(const WorkProgress& progress) {
  const std::lock_guard lock(mutex_);
  if (progress.total == 0) return;
  const bool begins = !clock_;
  if (begins) {
    begin_ = Clock::now();
    has_terminal_ = standard_output().is_there;
    clock_.emplace(has_terminal_ ? intervals_.terminal : intervals_.log);
  }
  if (progress.has_ended) {
    if (has_terminal_) rewrite_line("");
    clock_.reset();
    return;
  }
  if (!clock_->is_due() && !(begins && has_terminal_)) return;
  const auto text = progress_text(progress, std::chrono::duration<double>(Clock::now() - begin_).count());
  if (!has_terminal_) return say_(text);
  rewrite_line(text.substr(0, static_cast<size_t>(standard_output().columns - 1)));  // the last column would wrap
}

namespace {

std::optional<double> number_in(const StepReport& report, std::string_view key) {
  std::optional<double> found;
  for_each_metric(report, [&](const Metric& metric, double value) {
    if (metric.key != nullptr && metric.key == key) found = value;
  });
  return found;
}

/// Fields of the line, and whether they are highlighted.
std::vector<std::pair<std::string, bool>> status_fields(const StepReport& report, double step_seconds) {
  std::vector<std::pair<std::string, bool>> fields;
  const auto add = [&](const std::string& text, bool alarms = false) { fields.emplace_back(text, alarms); };
  add("step " + std::to_string(report.iteration) + "/" + std::to_string(report.train_iters));
  add("ETA " + duration_text(step_seconds * static_cast<double>(report.train_iters - report.iteration)));
  const auto& step = report.step;
  add(step.has_loss ? "loss " + (std::isfinite(step.loss) ? short_number(step.loss) : "is no number") : "no loss",
      !std::isfinite(step.loss));
  if (const auto speed = number_in(report, "tokens_per_s")) add(short_number(*speed) + " tokens/s");
  if (const auto mfu = number_in(report, "mfu")) add("MFU " + percent_text(*mfu));
  if (const auto bytes = number_in(report, "peak_memory_bytes")) add(byte_text(*bytes));
  if (const auto wait = number_in(report, "data_wait_s"))
    add("data " + duration_text(*wait), *wait > step_seconds / 10);
  return fields;
}

}  // namespace

std::string status_text(const StepReport& report, double step_seconds, const Terminal& terminal) {
  std::string text;
  auto room = static_cast<size_t>(std::max(0, terminal.columns - 1));  // the last column would wrap
  bool is_first = true;
  for (const auto& [field, alarms] : status_fields(report, step_seconds)) {
    const size_t space = is_first ? 0 : 2;
    if (field.size() + space > room) break;
    room -= field.size() + space;
    const char* color = alarms ? "\033[31m" : is_first ? "\033[1m" : nullptr;
    const bool colored = terminal.has_colors && color != nullptr;
    text += std::string(space, ' ') + (colored ? color + field + "\033[0m" : field);
    is_first = false;
  }
  return text;
}

void print_over_status(const std::string& line) { print_line((standard_output().is_there ? "\033[K" : "") + line); }

StatusLine::StatusLine(std::chrono::milliseconds interval) : clock_(interval) {}

void StatusLine::step_complete(const StepReport& report, const Requests&) {
  constexpr double kOfLast = 0.1;  // weight of the latest step
  step_seconds_ = step_seconds_ ? (1 - kOfLast) * *step_seconds_ + kOfLast * report.seconds : report.seconds;
  const Terminal terminal = standard_output();
  if (!terminal.is_there) return;
  if (!clock_.is_due() && is_shown_ && report.iteration != report.train_iters) return;
  rewrite_line(status_text(report, *step_seconds_, terminal));
  is_shown_ = true;
}

void StatusLine::clear() {
  if (std::exchange(is_shown_, false)) rewrite_line("");
}

}  // namespace megashard
