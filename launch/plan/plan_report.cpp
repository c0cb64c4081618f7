#include "launch/plan/plan_report.h"

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "launch/output/terminal.h"
#include "launch/output/text_table.h"

namespace megashard {
namespace {

std::string milliseconds(double seconds) { return decimal("%.2f", 1e3 * seconds); }
std::string gibibytes(double bytes) {
  return decimal(bytes < 1e8 ? "%.4f GiB" : "%.2f GiB", bytes / (int64_t{1} << 30));
}

void print_memory(const PeakMemory& peak, const DeviceModel& device) {
  const bool fits = peak.bytes <= device.memory_bytes;
  print_line("peak memory of rank 0: " + gibibytes(static_cast<double>(peak.bytes)) + " (" +
             std::to_string(peak.bytes) + " bytes) of " + gibibytes(static_cast<double>(device.memory_bytes)) +
             (fits ? ": fits" : ": DOES NOT FIT"));
  print_line("  in " + peak.moment + ", " + peak.operation);
  const bool is_large = peak.bytes >= int64_t{10} << 30;
  TextTable table({"of these", "bytes", is_large ? "GiB" : "MiB"}, {1, 2});
  for (const auto& [what, bytes] : peak.parts())
    table.add({what, std::to_string(bytes), mebibytes(is_large ? bytes / 1024 : bytes)});
  table.print();
}

void print_communication(const PlanTotals& step) {
  TextTable table({"collectives of a step", "count", "bytes", "ms"}, {1, 2, 3});
  for (const auto& each : step.collectives)
    table.add({each.kind, std::to_string(each.count), std::to_string(each.bytes), milliseconds(each.seconds)});
  table.print();
  print_line("exposed: " + milliseconds(step.exposed_seconds) + " ms, in which the compute waits for other streams");
}

double checkpoint_seconds(const PlannedRun& run, const DeviceModel& device) {
  const double nodes = std::ceil(static_cast<double>(run.world_size) / static_cast<double>(device.node_devices));
  return static_cast<double>(run.checkpoint_bytes) / (nodes * device.storage_bandwidth);
}

void print_checkpoint(const PlannedRun& run, const DeviceModel& device) {
  const auto bytes = static_cast<double>(run.checkpoint_bytes);
  print_line("checkpoint: " + gibibytes(bytes) + " (" + std::to_string(run.checkpoint_bytes) + " bytes), " +
             decimal("%.1f s", checkpoint_seconds(run, device)) + " at " + decimal("%.3g", device.storage_bandwidth) +
             " bytes/s of each node");
}

}  // namespace

double utilisation(const PlannedRun& run) { return run.flops / run.world_size / run.step.seconds / run.peak_flops; }

std::string decimal(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

void print_plan(const PlannedRun& run, const DeviceModel& device) {
  const PlanTotals& step = run.step;
  const auto parameters = static_cast<double>(run.parameters);
  print_line("plan: " + (parameters < 1e8 ? decimal("%.3f M", parameters / 1e6) : decimal("%.3f B", parameters / 1e9)) +
             " parameters, " + std::to_string(run.world_size) + " x " + device.name);
  print_memory(run.peak, device);
  if (run.host_bytes > 0)
    print_line("host memory of rank 0: " + gibibytes(static_cast<double>(run.host_bytes)) + " (" +
               std::to_string(run.host_bytes) + " bytes) of rows, gradients and optimizer state");
  print_communication(step);
  const double tokens_per_second = static_cast<double>(run.tokens) / step.seconds;
  print_line("\nstep: " + milliseconds(step.seconds) + " ms, of which the host launches for " +
             milliseconds(step.host_seconds) + " ms; " + std::to_string(run.tokens) + " tokens");
  print_line("speed: " + decimal("%.1f", tokens_per_second / run.world_size) + " tokens/s a device, " +
             decimal("%.4g", tokens_per_second * 86400) + " tokens a day, MFU " +
             decimal("%.1f%%", 100 * utilisation(run)));
  print_checkpoint(run, device);
  if (run.world_size > 1 && device.program_memory == 0)
    print_line("a forecast: plans of several GPUs have not been compared with runs on them (docs/plan.md)");
}

nlohmann::ordered_json plan_json(const PlannedRun& run, const DeviceModel& device) {
  const PlanTotals& step = run.step;
  nlohmann::ordered_json json = {{"device", device.name},
                                 {"world_size", run.world_size},
                                 {"parameters", run.parameters},
                                 {"fits", run.peak.bytes <= device.memory_bytes},
                                 {"peak_bytes", run.peak.bytes},
                                 {"device_bytes", device.memory_bytes},
                                 {"peak_moment", run.peak.moment},
                                 {"peak_operation", run.peak.operation},
                                 {"host_bytes", run.host_bytes},
                                 {"step_seconds", step.seconds},
                                 {"host_seconds", step.host_seconds},
                                 {"exposed_seconds", step.exposed_seconds},
                                 {"tokens", run.tokens},
                                 {"tokens_per_second", static_cast<double>(run.tokens) / step.seconds},
                                 {"mfu", utilisation(run)},
                                 {"checkpoint_bytes", run.checkpoint_bytes},
                                 {"checkpoint_seconds", checkpoint_seconds(run, device)}};
  for (const auto& [what, bytes] : run.peak.parts()) json["memory"][what] = bytes;
  for (const auto& each : step.collectives)
    json["collectives"][each.kind] = {{"count", each.count}, {"bytes", each.bytes}, {"seconds", each.seconds}};
  return json;
}

}  // namespace megashard
