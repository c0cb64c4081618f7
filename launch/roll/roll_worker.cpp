#include "launch/roll/roll_worker.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <utility>

#include "framework/arguments/nearest_name.h"
#include "framework/arguments/yaml_value.h"
#include "framework/mistakes.h"
#include "launch/roll/hydra_defaults.h"
#include "launch/roll/roll_keys.h"

namespace megashard {
namespace {

using std::to_string;

constexpr const char* kStrategyArgs = "strategy_args";
constexpr const char* kDefaultStrategy = "fsdp2_train";
constexpr int64_t kLoraRank = 8;  // ROLL's default

bool is_worker(const YAML::Node& node) { return node.IsMap() && node[kStrategyArgs].IsDefined(); }

/// (name, section) of each worker; iterates, because a lookup by name could find a non-worker of the same name.
std::vector<std::pair<std::string, YAML::Node>> workers_of(const YAML::Node& root) {
  std::vector<std::pair<std::string, YAML::Node>> workers;
  for (const auto& item : root) {
    if (is_worker(item.second)) workers.emplace_back(item.first.Scalar(), item.second);
  }
  return workers;
}

/// Handling of unknown keys in a section.
enum class Unknown { kError, kErrorIfMisspelt };

class Reader {
 public:
  Reader(const std::string& file, const YAML::Node& root, RollWorker& worker, Arguments& arguments, KeyLog* log)
      : file_(file), root_(root), worker_(worker), arguments_(arguments), log_(log) {}

  YamlValue value(const std::string& path, const YAML::Node& node) const { return {file_, path, node, &root_}; }

  /// Reads a key that is in no table.
  void take(const YamlValue& value, const std::function<void()>& take) { take_key(log_, value, arguments_, take); }

  /// Reads a map; `inner` are keys of inner sections.
  void section(const std::string& path, const YAML::Node& node, std::span<const RollKey> keys,
               const std::set<std::string>& inner, Unknown unknown) {
    if (!node.IsDefined() || node.IsNull()) return;
    if (!node.IsMap()) value(path, node).expected("a map");
    for (const auto& item : node) {
      const auto name = item.first.Scalar();
      const auto each = value(path.empty() ? name : path + "." + name, item.second);
      if (inner.contains(name)) continue;
      mistakes_.attempt([&] { key(each, name, item.first, keys, inner, unknown); });
    }
  }

  /// Records a key that is not read.
  void leave(const YamlValue& each) {
    worker_.unused.push_back(each.key);
    leave_key(log_, each, "nothing here reads it");
  }

  void throw_if_any() const { mistakes_.throw_if_any(); }

 private:
  void key(const YamlValue& each, const std::string& name, const YAML::Node& written, std::span<const RollKey> keys,
           const std::set<std::string>& inner, Unknown unknown) {
    const auto found = std::find_if(keys.begin(), keys.end(), [&](const auto& key) { return name == key.name; });
    if (found == keys.end()) {
      std::vector<std::string> known(inner.begin(), inner.end());
      for (const auto& key : keys) known.emplace_back(key.name);
      const auto message = unknown_key(yaml_place(file_, written), each.key, known);
      if (unknown == Unknown::kError || message.ends_with('?'))
        return take_key(log_, each, [&] { throw UsageError(message); });
      return leave(each);
    }
    if (each.is_null()) return leave_key(log_, each, "it has no value");
    if (const auto why = why_missing(each, name); !why.empty()) return take_key(log_, each, [&] { each.fail(why); });
    if (found->roll_drops) worker_.dropped_by_roll.push_back(each.key);
    if (found->take == nullptr) return leave(each);
    take_key(log_, each, arguments_, [&] { found->take(each, worker_, arguments_); });
  }

  /// Reason why a key's feature is missing; empty if it is supported. The section is the second-last name of the path.
  static std::string why_missing(const YamlValue& each, const std::string& name) {
    const std::string outer = each.key.substr(0, each.key.size() - name.size() - 1);
    const std::string section = outer.substr(outer.rfind('.') + 1);
    for (const auto& missing : missing_functions()) {
      if (section != missing.section || name != missing.name) continue;
      if (each.node.IsMap() && each.node.size() == 0) return "";
      auto text = each.node.IsScalar() ? each.text() : "";
      std::transform(text.begin(), text.end(), text.begin(), [](char c) { return std::tolower(c); });
      const auto& harmless = missing.harmless;
      if (std::find(harmless.begin(), harmless.end(), text) != harmless.end()) return "";
      return (each.node.IsScalar() ? "is " + each.text() : "is given") + ", but " + missing.why +
             (harmless.empty() ? "; remove it" : "; write " + harmless.front());
    }
    return "";
  }

  const std::string& file_;
  const YAML::Node& root_;
  RollWorker& worker_;
  Arguments& arguments_;
  KeyLog* log_;
  Mistakes mistakes_;
};

/// Sets ROLL's defaults.
void set_defaults(RollWorker& worker, Arguments& arguments) {
  arguments.seed = 42;
  arguments.lr = 5e-5;
  arguments.weight_decay = 0;
  arguments.micro_batch_size = 8;
  arguments.lr_decay_style = LrDecayStyle::kLinear;
  arguments.attention_dropout = arguments.hidden_dropout = 0;  // from config.json in ROLL
  arguments.distributed_timeout_minutes = 30;
  arguments.ckpt_format = CheckpointFormat::kTorchDcp;
  arguments.async_save = true;
  arguments.use_torch_fsdp2 = true;
  worker.sharding.mixed_precision.param_dtype = at::kBFloat16;
  worker.sharding.mixed_precision.reduce_dtype = at::kFloat;
  worker.sharding.reshard_after_forward = ReshardAfterForward{};  // except the root
  worker.sharding.wrap_policy.emplace();
}

void read_strategy(Reader& reader, const std::string& path, const YAML::Node& node, RollWorker& worker) {
  reader.section(path, node, {}, {"strategy_name", "strategy_config"}, Unknown::kError);
  const auto name = node["strategy_name"];
  const auto strategy = reader.value(path + ".strategy_name", name.IsDefined() ? name : node);
  const std::string text = name.IsDefined() ? strategy.text() : kDefaultStrategy;
  reader.take(strategy, [&] {
    if (text != "fsdp2_train" && text != "fsdp2_infer")
      strategy.fail("is " + text + "; this program runs workers of fsdp2_train and fsdp2_infer");
  });
  worker.trains = text == "fsdp2_train";
  const auto config = node["strategy_config"];
  const std::string inside = path + ".strategy_config";
  reader.section(inside, config, roll_strategy_keys(), {"wrap_policy"}, Unknown::kError);
  if (config.IsDefined() && config.IsMap()) {
    reader.section(inside + ".wrap_policy", config["wrap_policy"], roll_wrap_keys(), {}, Unknown::kError);
  }
}

/// The first of two keys of the same name counts.
std::vector<RollKey> joined(std::span<const RollKey> some, std::span<const RollKey> more) {
  std::vector<RollKey> all(some.begin(), some.end());
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

/// lora_target enables LoRA in ROLL; then freezing by name is ignored, and only training workers have adapters.
void apply_lora(RollWorker& worker, Arguments& arguments) {
  if (arguments.lora_target_modules.empty()) return;
  const auto drop = [&](std::vector<std::string>& words, const char* key) {
    if (!words.empty()) worker.unused.push_back(worker.role + ".model_args." + key);
    words.clear();
  };
  if (!worker.trains) return drop(arguments.lora_target_modules, "lora_target");
  drop(arguments.freeze_module_prefix, "freeze_module_prefix");
  arguments.lora_r = worker.lora_rank.value_or(worker.lora_r.value_or(kLoraRank));
  arguments.lora_alpha = worker.lora_alpha.value_or(2.0 * static_cast<double>(*arguments.lora_r));
}

}  // namespace

bool is_roll_configuration(const YAML::Node& root) { return root.IsMap() && !workers_of(root).empty(); }

RollWorker read_roll_worker(const std::string& path, const std::string& role, Arguments& arguments, KeyLog* log) {
  return parse_roll_worker(read_configuration(path, "--config"), path, role, arguments, log);
}

RollWorker parse_roll_worker(const std::string& text, const std::string& path, const std::string& role,
                             Arguments& arguments, KeyLog* log) {
  const YAML::Node root = compose_defaults(load_yaml(text, path), path);
  const auto workers = root.IsMap() ? workers_of(root) : decltype(workers_of(root)){};
  const auto found =
      std::find_if(workers.begin(), workers.end(), [&](const auto& worker) { return worker.first == role; });
  if (found == workers.end()) {
    std::vector<std::string> names;
    for (const auto& [name, node] : workers) names.push_back(name);
    const auto hint = did_you_mean(role, names);
    throw UsageError("--role " + role + ": " + path + " has no such worker; " +
                     (names.empty() ? "it has none with strategy_args" : "it has " + c10::Join(", ", names)) +
                     (hint.empty() ? "." : hint));
  }
  RollWorker worker;
  worker.role = role;
  set_defaults(worker, arguments);
  Reader reader(path, root, worker, arguments, log);
  const YAML::Node own = found->second;
  read_strategy(reader, role + "." + kStrategyArgs, own[kStrategyArgs], worker);
  if (worker.trains) find_roll_pipeline(root, reader.value(role, own), worker);
  const RollPipeline pipeline = worker.loss.pipeline;
  reader.section(role, own, joined(roll_loss_worker_keys(pipeline), roll_worker_keys()),
                 {"model_args", "training_args", kStrategyArgs}, Unknown::kErrorIfMisspelt);
  reader.section(role + ".model_args", own["model_args"], roll_model_keys(), {}, Unknown::kError);
  reader.section(role + ".training_args", own["training_args"], roll_training_keys(), {}, Unknown::kError);
  apply_lora(worker, arguments);
  const auto keys = joined(roll_loss_keys(pipeline), roll_pipeline_keys());
  std::set<std::string> others;  // sections and settings of the pipeline
  for (const auto& item : root) {
    const auto name = item.first.Scalar();
    if (std::none_of(keys.begin(), keys.end(), [&](const auto& key) { return name == key.name; })) others.insert(name);
  }
  reader.section("", root, keys, others, Unknown::kError);
  reader.throw_if_any();
  if (!arguments.seq_length && worker.response_length)
    arguments.seq_length = worker.prompt_length + *worker.response_length;
  if (worker.trains) take_roll_loss(worker, arguments);
  others.erase(role);
  for (const auto& name : others) reader.leave(reader.value(name, root[name]));
  return worker;
}

}  // namespace megashard
