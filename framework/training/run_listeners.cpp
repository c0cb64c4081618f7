#include "framework/training/run_listeners.h"

#include <optional>
#include <utility>

#include "framework/training/training_log.h"

namespace megashard {
namespace {

bool is_due(const std::optional<int64_t>& interval, int64_t step) { return interval && step % *interval == 0; }

}  // namespace

DueOptions due_options(const Arguments& arguments) {
  DueOptions options{.exit_interval = arguments.exit_interval,
                     .exit_minutes = arguments.exit_duration_in_mins,
                     .exits_by_signal = arguments.exit_signal_handler};
  if (arguments.save) options.save_interval = arguments.save_interval;
  if (arguments.eval_iters > 0) options.eval_interval = arguments.eval_interval;
  return options;
}

DueSteps::DueSteps(const DueOptions& options, bool is_first_rank, std::chrono::steady_clock::time_point start)
    : options_(options), is_first_rank_(is_first_rank), start_(start) {}

bool DueSteps::reads(int64_t step) const {
  return options_.exits_by_signal || options_.exit_minutes || is_due(options_.exit_interval, step) ||
         is_due(options_.save_interval, step) || is_due(options_.eval_interval, step);
}

Requests DueSteps::requests(int64_t step) {
  const auto& minutes = options_.exit_minutes;
  const std::chrono::duration<double> running = std::chrono::steady_clock::now() - start_;
  const bool is_late = is_first_rank_ && minutes && running.count() / 60 > static_cast<double>(*minutes);
  return {.save = is_due(options_.save_interval, step),
          .evaluate = is_due(options_.eval_interval, step),
          .exit = is_late || is_due(options_.exit_interval, step)};
}

MemoryLines::MemoryLines(std::shared_ptr<MemoryLog> memory, RunEvents& events, PrintLine print)
    : memory_(std::move(memory)), events_(events), print_(std::move(print)) {}

void MemoryLines::weights_updated(int64_t step) {
  const auto peak = memory_->grown(step);
  if (!peak) return;
  print_(memory_line(*peak));
  events_.memory(*peak);
}

Profiler::Profiler(const LoggingArguments& log, const ProcessGroup& world, c10::Device device,
                   std::shared_ptr<MemoryLog> memory, RunEvents& events, PrintLine print)
    : memory_(std::move(memory)),
      profile_(log, world, device, memory_.get()),
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
