#include <ATen/Parallel.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "framework/process_group/gpu_device.h"
#include "framework/process_group/launch_environment.h"
#include "launch/arguments/command_line.h"
#include "launch/output/terminal.h"
#include "launch/output/text_table.h"
#include "launch/plan/device_file.h"
#include "launch/plan/measure.h"
#include "launch/plan/plan_report.h"
#include "launch/plan/planned_run.h"
#include "launch/shell/subcommands.h"
#include "launch/train/session.h"

namespace megashard {
namespace {

/// One way to run a training, with its plan.
struct FitTrial {
  PlanChange change;
  PlannedRun run;
};

constexpr int64_t kMostSequences = 64;  // per micro batch

/// All combinations except the micro batch size, the one with the least memory last.
std::vector<PlanChange> ways(const Arguments& arguments, const PlanOptions& options, bool offloads) {
  std::vector<PlanChange> all;
  const bool chooses = !arguments.recompute_granularity && !arguments.recompute_activations;
  const auto near = static_cast<int>(options.device.node_devices);
  const bool has_nodes = near > 1 && options.world_size > near && options.world_size % near == 0;
  for (const bool in_node : {false, true}) {
    if (in_node && !has_nodes) continue;
    for (const bool recomputes : {false, true}) {
      if (recomputes && !chooses) continue;
      for (const bool reshards : {false, true}) {
        all.push_back({.recomputes = recomputes,
                       .reshard_after_forward = reshards,
                       .sharding_size = in_node ? std::optional(near) : std::nullopt,
                       .offloads = offloads});
      }
    }
  }
  return all;
}

bool fits(const PlannedRun& run, const DeviceModel& device) { return run.peak.bytes <= device.memory_bytes; }

/// Plans micro batch sizes (powers of two), recompute, resharding after forward, and sharding within a node, where the
/// command line leaves them open. If none fits, plans them with CPU offload of parameters, gradients and optimizer
/// state. Sorted by speed, those that do not fit last.
std::vector<FitTrial> try_what_fits(const CommandLine& line, const PlanOptions& options) {
  const Arguments& own = line.arguments;
  const auto batch = own.global_batch_size;
  if (!batch) throw UsageError("--fit needs --global-batch-size, of which it tries micro batches.");
  const int64_t ranks = options.world_size / (own.tensor_model_parallel_size * own.context_parallel_size);
  std::vector<FitTrial> trials;
  const auto try_all = [&](bool offloads) {
    for (const PlanChange& way : ways(own, options, offloads)) {
      for (int64_t sequences = 1; sequences <= kMostSequences; sequences *= 2) {
        if (*batch % (ranks * sequences) != 0) break;
        PlanOptions changed = options;
        changed.change = way;
        changed.change.micro_batch_size = sequences;
        trials.push_back({changed.change, run_planned(line, changed)});
        if (!fits(trials.back().run, options.device)) break;
      }
    }
  };
  try_all(/*offloads=*/false);
  const bool any = std::ranges::any_of(trials, [&](const FitTrial& each) { return fits(each.run, options.device); });
  if (!any && options.device.program_memory == 0) try_all(/*offloads=*/true);
  if (trials.empty()) {
    throw UsageError("--global-batch-size " + std::to_string(*batch) + " is not divisible by the " +
                     std::to_string(ranks) + " data parallel ranks; change one of them.");
  }
  std::ranges::stable_sort(trials, {}, [&](const FitTrial& each) {
    return std::pair(!fits(each.run, options.device), each.run.step.seconds);
  });
  return trials;
}

/// Flags, then keys of the FSDP2 file after a semicolon: "--micro-batch-size 2; sharding_size: 8".
std::string change_text(const PlanChange& change) {
  std::string text;
  if (change.micro_batch_size) text += "--micro-batch-size " + std::to_string(*change.micro_batch_size);
  if (change.recomputes) text += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1";
  if (change.reshard_after_forward)
    text += std::string("; reshard_after_forward: ") + (*change.reshard_after_forward ? "true" : "false");
  if (change.sharding_size) text += "; sharding_size: " + std::to_string(*change.sharding_size);
  if (change.offloads) text += "; offload_to_cpu: true";
  return text;
}

/// Prints the trials as a table.
void print_trials(const std::vector<FitTrial>& trials, const DeviceModel& device) {
  TextTable table({"micro batch", "recompute", "reshard", "shards", "offload", "GiB", "", "step ms", "MFU"},
                  {0, 5, 7, 8});
  for (const auto& [change, run] : trials) {
    const auto bytes = static_cast<double>(run.peak.bytes);
    table.add({std::to_string(*change.micro_batch_size), change.recomputes ? "full" : "-",
               *change.reshard_after_forward ? "true" : "false",
               change.sharding_size ? std::to_string(*change.sharding_size) : "all", change.offloads ? "yes" : "-",
               decimal("%.2f", bytes / (int64_t{1} << 30)), fits(run, device) ? "fits" : "does not fit",
               decimal("%.2f", 1e3 * run.step.seconds), decimal("%.1f%%", 100 * utilisation(run))});
  }
  table.print();
}

constexpr const char* kDevice = "--device";
constexpr const char* kDeviceMemory = "--device-memory";
constexpr const char* kFit = "--fit";
constexpr const char* kTrace = "--trace";
constexpr const char* kMeasure = "--measure";
constexpr const char* kJson = "--json";

const Program& plan_program() {
  static const Program program = {
      .name = "plan",
      .purpose = "megashard plan [FILE.yaml] --world-size N [options]\n\n"
                 "Whether a training fits, and how fast it will be, without a GPU: rank 0 of N\n"
                 "trains for a few steps on a device of shapes without memory. Options are those\n"
                 "of `megashard pretrain`, also in its YAML file; data, checkpoints and the length\n"
                 "of the training are not used. Defaults are shown in [].\n",
      .flags = {{kWorldSize, "INT", "ranks of the training [1]"},
                {kDevice, "NAME|FILE",
                 "the GPU: " + c10::Join(", ", device_names()) + ", or a YAML file of another [h200]"},
                {kDeviceMemory, "BYTES", "memory of a GPU, as 139GiB, instead of the device's"},
                {kFit, "",
                 "tries micro batches of --global-batch-size, recompute, resharding and shards within a node, and "
                 "shows the plan of the fastest that fits"},
                {kTrace, "FILE", "the planned step for chrome://tracing"},
                {kJson, "", "prints the figures as one JSON object"},
                {kMeasure, "FILE",
                 "measures this machine, in less than a minute, and writes it for --device; its links by the ranks of "
                 "a launcher"}},
      .shown = [](const Option& option) { return option.flag != kDevice; },
      .examples = "  megashard plan run.yaml --world-size 64 --device h100\n"
                  "  megashard plan run.yaml --world-size 64 --fit --global-batch-size 512\n"
                  "  megashard plan run.yaml --world-size 64 --trace plan.json\n"};
  return program;
}

/// Writes the planned step in Chrome's trace format (chrome://tracing, Perfetto): a row for each stream and a counter
/// of the memory by class, in bytes.
void write_plan_trace(const std::string& path, const PlannedRun& run) {
  const auto& spans = run.step.spans;
  double begin = spans.empty() ? 0 : spans.front().begin;
  for (const auto& span : spans) begin = std::min(begin, span.begin);
  auto events = nlohmann::ordered_json::array();
  for (const auto& span : spans) {
    events.push_back({{"name", span.unit.empty() ? span.name : span.name + " (" + span.unit + ")"},
                      {"ph", "X"},
                      {"ts", 1e6 * (span.begin - begin)},
                      {"dur", 1e6 * span.seconds},
                      {"pid", 0},
                      {"tid", span.stream}});
  }
  for (const auto& [at, memory] : run.memory) {
    auto parts = nlohmann::ordered_json::object();  // drawn from bottom to top in this order
    for (const auto& [name, bytes] : memory.parts()) parts[name] = bytes;
    const double since_begin = std::max(0.0, 1e6 * (at - begin));
    events.push_back({{"name", "memory"}, {"ph", "C"}, {"ts", since_begin}, {"pid", 0}, {"args", std::move(parts)}});
  }
  std::ofstream file(path);
  file << nlohmann::ordered_json{{"traceEvents", std::move(events)}} << "\n";
  file.close();
  if (!file) throw UsageError("--trace " + path + " cannot be written; give another path.");
}

PlanChange fastest_that_fits(const CommandLine& line, PlanOptions options) {
  options.sink = [](Severity, const std::string&) {};
  const auto trials = try_what_fits(line, options);
  if (line.own.contains(kJson)) return trials.front().change;
  print_trials(trials, options.device);
  print_line(
      "\ntried where the flags leave it open: micro batches, full recompute, resharding, shards within a node; not "
      "tensor and context parallelism, selective recompute, recompute of some layers: with their flags the rest "
      "is tried");
  const FitTrial& best = trials.front();
  const bool fits = best.run.peak.bytes <= options.device.memory_bytes;
  print_line(fits ? "\nfastest that fits: " + change_text(best.change)
                  : std::string("\nnothing of these fits; more ranks or shorter sequences need less memory"));
  return best.change;
}

/// Measures with all of the launcher's ranks; the first one writes the file.
void measure_into(const std::string& path, const Arguments& arguments) {
  RendezvousOptions ranks = read_environment(arguments.local_rank, "env://").rendezvous;
  ranks.backend = take_device(DeviceChoice::kAuto) ? "cpu:gloo,cuda:nccl" : "gloo";
  ranks.timeout = std::chrono::minutes(arguments.distributed_timeout_minutes);
  const ProcessGroupPtr group = join_world(std::move(ranks));
  const DeviceModel model = measure_machine(group, std::filesystem::path(path).parent_path().string());
  if (group->rank() == 0) {
    write_device_model(path, model,
                       c10::str("Measured by `megashard plan --measure` with ", group->size(), " rank(s), ",
                                at::get_num_threads(), " thread(s) each. docs/plan.md says what the keys are."));
    print_line("wrote " + path + ": " + model.name + ", " + decimal("%.3g", model.flops_32) + " FLOP/s of fp32, " +
               decimal("%.3g", model.flops_16) + " of bf16, " + decimal("%.3g", model.memory_bandwidth) +
               " bytes/s of memory, " + decimal("%.3g", model.node_bandwidth) + " of links");
  }
  group->barrier();
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
  if (const auto file = line.own.find(kMeasure); file != line.own.end()) {
    line.mistakes.throw_if_any();
    measure_into(file->second, line.arguments);
    return 0;
  }
  const int world_size = read_world_size(line);
  DeviceModel device;
  line.mistakes.attempt([&] { device = read_device_model(line.own_value(kDevice, kDefaultDevice)); });
  if (line.own.contains(kDeviceMemory)) {
    line.mistakes.attempt([&] { device.memory_bytes = parse_bytes(line.own.at(kDeviceMemory), kDeviceMemory); });
  }
  const bool as_json = line.own.contains(kJson);
  PlanOptions options{.device = device, .world_size = world_size, .sink = sink_for(0)};
  if (as_json) options.sink = [](Severity, const std::string&) {};
  if (line.own.contains(kFit)) {
    line.mistakes.throw_if_any();
    options.change = fastest_that_fits(line, options);
  }
  options.keeps_spans = line.own.contains(kTrace);
  const PlannedRun run = run_planned(line, options);
  if (as_json) {
    auto json = plan_json(run, device);
    if (line.own.contains(kFit)) json["change"] = change_text(options.change);
    print_line(json.dump(2));
  } else {
    if (!line.own.contains(kDevice)) print_line(default_device_line(kDevice));
    print_plan(run, device);
  }
  if (options.keeps_spans) write_plan_trace(line.own.at(kTrace), run);
  return 0;
}

}  // namespace megashard
