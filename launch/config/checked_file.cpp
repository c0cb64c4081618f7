#include "launch/config/checked_file.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/configuration_file.h"
#include "framework/mistakes.h"
#include "framework/modules/fsdp2_config.h"
#include "launch/arguments/argument_file.h"
#include "launch/mindspeed/mindspeed_run.h"
#include "launch/plan/device_file.h"
#include "launch/roll/roll_keys.h"
#include "launch/roll/roll_worker.h"

namespace megashard {
namespace {

void ignore(Severity, const std::string&) {}

bool has_any(const YAML::Node& root, std::initializer_list<const char*> keys) {
  return std::ranges::any_of(keys, [&](const char* key) { return root[key].IsDefined(); });
}

/// For a file without sections: true if more of its keys belong to FSDP2 files than to options.
bool is_fsdp2_file(const YAML::Node& root) {
  if (has_any(root, {"parallel", "fsdp_plan", "recompute_plan", "ep_plan"})) return true;
  const auto known = fsdp2_config_keys();
  std::ptrdiff_t of_file = 0, of_options = 0;
  for (const auto& item : root) {
    const auto name = item.first.Scalar();
    of_file += std::ranges::count(known, name);
    of_options += find_option(name) != nullptr || find_argument(name) != nullptr;
  }
  return of_file > of_options;
}

/// Collects a reader's errors: those of keys are in the log, others belong to the file.
class Check {
 public:
  explicit Check(std::string dialect) { file_.dialect = std::move(dialect); }

  template <class Read>
  void attempt(const Read& read) {
    try {
      Mistakes found;
      read(found, &file_.keys);
      found.throw_if_any();
    } catch (const UsageErrors& errors) {
      for (const auto& message : errors.messages()) add(message);
    } catch (const UsageError& error) {
      add(error.what());
    }
  }

  CheckedFile take() {
    std::ranges::stable_sort(file_.keys, {}, &KeyNote::line);
    return std::move(file_);
  }
  KeyLog& keys() { return file_.keys; }

 private:
  void add(const std::string& message) {
    const bool noted = std::ranges::any_of(file_.keys, [&](const KeyNote& note) {
      return note.use == KeyNote::Use::kRefused && message.ends_with(note.text);
    });
    if (!noted) file_.mistakes.push_back(message);
  }

  CheckedFile file_;
};

CheckedFile check_roll(const std::string& path, const YAML::Node& root, const std::optional<std::string>& role) {
  Check check("configuration of ROLL");
  std::set<std::string> checked;
  for (const auto& [name, strategy] : roll_roles(root)) {
    if (role ? name != *role : !is_roll_strategy(strategy)) continue;
    checked.insert(name);
    Arguments arguments;
    check.attempt([&](Mistakes&, KeyLog* log) { read_roll_worker(path, name, arguments, log); });
  }
  if (checked.empty()) {
    throw UsageError(path + " has no worker " + role.value_or("of fsdp2_train or fsdp2_infer") +
                     "; only those are run here.");
  }
  // Each worker has read the common keys and skipped the other workers'.
  std::set<std::tuple<int, std::string, KeyNote::Use>> seen;
  std::erase_if(check.keys(), [&](const KeyNote& note) {
    return (checked.contains(note.key) && note.use == KeyNote::Use::kIgnored) ||
           !seen.emplace(note.line, note.key, note.use).second;
  });
  return check.take();
}

CheckedFile check_mindspeed(const std::string& path, std::string dialect, std::optional<std::string> Arguments::*flag) {
  Check check(std::move(dialect));
  Arguments arguments;
  arguments.*flag = path;
  check.attempt([&](Mistakes& found, KeyLog* log) { read_mindspeed(std::nullopt, arguments, found, log); });
  return check.take();
}

/// Checks a file for `megashard plan --device`.
CheckedFile check_device(const std::string& path, const YAML::Node& root) {
  Check check("device of megashard plan");
  check.attempt([&](Mistakes&, KeyLog* log) {
    read_device_model(path);  // reads all keys or throws an error about one
    for (const auto& item : root) {
      const YAML::Node& value = item.second;
      const std::string text = value.IsScalar() ? value.Scalar()
                                                : (value.IsMap() ? "a map of " : "a list of ") +
                                                      std::to_string(value.size());
      log->push_back({path, item.first.Mark().line + 1, item.first.Scalar(), KeyNote::Use::kRead, text});
    }
  });
  return check.take();
}

void read_fsdp2(const std::string& path, KeyLog* log) { load_fsdp2_config(path, Strictness::kWarn, ignore, log); }

}  // namespace

CheckedFile check_file(const std::string& path, const std::optional<std::string>& role) {
  const YAML::Node root = load_yaml(read_configuration(path, "--check"), path);
  if (!root.IsMap()) throw UsageError(path + ": the file must hold `key: value` lines.");
  if (is_roll_configuration(root)) return check_roll(path, root, role);
  if (role) throw UsageError("--role " + *role + ": " + path + " is no configuration of ROLL; leave it out.");
  if (has_any(root, {"flops_32", "memory_bandwidth", "node_bandwidth"})) return check_device(path, root);
  if (has_any(root, {"dataset_param"})) return check_mindspeed(path, "data file of MindSpeed-MM", &Arguments::mm_data);
  if (has_any(root, {"model_id", "image_encoder", "text_decoder"}))
    return check_mindspeed(path, "model file of MindSpeed-MM", &Arguments::mm_model);
  Arguments arguments;
  if (is_native_configuration(path)) {
    Check check("configuration of MindSpeed-MM's native route");
    check.attempt([&](Mistakes&, KeyLog* log) { read_fsdp2(path, log); });
    check.attempt([&](Mistakes& found, KeyLog* log) { read_mindspeed(path, arguments, found, log); });
    return check.take();
  }
  if (!root["gpt_args"].IsDefined() && is_fsdp2_file(root)) {
    Check check("FSDP2 file");
    check.attempt([&](Mistakes&, KeyLog* log) { read_fsdp2(path, log); });
    return check.take();
  }
  Check check("arguments of megashard pretrain");
  check.attempt([&](Mistakes& found, KeyLog* log) { read_argument_file(path, arguments, found, log); });
  check.attempt([&](Mistakes& found, KeyLog* log) { read_mindspeed(path, arguments, found, log); });
  return check.take();
}

}  // namespace megashard
