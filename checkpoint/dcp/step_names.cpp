#include "checkpoint/dcp/step_names.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/tensor_info.h"

namespace megashard {
namespace {

constexpr std::string_view kState = "state.";

/// The number of a parameter in PyTorch's optimizer.state_dict(); nullopt for names.
std::optional<size_t> number_of(std::string_view name) {
  size_t number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  const bool is_number = error == std::errc() && end == name.data() + name.size();
  return is_number ? std::optional(number) : std::nullopt;
}

std::string_view without_buffer(std::string_view key) {
  const auto dot = key.rfind('.');
  return dot == key.npos ? std::string_view() : key.substr(0, dot);
}

/// Finds the prefixes of a step's names: each key votes for the prefixes before a known name.
class NameSearch {
 public:
  explicit NameSearch(const ModelNames& model) {
    for (const auto* names : {&model.weights, &model.others}) {
      for (const auto& name : *names) {
        whole_.insert(name);
        if (name.starts_with(kModelPrefix)) short_.insert(std::string_view(name).substr(kModelPrefix.size()));
      }
    }
    enough_ = static_cast<int64_t>(model.weights.size() + 1) / 2;
  }

  StepNames search(const std::vector<DcpEntry>& entries) {
    Votes weights, states;
    for (const auto& entry : entries) {
      if (entry.tensor() == nullptr) continue;
      vote(entry.key, "", weights);
      vote(without_buffer(entry.key), kState, states);
    }
    StepNames names;
    if (const auto best = best_of(weights, names.model); best && weights.at(*best) >= enough_) {
      names.model = best->text;
      names.dropped = best->is_short ? std::string(kModelPrefix) : "";
    } else if (are_at_the_top(entries)) {
      names.model = "";
    }
    if (const auto best = best_of(states, names.optimizer)) names.optimizer = best->text;
    return names;
  }

 private:
  struct Prefix {
    std::string text;
    bool is_short;
    auto operator<=>(const Prefix&) const = default;
  };
  using Votes = std::map<Prefix, int64_t>;

  void vote(std::string_view key, std::string_view last_part, Votes& votes) const {
    for (size_t begin = 0; begin < key.size();) {
      const auto name = key.substr(begin), before = key.substr(0, begin);
      const auto dot = key.find('.', begin);
      begin = dot == key.npos ? key.size() : dot + 1;
      if (!before.ends_with(last_part)) continue;
      const auto prefix = std::string(before.substr(0, before.size() - last_part.size()));
      if (!prefix.empty() && prefix.back() != '.') continue;  // such as "rng_state."
      if (whole_.contains(name)) ++votes[{prefix, false}];
      if (short_.contains(name)) ++votes[{prefix, true}];
      if (!last_part.empty() && number_of(name)) ++votes[{prefix, false}];
    }
  }

  /// Takes the prefix with the most votes. Where votes are equal: whole names first, then ours, then the shorter one.
  static std::optional<Prefix> best_of(const Votes& votes, const std::string& ours) {
    const Prefix* best = nullptr;
    int64_t most = 0;
    const auto rank = [&](const Prefix& each) {
      return std::tuple(each.is_short, each.text != ours, each.text.size());
    };
    for (const auto& [prefix, count] : votes) {
      const bool is_better = count > most || (count == most && rank(prefix) < rank(*best));
      if (best == nullptr || is_better) best = &prefix, most = count;
    }
    return best == nullptr ? std::nullopt : std::optional(*best);
  }

  /// True if the weights have no prefix; used if too few known names are found.
  static bool are_at_the_top(const std::vector<DcpEntry>& entries) {
    const auto is_weight_at_top = [](const DcpEntry& entry) {
      return entry.tensor() != nullptr && entry.path.size() == 1 && !is_optimizer_key(entry.key) &&
             !entry.key.starts_with(kRngStateKey);
    };
    const auto is_nested = [](const DcpEntry& entry) {
      return entry.tensor() != nullptr && entry.path.size() > 1 && is_model_key(entry.key);
    };
    return std::none_of(entries.begin(), entries.end(), is_nested) &&
           std::any_of(entries.begin(), entries.end(),
                       [&](const DcpEntry& entry) { return is_weight_at_top(entry) && !is_model_key(entry.key); });
  }

  std::unordered_set<std::string_view> whole_, short_;  // short: without "model."
  int64_t enough_ = 0;                                  // votes
};

class Renaming {
 public:
  Renaming(const StepNames& names, const ModelNames& model)
      : names_(names), known_(model.weights.begin(), model.weights.end()), parameters_(model.parameters) {
    known_.insert(model.others.begin(), model.others.end());
  }

  void rename(DcpMetadata& metadata) {
    const StepNames ours;
    if (names_.model != ours.model || !names_.dropped.empty()) {
      for (auto& entry : metadata.entries) rename_weight(entry);
    }
    for (const auto& entry : metadata.entries) {
      if (const auto* tensor = entry.tensor()) sizes_.emplace(entry.key, &tensor->sizes);
    }
    for (auto& entry : metadata.entries) rename_optimizer(entry);
  }

 private:
  /// Converts a name in the step to the weight's.
  std::string whole(std::string name) const {
    const bool lacks = !names_.dropped.empty() && !known_.contains(name) && known_.contains(names_.dropped + name);
    return lacks ? names_.dropped + name : name;
  }

  void rename_weight(DcpEntry& entry) const {
    if (entry.tensor() == nullptr || !entry.key.starts_with(names_.model)) return;
    if (entry.key.starts_with(names_.optimizer + std::string(kState))) return;
    const auto name = whole(entry.key.substr(names_.model.size()));
    const bool is_of_other = names_.model.empty() && entry.path.size() > 1 && !known_.contains(name);
    if (is_of_other) return;
    entry.key = model_key(name);
    entry.path = tensor_path(entry.key);
  }

  void rename_optimizer(DcpEntry& entry) const {
    const auto& prefix = names_.optimizer;
    if (!entry.key.starts_with(prefix)) return;
    auto key = std::string(kOptimizerPrefix) + entry.key.substr(prefix.size());
    auto parts = split_optimizer_state_key(key);
    const auto number = parts ? number_of(parts->weight) : std::nullopt;
    if (number && parameters_.empty()) return;
    if (number) {
      parts->weight = parameter(*number, entry);
    } else if (parts) {
      parts->weight = whole(parts->weight);
    }
    if (parts) key = optimizer_state_key(parts->weight, parts->buffer);
    if (key == entry.key && !number) return;
    const auto depth = static_cast<std::ptrdiff_t>(std::count(prefix.begin(), prefix.end(), '.'));
    if (parts) {
      entry.path = tensor_path(key);
    } else if (std::ssize(entry.path) > depth) {
      entry.path.erase(entry.path.begin(), entry.path.begin() + depth);
      entry.path.insert(entry.path.begin(), kOptimizerKey);
    }
    entry.key = std::move(key);
  }

  const std::string& parameter(size_t number, const DcpEntry& entry) const {
    constexpr const char* kRemedy =
        "; save PyTorch's get_optimizer_state_dict(model, optimizer), which has names, or load without the optimizer "
        "(--no-load-optim)";
    const auto* tensor = entry.tensor();
    const auto found = number < parameters_.size() ? sizes_.find(model_key(parameters_[number])) : sizes_.end();
    const bool fits =
        found != sizes_.end() && (tensor == nullptr || tensor->sizes.empty() || tensor->sizes == *found->second);
    TORCH_CHECK_VALUE(
        fits, "the optimizer's state is numbered, and ", entry.key, " of sizes ",
        tensor == nullptr ? "[]" : describe_sizes(tensor->sizes), " is not that of parameter ", number, " of the model",
        number < parameters_.size() ? ", " + parameters_[number] : ", which has " + std::to_string(parameters_.size()),
        ": numbers are in the order of model.parameters(), in one group", kRemedy);
    return parameters_[number];
  }

  const StepNames& names_;
  std::unordered_set<std::string> known_;
  const std::vector<std::string>& parameters_;
  std::unordered_map<std::string, const std::vector<int64_t>*> sizes_;  // key -> sizes
};

/// Throws for numbered state of several groups: numbers count through all groups, which need not be the order of the
/// model.
void check_groups(const DcpMetadata& metadata, const StepNames& names) {
  const auto second = names.optimizer + kParamGroupsKey + ".1.";
  const auto first_number = names.optimizer + std::string(kState) + "0.";
  bool has_second = false, is_numbered = false;
  for (const auto& entry : metadata.entries) {
    has_second = has_second || entry.key.starts_with(second);
    is_numbered = is_numbered || entry.key.starts_with(first_number);
  }
  TORCH_CHECK_VALUE(
      !has_second || !is_numbered,
      "the optimizer's state is numbered over several groups of parameters, and nothing says which these are; save "
      "PyTorch's get_optimizer_state_dict(model, optimizer), which has names, or load without the optimizer "
      "(--no-load-optim)");
}

}  // namespace

std::string StepNames::spelled(const std::string& key) const {
  const auto shortened = [this](const std::string& name) {
    return name.starts_with(dropped) ? name.substr(dropped.size()) : name;
  };
  if (is_model_key(key)) return model + shortened(key.substr(kModelPrefix.size()));
  if (const auto parts = split_optimizer_state_key(key))
    return optimizer + std::string(kState) + shortened(parts->weight) + "." + parts->buffer;
  return key;
}

std::string StepNames::told() const {
  if (*this == StepNames()) return "";
  return "the step's keys are " + model + "<weight>" + (dropped.empty() ? "" : " without the names' first " + dropped) +
         " and " + optimizer + "state.<weight>.<buffer>: read as model.<weight> and optimizer.state.<weight>.<buffer>";
}

StepNames take_own_names(DcpMetadata& metadata, const ModelNames& model) {
  const auto names = NameSearch(model).search(metadata.entries);
  if (!model.parameters.empty()) check_groups(metadata, names);
  Renaming(names, model).rename(metadata);
  return names;
}

void take_bare_names(DcpMetadata& metadata) {
  std::unordered_set<std::string> keys;
  for (auto& entry : metadata.entries) {
    if (entry.tensor() != nullptr && is_model_key(entry.key)) {
      entry.key = entry.key.substr(kModelPrefix.size());
      entry.path = {entry.key};
    }
    TORCH_CHECK_VALUE(keys.insert(entry.key).second, "without \"model.\" before its name, the weight ", entry.key,
                      " has the key of something else in the checkpoint; leave --ckpt-bare-names out");
  }
}

}  // namespace megashard
