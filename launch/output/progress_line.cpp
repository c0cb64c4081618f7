#include "launch/output/progress_line.h"

#include <utility>

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

}  // namespace megashard
