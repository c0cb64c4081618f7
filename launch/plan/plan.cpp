#include "launch/plan/plan.h"

#include <algorithm>
#include <functional>
#include <iostream>

#include "framework/arguments/typed_text.h"
#include "launch/arguments/command_line.h"
#include "launch/output/print_line.h"
#include "launch/plan/device_file.h"
#include "launch/plan/fit.h"
#include "launch/plan/plan_report.h"
#include "launch/plan/plan_trace.h"
#include "launch/plan/planned_run.h"
#include "launch/train/run_setup.h"

namespace megashard {
namespace {

constexpr const char* kWorldSize = "--world-size";
constexpr const char* kDevice = "--device";
constexpr const char* kDeviceMemory = "--device-memory";
constexpr const char* kFit = "--fit";
constexpr const char* kTrace = "--trace";

const Program& plan_program() {
  static const Program program = {
      .name = "plan",
      .purpose = "megashard plan [FILE.yaml] --world-size N [options]\n\n"
                 "Whether a training fits, and how fast it will be, without a GPU: rank 0 of N\n"
                 "trains for a few steps on a device of shapes without memory. Options are those\n"
                 "of `megashard pretrain`, also in its YAML file; data, checkpoints and the length\n"
                 "of the training are not used. Defaults are shown in [].\n",
      .flags = {{kWorldSize, "INT", "ranks of the training [1]"},
                {kDevice, "NAME|FILE", "the GPU: h100, h200, or a YAML file of another [h200]"},
                {kDeviceMemory, "BYTES", "memory of a GPU, as 139GiB, instead of the device's"},
                {kFit, "true|false",
                 "tries micro batches of --global-batch-size, recompute, resharding and shards within a node, and "
                 "shows the plan of the fastest that fits [false]"},
                {kTrace, "FILE", "the planned step for chrome://tracing"}},
      .shown = [](const Option& option) { return option.flag != kDevice; }};
  return program;
}

std::string own_value(const CommandLine& line, const char* flag, const std::string& otherwise) {
  const auto found = line.own.find(flag);
  return found == line.own.end() ? otherwise : found->second;
}

int world_size_of(CommandLine& line) {
  const std::string text = own_value(line, kWorldSize, "1");
  const int64_t ranks = parse_integer(text).value_or(0);
  line.mistakes.require(0 < ranks && ranks <= (1 << 24), "--world-size takes a number of ranks, got \"" + text + "\".");
  return static_cast<int>(std::max<int64_t>(ranks, 1));
}

PlanChange fastest_that_fits(const std::function<CommandLine()>& line, PlanOptions options) {
  options.sink = [](Severity, const std::string&) {};
  const auto trials = try_what_fits(line, options);
  print_trials(trials, options.device);
  const FitTrial& best = trials.front();
  const bool fits = best.run.peak.bytes <= options.device.memory_bytes;
  print_line(fits ? "\nfastest that fits: " + change_text(best.change)
                  : std::string("\nnothing of these fits; more ranks or shorter sequences need less memory"));
  return best.change;
}

}  // namespace

int run_plan(int argc, char** argv) {
  CommandLine line;
  try {
    line = parse_arguments(argc, argv, plan_program());
  } catch (const HelpRequested& help) {
    std::cout << help.what();
    return 0;
  }
  const int world_size = world_size_of(line);
  DeviceModel device;
  line.mistakes.attempt([&] { device = read_device_model(own_value(line, kDevice, "h200")); });
  if (line.own.contains(kDeviceMemory)) {
    line.mistakes.attempt([&] { device.memory_bytes = parse_bytes(line.own.at(kDeviceMemory), kDeviceMemory); });
  }
  const std::string fit = own_value(line, kFit, "false");
  line.mistakes.require(fit == "true" || fit == "false", "--fit takes true or false, got \"" + fit + "\".");
  PlanOptions options{.device = device, .world_size = world_size, .sink = sink_for(0)};
  if (fit == "true") {
    line.mistakes.throw_if_any();
    options.change = fastest_that_fits([&] { return parse_arguments(argc, argv, plan_program()); }, options);
  }
  options.keeps_spans = line.own.contains(kTrace);
  const PlannedRun run = run_planned(line, options);
  print_plan(run, device);
  if (options.keeps_spans) write_plan_trace(line.own.at(kTrace), run.step.spans);
  return 0;
}

}  // namespace megashard
