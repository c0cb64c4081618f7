#include "framework/modules/module_patterns.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <limits>
#include <optional>
#include <set>
#include <unordered_set>
#include <utility>

#include "framework/arguments/nearest_name.h"
#include "framework/mistakes.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

namespace {

using Indices = std::vector<std::pair<int64_t, int64_t>>;  // inclusive ranges

/// One word of a path: a name or braces.
struct PathWord {
  std::string name;
  bool braces = false;
  std::optional<Indices> indices{};  // for braces; unset: {*}
};

struct Pattern {
  std::string text;
  std::vector<PathWord> words;
};

[[noreturn]] void malformed(const std::string& key, const std::string& pattern, const std::string& why) {
  throw UsageError(key + ": \"" + pattern + "\" " + why +
                   "; write for example model.layers.{*} or model.layers.{0-3,7}.");
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char letter : text) {
    if (letter == separator) {
      parts.emplace_back();
    } else {
      parts.back() += letter;
    }
  }
  return parts;
}

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

Indices parse_indices(const std::string& key, const std::string& pattern, std::string text) {
  text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
  Indices ranges;
  for (const auto& part : split(text, ',')) {
    int64_t first = 0, last = 0;
    const char* end = part.data() + part.size();
    auto result = std::from_chars(part.data(), end, first);
    bool good = result.ec == std::errc() && first >= 0;
    last = first;
    if (good && result.ptr != end && *result.ptr == '-') {
      result = std::from_chars(result.ptr + 1, end, last);
      good = result.ec == std::errc() && last >= first;
    }
    if (!good || result.ptr != end) malformed(key, pattern, "has \"" + part + "\", which is no index and no range");
    ranges.emplace_back(first, last);
  }
  return ranges;
}

Pattern parse_pattern(const std::string& key, const std::string& text) {
  Pattern pattern{.text = text, .words = {}};
  for (const auto& name : split(text, '.')) {
    if (name.empty()) malformed(key, text, "has an empty name");
    const auto open = name.find('{'), close = name.find('}');
    const auto opening = std::count(name.begin(), name.end(), '{'), closing = std::count(name.begin(), name.end(), '}');
    if (opening != closing || opening > 1 || (opening == 1 && close < open))
      malformed(key, text, "has braces that do not match");
    PathWord word{.name = name, .braces = opening == 1};
    if (word.braces && (open > 0 || close + 1 < name.size()))
      malformed(key, text, "has braces that are only part of a name");
    if (word.braces && name != "{*}") word.indices = parse_indices(key, text, name.substr(1, name.size() - 2));
    pattern.words.push_back(std::move(word));
  }
  return pattern;
}

struct Walk {
  NamedModule reached;  // null module: not found
  std::string problem;  // reason why
};

Walk walk(const torch::nn::Module& model, NamedModule from, const std::vector<std::string>& names) {
  const torch::nn::Module* at = from.module == nullptr ? &model : from.module;
  for (const auto& name : names) {
    const auto children = at->named_children();
    const auto* child = children.find(name);
    if (child == nullptr) {
      std::vector<std::string> known;
      for (const auto& item : children) known.push_back(item.key());
      const std::string parent = from.path.empty() ? "the model" : from.path;
      return {{}, parent + " has no submodule \"" + name + "\"" + did_you_mean(name, known)};
    }
    from = {join(from.path, name), child->get()};
    at = from.module;
  }
  return {from, ""};
}

bool is_index(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
}

/// Number of children of a list-like module; nullopt if children have other names.
std::optional<int64_t> list_length(const torch::nn::Module& module) {
  const auto children = module.named_children();
  for (const auto& item : children) {
    if (!is_index(item.key())) return std::nullopt;
  }
  return static_cast<int64_t>(children.size());
}

class Selector {
 public:
  Selector(const torch::nn::Module& model, const std::string& key, Strictness strictness, const DiagnosticSink& sink)
      : model_(model), key_(key), strictness_(strictness), sink_(sink) {}

  void select(const std::string& text) {
    selection_.matches.push_back({text, {}});
    expand(parse_pattern(key_, text), 0, {});
    const bool nothing = selection_.matches.back().paths.empty();
    if (nothing && !complained_) complain(text, "matches no module");
    complained_ = false;
  }

  ModuleSelection result() && { return std::move(selection_); }

 private:
  /// Expands the words from `next` on, relative to `from` (null module: the model).
  void expand(const Pattern& pattern, size_t next, const NamedModule& from) {
    std::vector<std::string> names;
    while (next < pattern.words.size() && !pattern.words[next].braces) names.push_back(pattern.words[next++].name);
    const auto container = walk(model_, from, names);
    if (next == pattern.words.size()) return take(pattern.text, container);
    const auto& wanted = pattern.words[next].indices;
    const bool whole_model = from.module == nullptr && names.empty();
    const torch::nn::Module* list = whole_model ? &model_ : container.reached.module;
    const auto length = list == nullptr ? std::nullopt : list_length(*list);
    if (!length) {
      const std::string why =
          list == nullptr ? container.problem : container.reached.path + " is not a list of modules";
      if (!wanted && from.module == nullptr) {
        throw UsageError(key_ + ": {*} in \"" + pattern.text + "\" needs a list of modules, but " +
                         with_full_stop(why));
      }
      complain(pattern.text, why);
      return;
    }
    for (const int64_t index : indices(pattern.text, wanted, *length)) {
      const auto each = walk(model_, container.reached, {std::to_string(index)});
      expand(pattern, next + 1, each.reached);
    }
  }

  /// Existing indices, ascending, without duplicates; the others are reported.
  std::vector<int64_t> indices(const std::string& text, const std::optional<Indices>& wanted, int64_t length) {
    const Indices all = {{0, length - 1}};
    std::set<int64_t> existing;
    int64_t largest = -1;
    for (const auto& [first, last] : wanted ? *wanted : all) {
      for (int64_t index = first; index <= std::min(last, length - 1); ++index) existing.insert(index);
      largest = std::max(largest, last);
    }
    if (wanted && largest >= length) {
      complain(text, "goes up to index " + std::to_string(largest) + ", but the list has " + std::to_string(length) +
                         " modules");
    }
    return {existing.begin(), existing.end()};
  }

  void take(const std::string& text, const Walk& found) {
    if (found.reached.module == nullptr) {
      if (!take_class(text)) complain(text, found.problem + class_hint(text));
      return;
    }
    selection_.matches.back().paths.push_back(found.reached.path);
    if (seen_.insert(found.reached.module).second) selection_.modules.push_back(found.reached);
  }

  /// MindSpeed's core accepts class paths under the same keys.
  bool take_class(const std::string& text) {
    const auto name = class_name(text);
    if (name.empty()) return false;
    bool found = false;
    for (const auto& item : model_.named_modules("", /*include_self=*/false)) {
      const auto* hooked = dynamic_cast<const HookedModule*>(item.value().get());
      if (hooked == nullptr || hooked->class_name() != name) continue;
      take(text, {{item.key(), item.value().get()}, ""});
      found = true;
    }
    return found;
  }

  static std::string class_name(const std::string& text) {
    const auto last = text.substr(text.rfind('.') + 1);
    const bool capital = !last.empty() && std::isupper(static_cast<unsigned char>(last.front())) != 0;
    return capital ? last : "";
  }
  static std::string class_hint(const std::string& text) {
    const auto name = class_name(text);
    return name.empty() ? "" : ", nor a module of class " + name;
  }

  static std::string with_full_stop(const std::string& text) { return text.ends_with('?') ? text : text + "."; }

  void complain(const std::string& text, const std::string& why) {
    complained_ = true;
    const std::string message = key_ + ": Module not found at path \"" + text + "\": " + with_full_stop(why);
    if (strictness_ == Strictness::kStrict) throw UsageError(message);
    sink_(Severity::kWarning, message);
  }

  const torch::nn::Module& model_;
  const std::string& key_;
  Strictness strictness_;
  const DiagnosticSink& sink_;
  ModuleSelection selection_;
  std::unordered_set<const torch::nn::Module*> seen_;
  bool complained_ = false;
};

// With it the model's inner module has parts of several kinds, which transformers' classes have as attributes, too.
constexpr const char* kTextPart = "language_model";

/// Calls f(key, patterns) for every pattern list of the file.
template <class Config, class F>
void visit_patterns(Config& config, F f) {
  if (config.sub_modules_to_wrap) f("sub_modules_to_wrap", *config.sub_modules_to_wrap);
  f("ignored_modules", config.ignored_modules);
  f("recompute_modules", config.recompute_modules);
  f("offload_modules", config.offload_modules);
  f("moe_modules", config.moe_modules);
  f("fp8_all_gather_modules", config.fp8_all_gather_modules);
}

}  // namespace

bool matches_native_pattern(std::string_view pattern, std::string_view path) {
  if (pattern.empty()) return path.empty();
  if (pattern.front() == '*') {
    for (size_t taken = 0; taken <= path.size(); ++taken) {
      if (matches_native_pattern(pattern.substr(1), path.substr(taken))) return true;
    }
    return false;
  }
  if (path.empty()) return false;
  if (pattern.front() != '{') {
    const bool one = pattern.front() == '?' || pattern.front() == path.front();
    return one && matches_native_pattern(pattern.substr(1), path.substr(1));
  }
  const auto close = pattern.find('}');
  const auto digits = std::min(path.find_first_not_of("0123456789"), path.size());
  if (close == pattern.npos || digits == 0) return false;
  int64_t index = 0;
  std::from_chars(path.data(), path.data() + digits, index);
  const std::string inside(pattern.substr(1, close - 1));
  const Indices all = {{0, std::numeric_limits<int64_t>::max()}};
  const auto ranges = inside == "*" ? all : parse_indices("pattern", std::string(pattern), inside);
  const bool in = std::any_of(ranges.begin(), ranges.end(),
                              [index](const auto& range) { return range.first <= index && index <= range.second; });
  return in && matches_native_pattern(pattern.substr(close + 1), path.substr(digits));
}

ModuleSelection select_modules_natively(const torch::nn::Module& model, const std::vector<std::string>& patterns,
                                        const std::string& key, Strictness strictness, const DiagnosticSink& sink) {
  ModuleSelection selection;
  for (const auto& pattern : patterns) selection.matches.push_back({pattern, {}});
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    bool selected = false;
    for (auto& match : selection.matches) {
      if (!matches_native_pattern(match.pattern, item.key())) continue;
      match.paths.push_back(item.key());
      if (!selected) selection.modules.push_back({item.key(), item.value().get()});
      selected = true;
    }
  }
  const bool none = selection.modules.empty();
  for (const auto& match : selection.matches) {
    if (!match.paths.empty()) continue;
    const auto message = key + ": \"" + match.pattern + "\" matches no module; correct or remove it.";
    if (none || strictness == Strictness::kStrict) throw UsageError(message);
    sink(Severity::kWarning, message);
  }
  return selection;
}

ModuleSelection select_modules(const torch::nn::Module& model, const std::vector<std::string>& patterns,
                               const std::string& key, Strictness strictness, const DiagnosticSink& sink) {
  Selector selector(model, key, strictness, sink);
  for (const auto& pattern : patterns) selector.select(pattern);
  return std::move(selector).result();
}

namespace {

/// True if the words of a pattern up to the first braces or wildcard are a path of the model.
bool begins_in(const torch::nn::Module& model, const std::string& pattern) {
  std::vector<std::string> names;
  for (auto& word : split(pattern, '.')) {
    if (word.find_first_of("{*?") != word.npos) break;
    names.push_back(std::move(word));
  }
  return walk(model, {}, names).problem.empty();
}

/// Other paths of a model whose inner module has several parts, one of them the language model.
OtherPaths paths_of_parts(const torch::nn::Module& model) {
  OtherPaths paths;
  const auto children = model.named_children();
  const auto* inner = children.find("model");
  if (inner == nullptr) return paths;
  const auto parts = (*inner)->named_children();
  const auto* text = parts.find(kTextPart);
  if (text == nullptr) return paths;
  for (const auto& part : parts) paths.emplace_back(part.key(), "model." + part.key());
  for (const auto& part : (*text)->named_children())
    paths.emplace_back("model." + part.key(), std::string("model.") + kTextPart + "." + part.key());
  return paths;
}

}  // namespace

std::string pattern_here(const torch::nn::Module& model, const OtherPaths& paths, const std::string& pattern) {
  if (begins_in(model, pattern)) return pattern;
  const auto of_parts = paths_of_parts(model);
  for (const auto* some : {&paths, &of_parts}) {
    for (const auto& [theirs, ours] : *some) {
      if (!pattern.starts_with(theirs)) continue;
      const auto rest = pattern.substr(theirs.size());
      if (rest.empty() || rest.front() == '.') return ours + rest;
    }
  }
  return pattern;
}

void translate_patterns(const torch::nn::Module& model, const OtherPaths& paths, Fsdp2Config& config,
                        const DiagnosticSink& sink) {
  const auto translate = [&](const std::string& key, std::string& pattern) {
    auto here = pattern_here(model, paths, pattern);
    if (sink && here != pattern)
      sink(Severity::kNotice, "FSDP2: " + key_in_file(config, key) + ": " + pattern + " is " + here + " in this model");
    pattern = std::move(here);
  };
  visit_patterns(config, [&](const std::string& key, std::vector<std::string>& patterns) {
    for (auto& pattern : patterns) translate(key, pattern);
  });
  for (auto& [pattern, dim] : config.shard_placement.dims) translate("shard_placement", pattern);
}

void check_patterns(const torch::nn::Module& model, const Fsdp2Config& config, Strictness strictness) {
  Mistakes mistakes;
  const auto quiet = [](Severity, const std::string&) {};
  const auto check = [&](const std::string& key, const std::vector<std::string>& patterns) {
    if (config.native_patterns) {
      mistakes.attempt([&] { select_modules_natively(model, patterns, key_in_file(config, key), strictness, quiet); });
      return;
    }
    for (const auto& pattern : patterns)
      mistakes.attempt([&] { select_modules(model, {pattern}, key, strictness, quiet); });
  };
  visit_patterns(config, check);
  for (const auto& [pattern, dim] : config.shard_placement.dims) check("shard_placement", {pattern});
  mistakes.throw_if_any();
}

std::string describe_match(const PatternMatch& match) {
  const auto& paths = match.paths;
  std::string text = match.pattern + " -> ";
  if (paths.empty()) return text + "no module";
  if (paths.size() == 1) return text + "1 module (" + paths.front() + ")";
  return text + std::to_string(paths.size()) + " modules (" + paths.front() + " .. " + paths.back() + ")";
}

}  // namespace megashard
