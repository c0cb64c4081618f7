#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <set>

#include "framework/mistakes.h"
#include "framework/modules/fsdp2_config_entries.h"
#include "framework/modules/wrap_policy.h"

namespace megashard::detail {
namespace {

constexpr const char* kParallel = "parallel";
constexpr const char* kFsdpPlan = "fsdp_plan";
constexpr const char* kRecomputePlan = "recompute_plan";
constexpr const char* kExpertPlan = "ep_plan";

/// Content of the file besides the configuration.
struct NativeFile {
  Fsdp2Config config;
  std::vector<std::string> recompute_modules;
  bool recompute = true;                    // `recompute` of parallel; absent: a recompute_plan applies
  std::vector<std::string> without_effect;  // messages
  Mistakes mistakes{};
};

using NativeReader = void (*)(const YamlValue&, NativeFile&);
using NativeReaders = std::map<std::string, NativeReader>;

/// Accepts a parallel size of 1 only; other sizes are set by `flag`.
void take_one(const YamlValue& entry, const std::string& flag) {
  const auto ranks = entry.integer(1);
  if (ranks != 1) entry.fail("must be 1 here; give " + flag + " " + std::to_string(ranks) + " instead");
}

void leave(const YamlValue&, NativeFile&) {}

void no_effect(const YamlValue& entry, const char* why, NativeFile& file) {
  file.without_effect.push_back("FSDP2: " + entry.key + " has no effect: " + why + "; leave it out");
}

void take_no_gather(const YamlValue& entry, NativeFile&) {
  if (entry.boolean()) entry.fail("is not in this version: give num_to_forward_prefetch, which gathers ahead");
}

void take_hooks(const YamlValue& entry, NativeFile& file) {
  read_patterns(entry);
  no_effect(entry, "every unit is gathered when it runs, or ahead, by num_to_forward_prefetch", file);
}

const NativeReaders& parallel_readers() {
  static const NativeReaders table = {
      {"fully_shard_parallel_size",
       [](auto& entry, auto& file) { file.config.sharding_size = read_sharding_size(entry); }},
      {"data_parallel_size", leave},  // follows from the others
      {"tensor_parallel_size", [](auto& entry, auto&) { take_one(entry, "--tensor-model-parallel-size"); }},
      {"ring_attention_size",
       [](auto& entry, auto&) { take_one(entry, "--cp-comm-type p2p --context-parallel-size"); }},
      {"context_parallel_size", [](auto& entry, auto&) { take_one(entry, "--context-parallel-size"); }},
      {"ulysses_parallel_size", [](auto& entry, auto&) { take_one(entry, "--context-parallel-size"); }},
      {"expert_parallel_size", [](auto& entry, auto& file) { file.config.expert_parallel_size = read_int(entry, 1); }},
      {"expert_fully_shard_parallel_size",
       [](auto& entry, auto& file) { file.config.expert_shard_size = read_int(entry, 1); }},
      {"recompute", [](auto& entry, auto& file) { file.recompute = entry.boolean(); }},
  };
  return table;
}

const NativeReaders& fsdp_readers() {
  static const NativeReaders table = {
      {"apply_modules", [](auto& entry, auto& file) { file.config.sub_modules_to_wrap = read_patterns(entry); }},
      {"ignored_modules", [](auto& entry, auto& file) { file.config.ignored_modules = read_patterns(entry); }},
      {"ignored_modules_replicated",
       [](auto& entry, auto& file) { file.config.ignored_modules_replicated = entry.boolean(); }},
      {"param_dtype", [](auto& entry, auto& file) { file.config.mixed_precision.param_dtype = entry.dtype(); }},
      {"reduce_dtype", [](auto& entry, auto& file) { file.config.mixed_precision.reduce_dtype = entry.dtype(); }},
      {"output_dtype", [](auto& entry, auto& file) { file.config.mixed_precision.output_dtype = entry.dtype(); }},
      {"cast_forward_inputs",
       [](auto& entry, auto& file) { file.config.mixed_precision.cast_forward_inputs = entry.boolean(); }},
      {"reshard_after_forward",
       [](auto& entry, auto& file) { file.config.reshard_after_forward = read_reshard(entry); }},
      {"num_to_forward_prefetch",
       [](auto& entry, auto& file) { file.config.num_to_forward_prefetch = read_int(entry, 0); }},
      {"num_to_backward_prefetch",
       [](auto& entry, auto& file) { file.config.num_to_backward_prefetch = read_int(entry, 0); }},
      {"cpu_offload", [](auto& entry, auto& file) { file.config.offload_to_cpu = entry.boolean(); }},
      {"pregather", take_no_gather},
      {"hook_modules", take_hooks},
  };
  return table;
}

const NativeReaders& recompute_readers() {
  static const NativeReaders table = {
      {"apply_modules", [](auto& entry, auto& file) { file.recompute_modules = read_patterns(entry); }},
      {"use_reentrant", [](auto& entry, auto& file) { file.config.use_reentrant = entry.boolean(); }},
  };
  return table;
}

const NativeReaders& expert_readers() {
  static const NativeReaders table = {
      {"apply_modules", [](auto& entry, auto& file) { file.config.moe_modules = read_patterns(entry); }},
      {"apply_efsdp_modules",
       [](auto& entry, auto& file) {
         no_effect(entry,
                   "experts are sharded in the units that fsdp_plan.apply_modules names, over the "
                   "ranks of expert_fully_shard_parallel_size",
                   file);
       }},
      {"dispatcher",
       [](auto& entry, auto& file) { no_effect(entry, "rows go to their experts by all-to-all exchanges", file); }},
  };
  return table;
}

/// Finds a plan at the top level or under `parallel`.
YAML::Node plan_of(const YAML::Node& root, const std::string& source, const char* name) {
  const YAML::Node parallel = root[kParallel];
  const YAML::Node inner = parallel.IsDefined() ? parallel[name] : parallel;
  const YAML::Node outer = root[name];
  if (inner.IsDefined() && outer.IsDefined())
    YamlValue{source, name, outer}.fail("stands under parallel too; keep one");
  return inner.IsDefined() ? inner : outer;
}

/// A section of LTX-2's files that the section of the data repeats by a YAML alias.
constexpr const char* kAnchor = "ltx2_dataset_custom";

/// Checks the top-level keys: the program reads the other sections of a whole configuration.
void check_top(const YAML::Node& root, const std::string& source, NativeFile& file, KeyLog* log) {
  const std::vector<std::string> known = {kParallel,  kFsdpPlan, kRecomputePlan, kExpertPlan, "training",
                                          "features", "model",   "data",         "tools"};
  for (const auto& item : root) {
    const YamlValue entry{source, item.first.Scalar(), item.second};
    if (std::ranges::find(known, entry.key) != known.end() || entry.key == kAnchor) continue;
    const auto message = unknown_key(yaml_place(source, item.first), entry.key, known,
                                     "; remove it: there are " + c10::Join(", ", known) + ".");
    file.mistakes.attempt([&] { take_key(log, entry, [&] { throw UsageError(message); }); });
  }
}

bool is_empty(const YAML::Node& value) { return value.IsNull() || (value.IsSequence() && value.size() == 0); }

void read_section(const std::string& source, const std::string& name, const YAML::Node& section,
                  const NativeReaders& readers, const std::set<std::string>& inner, NativeFile& file, KeyLog* log) {
  if (!section.IsDefined() || section.IsNull()) return;
  if (!section.IsMap()) YamlValue{source, name, section}.expected("a map");
  for (const auto& item : section) {
    const auto key = item.first.Scalar();
    if (inner.contains(key)) continue;
    const YamlValue entry{source, name + "." + key, item.second};
    const auto reader = readers.find(key);
    file.mistakes.attempt([&] {
      if (reader == readers.end()) {
        std::vector<std::string> known(inner.begin(), inner.end());
        for (const auto& [other, function] : readers) known.push_back(other);
        return take_key(log, entry,
                        [&] { throw UsageError(unknown_key(yaml_place(source, item.first), entry.key, known)); });
      }
      if (is_empty(entry.node)) return leave_key(log, entry, "it has no value");
      if (reader->second == leave) return leave_key(log, entry, "it follows from the others");
      const size_t told = file.without_effect.size();
      take_key(log, entry, [&] { reader->second(entry, file); });
      if (log == nullptr || file.without_effect.size() == told) return;
      log->pop_back();
      leave_key(log, entry, file.without_effect.back());
    });
  }
}

}  // namespace

bool is_native_config(const YAML::Node& root) {
  if (!root.IsMap()) return false;
  return root[kParallel].IsDefined() || root[kFsdpPlan].IsDefined() || root[kRecomputePlan].IsDefined() ||
         root[kExpertPlan].IsDefined();
}

Fsdp2Config parse_native_config(const YAML::Node& root, const std::string& source, const DiagnosticSink& sink,
                                KeyLog* log) {
  const std::set<std::string> plans = {kFsdpPlan, kRecomputePlan, kExpertPlan};
  NativeFile file;
  file.config.native_patterns = true;
  file.config.use_reentrant = false;
  check_top(root, source, file, log);
  read_section(source, kParallel, root[kParallel], parallel_readers(), plans, file, log);
  const auto read_plan = [&](const char* name, const NativeReaders& readers) {
    read_section(source, name, plan_of(root, source, name), readers, {}, file, log);
  };
  read_plan(kFsdpPlan, fsdp_readers());
  read_plan(kRecomputePlan, recompute_readers());
  read_plan(kExpertPlan, expert_readers());
  file.mistakes.throw_if_any();
  for (const auto& message : file.without_effect) sink(Severity::kWarning, message);
  if (file.recompute) file.config.recompute_modules = file.recompute_modules;
  return file.config;
}

}  // namespace megashard::detail
