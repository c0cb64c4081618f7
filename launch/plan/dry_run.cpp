#include "launch/plan/dry_run.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <sstream>
#include <string>

#include "checkpoint/values/tensor_info.h"
#include "framework/arguments/argument_table.h"
#include "framework/arguments/key_log.h"
#include "framework/arguments/microbatches.h"
#include "framework/arguments/saved_arguments.h"
#include "framework/training/optimizer_param_scheduler.h"
#include "framework/training/start_log.h"
#include "framework/training/training_data.h"
#include "launch/output/short_text.h"
#include "launch/output/terminal.h"
#include "launch/output/text_table.h"
#include "launch/plan/device_file.h"
#include "launch/plan/plan_report.h"
#include "launch/plan/planned_run.h"
#include "launch/train/end_of_document.h"
#include "launch/train/session.h"
#include "models/diffusion/latent_families.h"
#include "models/network_arguments.h"

namespace megashard {
namespace {

/// Converts "model.layers.3" to "model.layers.{*}", as in sub_modules_to_wrap.
std::string pattern_of(const std::string& path) {
  std::istringstream names(path);
  std::string pattern, name;
  while (std::getline(names, name, '.')) {
    const bool number = std::ranges::all_of(name, [](unsigned char letter) { return std::isdigit(letter) != 0; });
    pattern += (pattern.empty() ? "" : ".") + (number ? "{*}" : name);
  }
  return pattern.empty() ? "(root)" : pattern;
}

std::string prefetch_of(size_t forward, size_t backward) {
  if (forward + backward == 0) return "-";
  return std::to_string(forward) + " forward, " + std::to_string(backward) + " backward";
}

/// Cells of a row without the number of modules.
std::vector<std::string> cells_of(const UnitSummary& unit, size_t forward, size_t backward) {
  const auto stored = torch_dtype_name(unit.stored), computed = torch_dtype_name(unit.computed_in);
  return {pattern_of(unit.module),
          std::to_string(unit.parameters),
          std::to_string(unit.ranks),
          std::to_string(unit.sharded_bytes),
          std::to_string(unit.gathered_bytes),
          stored == computed ? stored : stored + " -> " + computed,
          prefetch_of(forward, backward)};
}

struct Row {
  std::vector<std::string> cells;
  int64_t modules = 0;
};

/// Prints the units of a model; equal ones of one pattern share a row.
void print_units(const std::vector<UnitSummary>& units) {
  // The last units prefetch fewer neighbours: the row shows the maximum.
  const auto most = [&](const std::string& pattern, auto neighbours) {
    size_t number = 0;
    for (const auto& unit : units) {
      if (pattern_of(unit.module) == pattern) number = std::max(number, (unit.*neighbours).size());
    }
    return number;
  };
  std::vector<Row> rows;
  for (const auto& unit : units) {
    const auto pattern = pattern_of(unit.module);
    auto cells =
        cells_of(unit, most(pattern, &UnitSummary::forward_prefetch), most(pattern, &UnitSummary::backward_prefetch));
    const auto same = std::ranges::find(rows, cells, &Row::cells);
    if (same == rows.end()) {
      rows.push_back({std::move(cells), 1});
    } else {
      ++same->modules;
    }
  }
  TextTable table({"unit", "modules", "parameters each", "ranks", "bytes a rank", "gathered", "dtype", "prefetch"},
                  {1, 2, 3, 4, 5});
  for (auto& [cells, modules] : rows) {
    cells.insert(cells.begin() + 1, std::to_string(modules));
    table.add(std::move(cells));
  }
  table.print();
}

/// Tracks the origin of each argument's value while a run derives its arguments from the command line, files, a
/// checkpoint and each other.
class ValueOrigins {
 public:
  /// For a command line that has just been parsed.
  explicit ValueOrigins(const CommandLine& line);

  /// Sets the origin of all values that changed since the last call.
  void note_changes(const Arguments& arguments, const std::string& origin);
  /// "command line", "run.yaml:12", "default"; `name` is Megatron's name of the argument.
  const std::string& of(const std::string& name) const { return values_.at(name).origin; }

 private:
  struct Known {
    ArgumentValue value;
    std::string origin;
  };
  std::map<std::string, Known> values_;
};

ValueOrigins::ValueOrigins(const CommandLine& line) {
  for (auto& [name, value] : argument_values(Arguments())) values_[name] = {std::move(value), "default"};
  note_changes(line.arguments, line.worker      ? "worker " + line.worker->role
                               : line.mindspeed ? "MindSpeed-MM's files"
                                                : "command line or a file");
  for (const auto& [name, place] : line.arguments.given) {
    if (const auto known = values_.find(name); known != values_.end()) known->second.origin = place;
  }
}

void ValueOrigins::note_changes(const Arguments& arguments, const std::string& origin) {
  for (auto& [name, value] : argument_values(arguments)) {
    Known& known = values_.at(name);
    if (known.value != value) known = {std::move(value), origin};
  }
}

constexpr const char* kFromOthers = "follows from others";

/// The launcher's ranks, or --world-size ranks.
RendezvousOptions ranks_of(CommandLine& line) {
  auto ranks = ranks_of_launcher(line.arguments);
  if (!line.own.contains(kWorldSize)) return ranks;
  ranks = {};
  ranks.world_size = ranks.local_world_size = read_world_size(line);
  return ranks;
}

/// As plan_run, and notes the origins of values.
RunPlan plan_with_origins(CommandLine line, const RendezvousOptions& ranks, ValueOrigins& origins,
                          KeyLog& sharding_keys, const DiagnosticSink& sink) {
  Arguments& arguments = line.arguments;
  arguments.world_size = ranks.world_size;
  origins.note_changes(arguments, line.own.contains(kWorldSize) ? kWorldSize : "launcher's environment");
  line.mistakes.attempt_or_throw([&] {
    apply_files(line, {}, ranks.world_size, sink);
    origins.note_changes(arguments, line.worker ? "worker " + line.worker->role : "MindSpeed-MM's files");
    take_length_of_latents(arguments);
    origins.note_changes(arguments, "data");
    if (arguments.use_checkpoint_args) {
      take_checkpoint_arguments(arguments, sink);
      origins.note_changes(arguments, "checkpoint " + *arguments.load);
    }
  });
  RunPlan plan = validate_run(std::move(line), {}, ranks, sink, &sharding_keys);
  const OptimizerParamScheduler schedule(scheduler_options(plan.arguments));  // throws for wrong settings
  origins.note_changes(plan.arguments, kFromOthers);
  plan.hf_config = take_network_from_hf_model(plan.arguments, sink);
  origins.note_changes(plan.arguments, "config.json of " + plan.arguments.hf_model.value_or(""));
  return plan;
}

void print_arguments(const Arguments& arguments, const ValueOrigins& origins) {
  TextTable table({"argument", "from", "value"});
  auto values = argument_values(arguments);
  std::ranges::sort(values, {}, &std::pair<std::string, ArgumentValue>::first);
  int64_t defaults = 0;
  for (const auto& [name, value] : values) {
    const std::string& origin = origins.of(name);
    if (origin == "default" && !arguments.print_all_arguments) {
      ++defaults;
    } else {
      table.add({name, origin, argument_text(value)});
    }
  }
  table.print();
  if (defaults > 0)
    print_line("and " + std::to_string(defaults) + " at their defaults, which --print-all-arguments shows");
}

std::string use_of(const KeyNote& note) {
  switch (note.use) {
    case KeyNote::Use::kRead:
      return note.text;
    case KeyNote::Use::kIgnored:
      return "ignored: " + note.text;
    case KeyNote::Use::kRefused:
      return "refused: " + note.text;
  }
  return "";
}

void print_keys(const std::string& title, const KeyLog& keys) {
  TextTable table({title, "from", "value"});
  for (const auto& note : keys) table.add({note.key, note.source + ":" + std::to_string(note.line), use_of(note)});
  table.print();
}

/// True for a key that the table of arguments shows by the same name.
bool is_argument(const KeyNote& note) {
  return note.use == KeyNote::Use::kRead && (find_option(note.key) != nullptr || find_argument(note.key) != nullptr);
}

void print_batches(const Arguments& arguments) {
  const MicrobatchOptions batches = microbatch_options(arguments);
  const int64_t microbatches = batches.global_batch_size / (batches.micro_batch_size * batches.data_parallel_size);
  const int64_t length = *arguments.seq_length;
  print_line("\nbatch: " + std::to_string(batches.global_batch_size) + " sequences of " + std::to_string(length) +
             " tokens a step: " + std::to_string(batches.micro_batch_size) + " in a micro batch x " +
             std::to_string(microbatches) + " micro batches x " + std::to_string(batches.data_parallel_size) +
             " data parallel ranks" + (batches.rampup.empty() ? "" : ", after the ramp-up of --rampup-batch-size"));
  const int64_t steps = arguments.train_iters.value_or(0);
  const int64_t samples = arguments.train_samples.value_or(samples_of_iterations(batches, steps));
  print_line("training: " + std::to_string(steps) + " steps, " + std::to_string(samples) + " sequences, " +
             std::to_string(samples * length) + " tokens");
}

void print_data(const RunPlan& plan, const Progress& progress) {
  const Arguments& arguments = plan.arguments;
  if (arguments.rollouts) return print_line("training: the rollouts in " + *arguments.rollouts);
  const int64_t end = end_of_document_id(arguments);
  DataOptions data =
      data_options(arguments, /*vocab_size=*/std::max<int64_t>(end, 0) + 1, end);  // token values are not used
  if (const auto patches = plan.hf_config ? latent_patches_of(*plan.hf_config) : std::nullopt)
    data.latents = {
        .patches = *patches, .run = *arguments.global_batch_size, .caption_dropout = arguments.caption_dropout_rate};
  ask_for_samples(run_length(arguments), arguments.train_iters.value_or(0), progress, data);
  const DataSplits splits = build_datasets(data);
  const auto print = [&](const char* split, const auto& dataset, const std::optional<int64_t>& samples) {
    print_line(data_line(split, dataset.get(), *samples, data.seq_length));
  };
  print("training", splits.train, data.train_samples);
  print("validation", splits.valid, data.valid_samples);
  print("test", splits.test, data.test_samples);
}

std::string weights_line(const Start& from, const Arguments& arguments) {
  switch (from.source) {
    case WeightSource::kCheckpoint:
      return "weights: " + from.step.folder;
    case WeightSource::kHuggingFace:
      return "weights: " + *arguments.hf_model;
    case WeightSource::kInitialisation:
      return "weights: drawn";
  }
  return "";
}

void print_forecast(const CommandLine& line, const DeviceModel& machine, int world_size, int64_t steps) {
  const auto warnings = [sink = sink_for(0)](Severity severity, const std::string& message) {
    if (severity == Severity::kWarning) sink(severity, message);
  };
  PlannedRun run;
  try {
    run = run_planned(line, {.device = machine, .world_size = world_size, .sink = warnings});
  } catch (const c10::Error& error) {
    print_line(std::string("\nno units and no forecast: ") + error.what_without_backtrace());
    return;
  }
  print_units(run.units);
  print_line("");
  print_plan(run, machine);
  print_line("the whole training: " + duration_text(static_cast<double>(steps) * run.step.seconds) +
             ", without evaluations and saves");
}

}  // namespace

int run_dry_run(const CommandLine& given) {
  CommandLine line = given;
  const DiagnosticSink sink = sink_for(0);
  const RendezvousOptions ranks = ranks_of(line);
  if (ranks.rank != 0) return 0;  // the first rank prints for all
  print_line("dry run: nothing is trained, and nothing is written");
  for (const auto& notice : line.notices) sink(Severity::kNotice, notice);
  DeviceModel machine;
  line.mistakes.attempt([&] { machine = read_device_model(line.own_value(kMachine, kDefaultDevice)); });
  ValueOrigins origins(line);
  std::erase_if(line.keys, is_argument);
  print_keys("key of the file", line.keys);
  KeyLog sharding_keys;
  const RunPlan plan = plan_with_origins(std::move(line), ranks, origins, sharding_keys, sink);
  const Arguments& arguments = plan.arguments;
  print_line(sizes_line(arguments));
  print_arguments(arguments, origins);
  print_keys("key of the FSDP2 file", sharding_keys);
  print_batches(arguments);
  const Start from = find_start(plan, nullptr, sink);
  const bool goes_on = from.source == WeightSource::kCheckpoint && !from.weights_only;
  print_data(plan, {.step = goes_on ? from.step.iteration : 0});
  print_line(weights_line(from, arguments));
  if (!given.own.contains(kMachine)) print_line(default_device_line(kMachine));
  print_forecast(given, machine, ranks.world_size, arguments.train_iters.value_or(0));
  return 0;
}

}  // namespace megashard
