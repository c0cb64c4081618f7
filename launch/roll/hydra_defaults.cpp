#include "launch/roll/hydra_defaults.h"

#include <filesystem>
#include <sstream>

#include "framework/arguments/argument_value.h"
#include "framework/arguments/yaml_value.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;

constexpr const char* kDefaults = "defaults";
constexpr const char* kSelf = "_self_";
constexpr int kDeepest = 16;

/// Merges maps recursively; other values of `other` replace those of `base`.
YAML::Node merged(const YAML::Node& base, const YAML::Node& other) {
  if (!base.IsDefined() || !base.IsMap() || !other.IsMap()) return other;
  YAML::Node result;
  for (const auto& item : base) {
    const YAML::Node over = other[item.first.Scalar()];
    result[item.first] = over.IsDefined() ? merged(item.second, over) : item.second;
  }
  for (const auto& item : other) {
    if (!base[item.first.Scalar()].IsDefined()) result[item.first] = item.second;
  }
  return result;
}

/// Wraps `node` as the value of a dotted key; empty: unchanged.
YAML::Node inside(const std::string& package, const YAML::Node& node) {
  YAML::Node result = node;
  const auto words = package.empty() ? std::vector<std::string>{} : split_text(package, ".");
  for (auto word = words.rbegin(); word != words.rend(); ++word) {
    YAML::Node outer;
    outer[*word] = result;
    result = outer;
  }
  return result;
}

/// The NAME of `# @package NAME` in the first lines of a file; empty if absent.
std::string package_of_header(const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line) && (line.empty() || line.front() == '#');) {
    std::istringstream words(line.substr(std::min<size_t>(1, line.size())));
    std::string mark, name;
    if (words >> mark >> name && mark == "@package") return name;
  }
  return "";
}

/// An entry of a defaults list.
struct Entry {
  std::string file;     // relative, without .yaml; _self_; empty: none
  std::string package;  // as written; empty: from the file's header or its group
};

class Composer {
 public:
  /// Composes a file's content at the key `package`.
  YAML::Node compose(const YAML::Node& root, const std::string& path, const std::string& package, int depth) {
    if (!root.IsMap()) return root;
    const YAML::Node defaults = root[kDefaults];
    if (!defaults.IsDefined()) return inside(package, root);
    const YamlValue list{path, kDefaults, defaults};
    if (!defaults.IsSequence()) list.expected("a list of files");
    if (depth == 0) list.fail("names files that name each other, or too many one behind the other");
    YAML::Node own;
    for (const auto& item : root) {
      if (item.first.Scalar() != kDefaults) own[item.first] = item.second;
    }
    YAML::Node result;
    bool has_self = false;
    for (const auto& item : defaults) {
      const Entry entry = read(YamlValue{path, kDefaults, item});
      if (entry.file.empty()) continue;
      has_self = has_self || entry.file == kSelf;
      result = merged(result, entry.file == kSelf ? inside(package, own)
                                                  : file(YamlValue{path, kDefaults, item}, entry, package, depth));
    }
    return has_self ? result : merged(result, inside(package, own));
  }

 private:
  static Entry read(const YamlValue& item) {
    if (item.node.IsMap() && item.node.size() == 1) {  // group: FILE
      const auto choice = *item.node.begin();
      auto group = choice.first.Scalar();
      if (group.starts_with("override ") || group.starts_with("optional "))
        item.fail("has " + group + "; name the file itself, as in \"group/FILE\"");
      if (choice.second.IsNull() || !choice.second.IsScalar()) return {};
      const auto at = group.find('@');
      return {group.substr(0, at) + "/" + choice.second.Scalar(), at == group.npos ? "" : group.substr(at + 1)};
    }
    if (item.node.IsNull()) return {};
    if (!item.node.IsScalar()) item.expected("files, as in [../config/envs@_here_]");
    const auto text = item.node.Scalar();
    const auto at = text.find('@');
    return {text.substr(0, at), at == text.npos ? "" : text.substr(at + 1)};
  }

  YAML::Node file(const YamlValue& item, const Entry& entry, const std::string& outer, int depth) {
    const auto folder = fs::path(item.source).parent_path();
    const auto path = (folder / (entry.file.ends_with(".yaml") ? entry.file : entry.file + ".yaml")).string();
    if (!fs::is_regular_file(path))
      item.fail("names " + entry.file + ", but there is no file " + path + "; copy it too, or remove the entry");
    const auto text = read_configuration(path, "a file of defaults,");
    auto package = entry.package.empty() ? package_of_header(text) : entry.package;
    const auto join = [&outer](const std::string& inner) {
      return outer.empty() || inner.empty() ? outer + inner : outer + "." + inner;
    };
    if (package == "_global_") {
      package = "";
    } else if (package == "_here_") {
      package = outer;
    } else if (package.empty() || package == "_group_") {  // the group is the file's folder
      auto group = fs::path(entry.file).parent_path().lexically_normal().generic_string();
      if (group.find("..") != group.npos)
        item.fail("names " + entry.file + " without a package; write " + entry.file + "@_here_ to merge it here");
      for (auto& letter : group) letter = letter == '/' ? '.' : letter;
      package = join(group);
    } else {
      package = join(package);
    }
    return compose(load_yaml(text, path), path, package, depth - 1);
  }
};

}  // namespace

YAML::Node compose_defaults(const YAML::Node& root, const std::string& path) {
  return Composer().compose(root, path, "", kDeepest);
}

}  // namespace megashard
