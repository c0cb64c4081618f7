#include "framework/training/step_profile.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <filesystem>
#include <set>

namespace megashard {
namespace {

using torch::profiler::impl::ActivityType;

torch::profiler::impl::ProfilerConfig profiler_config() {
  return torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::KINETO);
}

/// Folder of the traces: --profile-save-path, or --tensorboard-dir.
std::string profile_folder(const LoggingArguments& log) {
  return log.profile_save_path ? *log.profile_save_path : log.tensorboard_dir.value_or("");
}

}  // namespace

StepProfile::StepProfile(const LoggingArguments& log, const ProcessGroup& world, c10::Device device,
                         const MemoryLog* memory)
    : first_(log.profile_step_start),
      last_(log.profile_step_end),
      device_(device),
      path_(profile_folder(log) + "/rank_" + std::to_string(world.rank()) + ".pt.trace.json"),
      memory_(memory) {}

StepProfile::~StepProfile() {
  if (runs_) torch::autograd::profiler::disableProfiler();
}

void StepProfile::begin_step(int64_t completed) {
  if (completed < first_ || completed >= last_ || runs_) return;
  std::set<ActivityType> activities{ActivityType::CPU};
  if (!device_.is_cpu()) activities.insert(ActivityType::CUDA);
  torch::autograd::profiler::prepareProfiler(profiler_config(), activities);
  torch::autograd::profiler::enableProfiler(
      profiler_config(), activities,
      {at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE, at::RecordScope::BACKWARD_FUNCTION});
  if (memory_ != nullptr) counters_ = std::make_unique<MemoryCounters>(*memory_);
  runs_ = true;
}

std::string StepProfile::end_step(int64_t completed) { return completed >= last_ ? finish() : ""; }

std::string StepProfile::finish() {
  if (!runs_) return "";
  runs_ = false;
  const auto profiled = torch::autograd::profiler::disableProfiler();
  const auto counters = std::move(counters_);
  std::filesystem::create_directories(std::filesystem::path(path_).parent_path());
  profiled->save(path_);
  if (counters != nullptr) counters->add_to(path_);
  return path_;
}

}  // namespace megashard
