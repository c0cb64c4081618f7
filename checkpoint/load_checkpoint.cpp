#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <unordered_set>

#include "checkpoint/checkpoint.h"
#include "checkpoint/files/work_progress.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/find_step.h"
#include "checkpoint/values/gather_values.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/tensor_info.h"
#include "parallel/collectives/agreement.h"

namespace megashard {
namespace {

using Wanted = std::function<bool(const std::string& key)>;

LoadReport compare_names(const CheckpointReader& reader, const ShardedTensors& tensors, const Wanted& is_wanted) {
  LoadReport report;
  std::unordered_set<std::string> asked;
  for (const auto& [key, tensor] : tensors) {
    asked.insert(key);
    if (is_wanted(key) && !reader.contains(key)) report.missing.push_back(key);
  }
  for (const auto& [key, dtype, sizes] : reader.tensors()) {
    if (is_extra_state(key) || reader.is_value(key)) continue;
    if (is_wanted(key) && asked.count(key) == 0) report.unexpected.push_back(key);
  }
  return report;
}

bool has_with_sizes(const CheckpointReader& reader, const std::string& key, const ShardedTensor& tensor) {
  const auto* info = reader.find(key);
  return info != nullptr && info->sizes == tensor.global_sizes;
}

/// The tensors in the form that the step has (LoadOptions::other_forms).
ShardedTensors as_stored(const CheckpointReader& reader, const ShardedTensors& tensors, const LoadOptions& options) {
  ShardedTensors stored;
  for (const auto& [key, tensor] : tensors) {
    ShardedTensors other;
    if (options.other_forms && !has_with_sizes(reader, key, tensor)) {
      for (auto& form : options.other_forms(key, tensor)) {
        const bool fits = std::ranges::all_of(
            form, [&](const auto& part) { return has_with_sizes(reader, part.first, part.second); });
        if (fits && other.empty()) other = std::move(form);
      }
    }
    if (other.empty()) stored.emplace_back(key, tensor);
    std::ranges::move(other, std::back_inserter(stored));
  }
  return stored;
}

/// Names of the weights and of the numbered parameters, from the caller's tensors.
ModelNames names_of(const ShardedTensors& tensors, const LoadOptions& options) {
  ModelNames names{.others = options.other_names, .parameters = options.parameters};
  for (const auto& [key, tensor] : tensors) {
    if (is_model_key(key)) names.weights.push_back(key.substr(kModelPrefix.size()));
  }
  return names;
}

Value report_value(const LoadReport& report) {
  const auto list_of = [](const std::vector<std::string>& names) {
    return List{std::vector<Value>(names.begin(), names.end())};
  };
  return Tuple{{list_of(report.missing), list_of(report.unexpected)}};
}

/// Merges the reports of all ranks, since keys may be missing on some only.
LoadReport merge_reports(const std::vector<Value>& reports) {
  std::set<std::string> missing, unexpected;
  for (const auto& report : reports) {
    for (const auto& name : report.as_items()[0].as_items()) missing.insert(name.as_string());
    for (const auto& name : report.as_items()[1].as_items()) unexpected.insert(name.as_string());
  }
  return {{missing.begin(), missing.end()}, {unexpected.begin(), unexpected.end()}, {}};
}

void check_fit(CheckpointReader& reader, const ShardedTensors& tensors, const Wanted& is_wanted) {
  for (const auto& [key, tensor] : tensors) {
    if (is_wanted(key) && reader.contains(key)) reader.check_fit(key, tensor);
  }
}

/// First reads the tensors that need a conversion, then all others together.
void read_tensors(CheckpointReader& reader, const ShardedTensors& tensors) {
  int64_t bytes = 0;
  for (const auto& [key, tensor] : tensors) bytes += static_cast<int64_t>(tensor.local.nbytes());
  LongWork work("load", bytes);
  ReadQueue reads;
  for (const auto& [key, tensor] : tensors) {
    const auto waiting = reads.bytes();
    reader.read_into(key, tensor, reads);
    work.add(static_cast<int64_t>(tensor.local.nbytes()) - (reads.bytes() - waiting));
  }
  reads.run(&work);
}

void check_names(const LoadReport& report, const std::string& folder) {
  std::string text;
  const auto spelled = [&](std::vector<std::string> keys) {
    for (auto& key : keys) key = report.names.spelled(key);
    return keys;
  };
  if (!report.missing.empty()) {
    text += "; missing keys (" + std::to_string(report.missing.size()) + "): " + listed(spelled(report.missing));
  }
  if (!report.unexpected.empty()) {
    text +=
        "; unexpected keys (" + std::to_string(report.unexpected.size()) + "): " + listed(spelled(report.unexpected));
  }
  TORCH_CHECK_VALUE(text.empty(), "the checkpoint ", folder, " does not fit this model", text);
}

}  // namespace

LoadedCheckpoint load_checkpoint(const CheckpointStep& step, const ShardedTensors& given, const ProcessGroupPtr& group,
                                 const LoadOptions& options) {
  ShardedTensors tensors;
  const auto& folder = step.folder;
  const Wanted is_wanted = [&](const std::string& key) { return !options.wanted || options.wanted(key); };
  std::unique_ptr<CheckpointReader> reader;
  LoadedCheckpoint loaded;
  StepNames names;
  loaded.report = merge_reports(gather_values(group, [&] {
    if (options.format) expect_format(folder, *options.format);
    reader = open_step_for(names_of(given, options), folder, &names);
    tensors = as_stored(*reader, given, options);
    return report_value(compare_names(*reader, tensors, is_wanted));
  }));
  loaded.report.names = names;
  all_or_throw(group, [&] {
    if (options.strict) {
      check_fit(*reader, tensors, is_wanted);
      check_names(loaded.report, folder);
    }
    std::unordered_set<std::string> asked;
    for (const auto& [key, tensor] : tensors) asked.insert(key);
    loaded.values =
        reader->read_values([&](const std::string& key) { return asked.count(key) == 0 && is_wanted(key); });
  });
  if (options.accept) all_or_rethrow(group, [&] { options.accept(loaded.values, loaded.report); });
  all_or_throw(group, [&] { check_fit(*reader, tensors, is_wanted); });
  all_or_throw(group, [&] {
    ShardedTensors found;
    std::ranges::copy_if(tensors, std::back_inserter(found),
                         [&](const auto& entry) { return is_wanted(entry.first) && reader->contains(entry.first); });
    read_tensors(*reader, found);
  });
  return loaded;
}

LoadedCheckpoint load_checkpoint(const std::string& directory, const ShardedTensors& tensors,
                                 const ProcessGroupPtr& group, const LoadOptions& options) {
  const auto step = find_step(directory, group);
  TORCH_CHECK_VALUE(step, directory, " holds no checkpoint (no latest_checkpointed_iteration.txt); check the path");
  return load_checkpoint(*step, tensors, group, options);
}

}  // namespace megashard
