#include "framework/arguments/yaml_text.h"

#include <set>

#include "framework/mistakes.h"

namespace megashard {
namespace {

class DuplicateKeys {
 public:
  explicit DuplicateKeys(const std::string& source) : source_(source) {}

  void refuse(const YAML::Node& root) {
    find(root);
    mistakes_.tell();
  }

 private:
  void find(const YAML::Node& node) {
    if (!node.IsMap() && !node.IsSequence()) return;
    if (!seen_.insert(node.Mark().pos).second) return;  // an alias: once is enough
    if (node.IsSequence()) {
      for (const auto& item : node) find(item);
      return;
    }
    std::set<std::string> keys;
    for (const auto& item : node) {
      const auto& key = item.first;
      const bool merge = key.IsScalar() && key.Scalar() == "<<";
      if (key.IsScalar() && !merge && !keys.insert(key.Scalar()).second) {
        mistakes_.add(source_ + ":" + std::to_string(key.Mark().line + 1) + ": " + key.Scalar() +
                      " is given twice; keep one.");
      }
      find(item.second);
    }
  }

  const std::string& source_;
  Mistakes mistakes_;
  std::set<int> seen_;  // where nodes begin
};

}  // namespace

YAML::Node load_yaml(const std::string& text, const std::string& source) {
  YAML::Node root;
  try {
    root = YAML::Load(text);
  } catch (const YAML::ParserException& error) {
    throw UsageError(source + ":" + std::to_string(error.mark.line + 1) + ": this is not YAML: " + error.msg + ".");
  }
  DuplicateKeys(source).refuse(root);
  return root;
}

}  // namespace megashard
