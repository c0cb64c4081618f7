#include "framework/training/run_listeners.h"

#include <optional>
#include <utility>

#include "framework/training/training_log.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {
namespace {

bool is_due(const std::optional<int64_t>& interval, int64_t step) { return interval && step % *interval == 0; }

}  // namespace

DueSteps::DueSteps(const Arguments& arguments, bool is_first_rank, std::chrono::steady_clock::time_point start)
    : arguments_(arguments), is_first_rank_(is_first_rank), start_(start) {}

bool DueSteps::reads(int64_t step) const {
  return arguments_.exit_signal_handler || arguments_.exit_duration_in_mins || is_due(arguments_.exit_interval, step) ||
         (arguments_.save && is_due(arguments_.save_interval, step)) ||
         (arguments_.eval_iters > 0 && is_due(arguments_.eval_interval, step));
}

Requests DueSteps::requests(int64_t step) {
  const auto& minutes = arguments_.exit_duration_in_mins;
  const std::chrono::duration<double> running = std::chrono::steady_clock::now() - start_;
  const bool is_late = is_first_rank_ && minutes && running.count() / 60 > static_cast<double>(*minutes);
  return {.save = is_due(arguments_.save_interval, step),
          .evaluate = arguments_.eval_iters > 0 && is_due(arguments_.eval_interval, step),
          .exit = is_late || is_due(arguments_.exit_interval, step)};
}

LogLines::LogLines(StepTimers* timers, PrintLine print) : timers_(timers), print_(std::move(print)) {}

void LogLines::step_ended(const StepReport& step) {
  if (!step.has_line) return;
  print_(training_log_line(log_time_now(), step));
  if (timers_ != nullptr) print_(timers_->log_steps(step.interval.steps));
}

MetricsFiles::MetricsFiles(const Arguments& arguments, DiagnosticSink sink)
    : arguments_(arguments), sink_(std::move(sink)) {}

bool MetricsFiles::reads(int64_t step) const { return writers_take(arguments_, step); }

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

MemoryLines::MemoryLines(std::shared_ptr<MemoryLog> memory, RunEvents& events, PrintLine print)
    : memory_(std::move(memory)), events_(events), print_(std::move(print)) {}

void MemoryLines::weights_updated(int64_t step) {
  const auto peak = memory_->grown(step);
  if (!peak) return;
  print_(memory_line(*peak));
  events_.memory(*peak);
}

Profiler::Profiler(const Arguments& arguments, const ProcessGroup& world, c10::Device device,
                   std::shared_ptr<MemoryLog> memory, RunEvents& events, PrintLine print)
    : memory_(std::move(memory)),
      profile_(arguments, world, device, memory_.get()),
      events_(events),
      print_(std::move(print)) {}

void Profiler::step_starts(int64_t step) { profile_.begin_step(step - 1); }

void Profiler::weights_updated(int64_t step) { log(profile_.end_step(step), step); }

void Profiler::steps_ended(int64_t step) { log(profile_.finish(), step); }

void Profiler::log(const std::string& path, int64_t step) {
  if (path.empty()) return;
  events_.profile(path, step);
  print_(c10::str("wrote a profile that ends with iteration ", step, " to ", path));
}

}  // namespace megashard
