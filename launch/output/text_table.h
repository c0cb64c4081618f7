#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace megashard {

std::string mebibytes(int64_t bytes);  ///< "0.27"

/// A table with columns as wide as their widest cell; those in `right` are right-aligned.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> titles, std::set<size_t> right = {}) : right_(std::move(right)) {
    add(std::move(titles));
  }
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  /// Prints an empty line and the table; nothing if it has only titles.
  void print() const;

 private:
  std::set<size_t> right_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace megashard
