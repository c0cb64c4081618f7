#include "launch/plan/unit_table.h"

#include <algorithm>
#include <cctype>
#include <sstream>
#include <string>

#include "checkpoint/values/tensor_info.h"
#include "launch/output/text_table.h"

namespace megashard {
namespace {

/// Converts "model.layers.3" to "model.layers.{*}", as in sub_modules_to_wrap.
std::string pattern_of(const std::string& path) {
  std::istringstream names(path);
  std::string pattern, name;
  while (std::getline(names, name, '.')) {
    const bool number = std::ranges::all_of(name, [](unsigned char letter) { return std::isdigit(letter) != 0; });
    pattern += (pattern.empty() ? "" : ".") + (number ? "{*}" : name);
  }
  return pattern.empty() ? "(root)" : pattern;
}

std::string prefetch_of(size_t forward, size_t backward) {
  if (forward + backward == 0) return "-";
  return std::to_string(forward) + " forward, " + std::to_string(backward) + " backward";
}

/// Cells of a row without the number of modules.
std::vector<std::string> cells_of(const UnitSummary& unit, size_t forward, size_t backward) {
  const auto stored = torch_dtype_name(unit.stored), computed = torch_dtype_name(unit.computed_in);
  return {pattern_of(unit.module),
          std::to_string(unit.parameters),
          std::to_string(unit.ranks),
          std::to_string(unit.sharded_bytes),
          std::to_string(unit.gathered_bytes),
          stored == computed ? stored : stored + " -> " + computed,
          prefetch_of(forward, backward)};
}

struct Row {
  std::vector<std::string> cells;
  int64_t modules = 0;
};

}  // namespace

void print_units(const std::vector<UnitSummary>& units) {
  // The last units prefetch fewer neighbours: the row shows the maximum.
  const auto most = [&](const std::string& pattern, auto neighbours) {
    size_t number = 0;
    for (const auto& unit : units) {
      if (pattern_of(unit.module) == pattern) number = std::max(number, (unit.*neighbours).size());
    }
    return number;
  };
  std::vector<Row> rows;
  for (const auto& unit : units) {
    const auto pattern = pattern_of(unit.module);
    auto cells =
        cells_of(unit, most(pattern, &UnitSummary::forward_prefetch), most(pattern, &UnitSummary::backward_prefetch));
    const auto same = std::ranges::find(rows, cells, &Row::cells);
    if (same == rows.end()) {
      rows.push_back({std::move(cells), 1});
    } else {
      ++same->modules;
    }
  }
  TextTable table({"unit", "modules", "parameters each", "ranks", "bytes a rank", "gathered", "dtype", "prefetch"},
                  {1, 2, 3, 4, 5});
  for (auto& [cells, modules] : rows) {
    cells.insert(cells.begin() + 1, std::to_string(modules));
    table.add(std::move(cells));
  }
  table.print();
}

}  // namespace megashard
