#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace megashard {

/// A number that a kind takes by a flag of its own, or one of some words, whose value is its place among them.
struct KindOption {
  std::string flag;  ///< "--dpo-beta"
  double initial = 0, least = 0, most = 0;
  std::string help;
  std::vector<std::string> words{};  ///< empty: a number from `least` to `most`
};

/// What a flag chooses by its name, as --objective and --callback do. `Made`: a pointer to an object of the kind.
template <class Made>
struct NamedKind {
  std::string name;
  std::vector<KindOption> options{};
  /// `options`: their values, in the order of the list above.
  std::function<Made(const std::vector<double>& options)> make;
};

/// Adds a kind; the list is in the order of the names.
template <class Made>
void add_kind(std::vector<NamedKind<Made>>& kinds, NamedKind<Made> kind) {
  kinds.insert(std::ranges::lower_bound(kinds, kind.name, {}, &NamedKind<Made>::name), std::move(kind));
}

/// Makes an object of the kind with this name. `values`: those of the options, by flag; options that are missing have
/// their initial value. `what`: "callback", for the error of an unknown name.
template <class Made>
Made make_of_kind(const std::vector<NamedKind<Made>>& kinds, const char* what, const std::string& name,
                  const std::map<std::string, double>& values) {
  const auto kind = std::ranges::find(kinds, name, &NamedKind<Made>::name);
  TORCH_CHECK(kind != kinds.end(), "there is no ", what, " \"", name, "\"");
  std::vector<double> in_order;
  for (const KindOption& option : kind->options) {
    const auto given = values.find(option.flag);
    in_order.push_back(given == values.end() ? option.initial : given->second);
  }
  return kind->make(in_order);
}

}  // namespace megashard
