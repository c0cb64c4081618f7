#include "launch/plan/fit.h"

#include <algorithm>

#include "launch/output/text_table.h"
#include "launch/plan/plan_report.h"

namespace megashard {
namespace {

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

}  // namespace

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

}  // namespace megashard
