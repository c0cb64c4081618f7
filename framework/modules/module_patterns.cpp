#include "framework/modules/module_patterns.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>
#include <set>
#include <unordered_set>
#include <utility>

#include "framework/arguments/nearest_name.h"

namespace megashard {

namespace {

using Indices = std::vector<std::pair<int64_t, int64_t>>;  // inclusive ranges

/// "a.b.{0-3,7}.c" in three parts; without braces all is `prefix`.
struct Pattern {
  std::string text;
  std::vector<std::string> prefix;
  std::vector<std::string> suffix;
  bool braces = false;
  std::optional<Indices> indices;  // unset: {*}
};

[[noreturn]] void malformed(const std::string& key, const std::string& pattern,
                            const std::string& why) {
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
    if (!good || result.ptr != end)
      malformed(key, pattern, "has \"" + part + "\", which is no index and no range");
    ranges.emplace_back(first, last);
  }
  return ranges;
}

Pattern parse_pattern(const std::string& key, const std::string& text) {
  Pattern pattern{
      .text = text, .prefix = {}, .suffix = {}, .braces = false, .indices = std::nullopt};
  const auto opening = std::count(text.begin(), text.end(), '{'),
             closing = std::count(text.begin(), text.end(), '}');
  if (opening > 1 || closing > 1) malformed(key, text, "has more than one pair of braces");
  const auto open = text.find('{'), close = text.find('}');
  if (opening != closing || (opening == 1 && close < open))
    malformed(key, text, "has braces that do not match");
  if (opening == 0) {
    pattern.prefix = split(text, '.');
  } else {
    pattern.braces = true;
    const bool whole = (open == 0 || text[open - 1] == '.') &&
                       (close + 1 == text.size() || text[close + 1] == '.');
    if (!whole) malformed(key, text, "has braces that are only part of a name");
    if (open > 0) pattern.prefix = split(text.substr(0, open - 1), '.');
    if (close + 1 < text.size()) pattern.suffix = split(text.substr(close + 2), '.');
    const auto inside = text.substr(open + 1, close - open - 1);
    if (inside != "*") pattern.indices = parse_indices(key, text, inside);
  }
  for (const auto* names : {&pattern.prefix, &pattern.suffix}) {
    if (std::find(names->begin(), names->end(), "") != names->end())
      malformed(key, text, "has an empty name");
  }
  return pattern;
}

struct Walk {
  NamedModule reached;  // null module: not found
  std::string problem;  // why not
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
  return !name.empty() && std::all_of(name.begin(), name.end(),
                                      [](unsigned char c) { return std::isdigit(c) != 0; });
}

/// Indices of a list-like module; none when it has children with other names.
std::optional<int64_t> list_length(const torch::nn::Module& module) {
  const auto children = module.named_children();
  for (const auto& item : children) {
    if (!is_index(item.key())) return std::nullopt;
  }
  return static_cast<int64_t>(children.size());
}

class Selector {
 public:
  Selector(const torch::nn::Module& model, const std::string& key, Strictness strictness,
           const DiagnosticSink& sink)
      : model_(model), key_(key), strictness_(strictness), sink_(sink) {}

  void select(const std::string& text) {
    selection_.matches.push_back({text, {}});
    const auto pattern = parse_pattern(key_, text);
    if (pattern.braces) {
      expand(pattern);
    } else {
      take(text, walk(model_, {}, pattern.prefix));
    }
    const bool nothing = selection_.matches.back().paths.empty();
    if (nothing && !complained_) complain(text, "matches no module");
    complained_ = false;
  }

  ModuleSelection result() && { return std::move(selection_); }

 private:
  void expand(const Pattern& pattern) {
    const auto container = walk(model_, {}, pattern.prefix);
    const torch::nn::Module* list = pattern.prefix.empty() ? &model_ : container.reached.module;
    const auto length = list == nullptr ? std::nullopt : list_length(*list);
    if (!length) {
      const std::string why = list == nullptr
                                  ? container.problem
                                  : container.reached.path + " is not a list of modules";
      if (!pattern.indices) {
        throw UsageError(key_ + ": {*} in \"" + pattern.text + "\" needs a list of modules, but " +
                         sentence(why));
      }
      complain(pattern.text, why);
      return;
    }
    for (const int64_t index : indices(pattern, *length)) {
      auto names = pattern.suffix;
      names.insert(names.begin(), std::to_string(index));
      take(pattern.text, walk(model_, container.reached, names));
    }
  }

  /// Existing ones, ascending, each once; the others are told.
  std::vector<int64_t> indices(const Pattern& pattern, int64_t length) {
    const Indices all = {{0, length - 1}};
    std::set<int64_t> existing;
    int64_t largest = -1;
    for (const auto& [first, last] : pattern.indices ? *pattern.indices : all) {
      for (int64_t index = first; index <= std::min(last, length - 1); ++index)
        existing.insert(index);
      largest = std::max(largest, last);
    }
    if (pattern.indices && largest >= length) {
      complain(pattern.text, "goes up to index " + std::to_string(largest) + ", but the list has " +
                                 std::to_string(length) + " modules");
    }
    return {existing.begin(), existing.end()};
  }

  void take(const std::string& text, const Walk& found) {
    if (found.reached.module == nullptr) {
      complain(text, found.problem + class_hint(text));
      return;
    }
    selection_.matches.back().paths.push_back(found.reached.path);
    if (seen_.insert(found.reached.module).second) selection_.modules.push_back(found.reached);
  }

  /// Other frameworks take class names under the same keys.
  static std::string class_hint(const std::string& text) {
    const auto last = text.substr(text.rfind('.') + 1);
    const bool capital =
        !last.empty() && std::isupper(static_cast<unsigned char>(last.front())) != 0;
    return capital ? "; it looks like a class, but this key takes paths of modules" : "";
  }

  static std::string sentence(const std::string& text) {
    return text.ends_with('?') ? text : text + ".";
  }

  void complain(const std::string& text, const std::string& why) {
    complained_ = true;
    const std::string message =
        key_ + ": Module not found at path \"" + text + "\": " + sentence(why);
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

}  // namespace

ModuleSelection select_modules(const torch::nn::Module& model,
                               const std::vector<std::string>& patterns, const std::string& key,
                               Strictness strictness, const DiagnosticSink& sink) {
  Selector selector(model, key, strictness, sink);
  for (const auto& pattern : patterns) selector.select(pattern);
  return std::move(selector).result();
}

std::string describe_match(const PatternMatch& match) {
  const auto& paths = match.paths;
  std::string text = match.pattern + " -> ";
  if (paths.empty()) return text + "no module";
  if (paths.size() == 1) return text + "1 module (" + paths.front() + ")";
  return text + std::to_string(paths.size()) + " modules (" + paths.front() + " .. " +
         paths.back() + ")";
}

}  // namespace megashard
